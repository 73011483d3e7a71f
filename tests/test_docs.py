"""Everything that the pages ask a user to type works: commands are understood, queries are answered."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from deltalake import DeltaTable

from jobs.cli import app
from jobs.lake.columns import live_schema
from jobs.pipelines import PIPELINES, SOURCES, STREAMS
from jobs.pipelines.layout import dag_id_of
from jobs.query.lake import Lake, incidents_table
from jobs.settings import PROJECT

PAGES = [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *sorted((PROJECT / "docs").glob("*.md"))]
_TYPED = re.compile(
    r"^(?:tideline|python -m jobs) (?P<block>.+)$|`(?:tideline|python -m jobs) (?P<inline>[^`]+)`", re.M
)
_OTHER_DAGS = {
    "control_streams",
    "generate_demo_traffic",
    "provision_topics",
    "publish_blocked",
    "reset_stream",
    "rollback_slice",
}
_BATCH_DAGS = {job for p in PIPELINES.values() for job in (p.recompute_job, p.account_job, p.check_job)}
_MADE_UP = {
    f"{kind}_{name}"
    for kind in ("stream", "recompute", "account", "check")
    for name in ("my_pipeline", "JOB", "PIPELINE")
}


def commands() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every command line of the pages: its page and its words."""
    for page in PAGES:
        for found in _TYPED.finditer(page.read_text()):
            yield page.name, tuple(shlex.split(found["block"] or found["inline"], comments=True))


def queries() -> list[str]:
    return sorted({words[1] for _, words in commands() if words[0] == "query" and len(words) > 1})


@pytest.mark.parametrize(("page", "words"), sorted(set(commands())), ids=lambda value: " ".join(value)[:60])
def test_a_command_is_understood(page, words):
    command: click.Command = typer.main.get_command(app)
    context, left = click.Context(command, info_name="tideline"), list(words)
    while isinstance(command, click.Group) and left != ["--help"]:
        name, found, left = command.resolve_command(context, left)
        assert found, name
        command, context = found, click.Context(found, info_name=name, parent=context)
    if left != ["--help"]:
        command.make_context(words[0], left, parent=context.parent)


def test_there_are_commands_to_check():
    assert len(set(commands())) > 15
    assert len(queries()) > 5


def test_named_dags_exist():
    named = {
        dag
        for page in PAGES
        for dag in re.findall(
            r"`(\w+_streams?|(?:stream|recompute|account|check|provision|publish|rollback)_\w+|generate_demo_\w+)`",
            page.read_text(),
        )
    }
    assert named - _MADE_UP <= {*map(dag_id_of, STREAMS), *_OTHER_DAGS, *_BATCH_DAGS}


def test_the_columns_of_incidents_are_those_of_the_relation():
    (chapter,) = re.findall(r"### `incidents`\n(.*?)\n\n[^|]", (PROJECT / "docs" / "data.md").read_text(), re.DOTALL)
    named = [name for cell in re.findall(r"(?m)^\| (`.+?) \|", chapter) for name in re.findall(r"`(\w+)`", cell)]
    assert named == incidents_table([]).column_names


@pytest.mark.spark
def test_queries_are_answered(spark, tmp_path: Path):
    _make_empty_lake(spark, tmp_path)
    lake = Lake(tmp_path)
    for sql in queries():
        if "my_pipeline" not in sql:
            assert lake.query(sql).num_columns, sql


def _make_empty_lake(spark, root: Path) -> None:
    """Create every table as its job does, without rows."""
    from jobs.broker.streams import arrow_schema
    from jobs.streaming.ingest import landed

    columns = "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP"
    records = spark.createDataFrame([], f"{columns}, headers ARRAY<STRUCT<key: STRING, value: BINARY>>")
    for source in SOURCES.values():
        schema = arrow_schema(landed(records, source))
        DeltaTable.create(root / source.events_table, schema=schema, partition_by=["hour"])
    for pipeline in PIPELINES.values():
        DeltaTable.create(root / pipeline.live_table, schema=live_schema(pipeline), partition_by=["slice"])


def test_every_decision_is_in_the_index() -> None:
    folder = PROJECT / "docs" / "decisions"
    linked = re.findall(r"\[(\d+)\]\((\d{4})(-[^)]+\.md)\)", (folder / "README.md").read_text())
    assert all(int(number) == int(name) for number, name, _ in linked)
    assert sorted(name + rest for _, name, rest in linked) == sorted(file.name for file in folder.glob("0*.md"))
