"""Everything that the pages ask a user to type works: commands, queries, targets of `make`, and the files they name."""

import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from deltalake import DeltaTable
from typer.core import TyperGroup

from jobs.cli import app
from jobs.lake.columns import live_schema
from jobs.pipelines import PIPELINES, SOURCES, STREAMS
from jobs.pipelines.layout import dag_id_of
from jobs.query.lake import Lake
from jobs.settings import PROJECT
from tests import pages
from tests.pages import CONTRIBUTING, DECISIONS, MANUALS, PAGES, TYPED_FROM, code, commands, queries
from tideline_airflow import get_provider_info

_OF_DAGS = "".join(file.read_text() for file in MANUALS)
# The DAGs that are there once, and those that each pipeline has.
_OTHER_DAGS = set(re.findall(r'dag_id="(\w+)"', _OF_DAGS))
_KINDS = re.findall(r"dag_id=pipeline\.(\w+)", _OF_DAGS)
_BATCH_DAGS = {getattr(pipeline, kind) for pipeline in PIPELINES.values() for kind in _KINDS}
_MADE = re.compile(r"(?:[A-Z_]+=\S+ )?make (?P<targets>[a-z -]*[a-z])(?P<args> ARGS=.+)?(?: +#.*)?")
_FILE = re.compile(r"(?:jobs|local|plugins|dags|tests|docs|\.ci)/[\w./-]*\w(?:::\w+)?")
# A decision tells of it: the folder that was divided.
_GONE = {"jobs/connectors"}
_MADE_UP = {
    f"{kind}_{name}"
    for kind in ("stream", "recompute", "account", "check")
    for name in ("my_pipeline", "JOB", "PIPELINE")
}


def made() -> list[tuple[str, str]]:
    """Every target of `make` on the pages, and the value of ARGS beside it."""
    found = [_MADE.fullmatch(line) for path in TYPED_FROM for line in code(path)]
    return [
        (target, " ".join(shlex.split(each["args"] or "")).removeprefix("ARGS="))
        for each in found
        if each
        for target in each["targets"].split()
    ]


def recipes() -> dict[str, str]:
    """The lines of each target of the Makefile."""
    return dict(re.findall(r"^([a-z-]+):.*\n((?:\t.*\n)*)", (PROJECT / "Makefile").read_text(), re.MULTILINE))


def passed_on() -> list[tuple[str, tuple[str, ...]]]:
    """The commands of ours that targets call, with the words that pages give to them in ARGS."""
    return [(f"make {t}", (t, *shlex.split(args))) for t, args in made() if args and f"tideline {t} $" in recipes()[t]]


@pytest.mark.parametrize(
    ("page", "words"),
    sorted({*commands(), *passed_on()}),
    ids=lambda value: value if isinstance(value, str) else " ".join(value)[:60],
)
def test_a_command_is_understood(page: str, words: tuple[str, ...]) -> None:
    understand(words)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("nothing",), "No such command"),
        (("streams", "nothing"), "No such command"),
        (("reset", "rolling_sum"), "Missing parameter: to"),
        (("reset", "rolling_sum", "--to", "earliest", "--nothing"), "No such option"),
        (("query", "select 1", "--rows", "many"), "'many' is not a valid int"),
    ],
)
def test_a_command_that_does_not_exist_is_not_understood(words: tuple[str, ...], refusal: str) -> None:
    with pytest.raises(Exception, match=refusal):
        understand(words)


def understand(words: tuple[str, ...]) -> None:
    """Parse a command line as `tideline` does. A page may name a command without its arguments."""
    command, left = typer.main.get_command(app), list(words)
    while left and left != ["--help"] and isinstance(command, TyperGroup):
        context = command.make_context("tideline", list(left))
        _, command, left = command.resolve_command(context, left)
    if left and left != ["--help"]:
        command.make_context(words[0], left)


def test_there_is_enough_to_check():
    assert len(set(commands())) > 50
    assert len(queries()) > 15
    assert len(passed_on()) > 0
    assert len(set(files_named())) > 35
    assert len(places()) > 10


def test_every_target_exists():
    assert {target for target, _ in made()} - set(recipes()) == set()


def files_named() -> list[str]:
    """The files and tests that pages name by their whole path."""
    shown = [line for path in [*TYPED_FROM, *DECISIONS] for line in code(path)]
    return [name for line in shown for name in _FILE.findall(line) if "my_" not in name and name not in _GONE]


@pytest.mark.parametrize("name", sorted(set(files_named())))
def test_a_file_or_test_that_is_named_exists(name: str) -> None:
    path, _, test = name.partition("::")
    assert (PROJECT / path).exists()
    assert not test or f"def {test}(" in (PROJECT / path).read_text()


def places() -> list[tuple[str, str]]:
    """The names of code that the page for contributors gives, each with its file: "`Check` in `window.py`"."""
    return re.findall(r"`(\w+)`[\w ,]*\s+in\s+`([\w/]+\.py)`", CONTRIBUTING.read_text())


@pytest.mark.parametrize(("name", "path"), sorted(set(places())))
def test_a_name_of_code_is_in_its_file(name: str, path: str) -> None:
    assert re.search(rf"^ *(?:def |class )?{name}\b", (PROJECT / path).read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", [*PAGES, *DECISIONS], ids=lambda page: page.name)
def test_a_link_into_a_page_leads_to_a_heading(page: Path) -> None:
    for name, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)]+)\)", page.read_text()):
        text = (page.parent / name if name else page).read_text()
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        # As GitHub makes them: small letters, without punctuation, a hyphen for each space.
        assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, name


def test_every_folder_of_jobs_is_described_in_the_order_of_its_imports() -> None:
    contracts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract.get("containers") == ["jobs"])
    level = {name: number for number, layer in enumerate(reversed(layers)) for name in layer.split(" | ")}
    named = [folder.removeprefix("jobs/") for folder in pages.table("CONTRIBUTING.md", "The tree", "folder").names]
    folders = [name for name in named if name in level]
    assert set(folders) == {path.parent.name for path in (PROJECT / "jobs").glob("*/__init__.py")}
    assert all(level[before] <= level[after] for before, after in pairwise(folders))


def test_the_folders_within_a_folder_are_described_beside_it() -> None:
    for names, what in pages.table("CONTRIBUTING.md", "The tree", "folder").rows:
        (folder,) = pages.in_backticks(names)
        inner = {path.parent.name for path in (PROJECT / folder).glob("*/__init__.py")}
        # The folders of `jobs` have rows of their own, and those of tests mirror the tree.
        assert folder in ("jobs", "tests") or inner <= set(pages.in_backticks(what)), folder


def test_every_marker_of_tests_is_described() -> None:
    options = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    named = pages.table("CONTRIBUTING.md", "Tests", "marker").names
    assert set(named) == {marker.partition(":")[0] for marker in options["markers"]}


def test_airflow_lists_every_module_with_operators() -> None:
    assert_modules_are_listed("operators", "Operator")


def test_airflow_lists_every_module_with_triggers() -> None:
    assert_modules_are_listed("triggers", "Trigger")


def assert_modules_are_listed(kind: str, suffix: str) -> None:
    (listed,) = (each["python-modules"] for each in get_provider_info()[kind])
    files = (PROJECT / "plugins" / "tideline_airflow" / kind).glob("[!_]*.py")
    found = [file.stem for file in files if re.search(rf"^class \w+{suffix}\(", file.read_text(), re.MULTILINE)]
    assert sorted(listed) == [f"tideline_airflow.{kind}.{name}" for name in sorted(found)]


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


def test_the_first_page_lists_every_dag():
    of_each = {name.replace("_rolling_sum", "_PIPELINE") for name in _BATCH_DAGS if name.endswith("_rolling_sum")}
    assert set(pages.table("README.md", "What runs", "DAG").names) == {*map(dag_id_of, STREAMS), *_OTHER_DAGS, *of_each}


@pytest.mark.spark
def test_queries_are_answered(spark, tmp_path: Path):
    _make_empty_lake(spark, tmp_path)
    lake = Lake(tmp_path)
    for sql in queries():
        assert lake.query(sql).num_columns, sql


def _make_empty_lake(spark, root: Path) -> None:
    """Create every table as its job does, without rows."""
    from jobs.broker.streams import arrow_schema
    from jobs.streaming.ingest import landed
    from tests.transforms.kafka_frame import frame

    for source in SOURCES.values():
        schema = arrow_schema(landed(frame(spark, []), source))
        DeltaTable.create(root / source.events_table, schema=schema, partition_by=["hour"])
    for pipeline in PIPELINES.values():
        DeltaTable.create(root / pipeline.live_table, schema=live_schema(pipeline), partition_by=["slice"])


def test_every_decision_is_in_the_index() -> None:
    folder = PROJECT / "docs" / "decisions"
    linked = re.findall(r"\[(\d+)\]\((\d{4})(-[^)]+\.md)\)", (folder / "README.md").read_text())
    assert all(int(number) == int(name) for number, name, _ in linked)
    assert sorted(name + rest for _, name, rest in linked) == sorted(file.name for file in folder.glob("0*.md"))


def test_the_path_of_a_record_names_few_files_and_all_exist() -> None:
    text = (PROJECT / "CONTRIBUTING.md").read_text()
    table = text.partition("## The path of a record")[2].partition("\n## ")[0]
    steps = [re.findall(r"`([\w/]+\.py)`", line) for line in table.splitlines() if line.startswith("| ")][1:]
    assert [file for files in steps for file in files if not (PROJECT / file).is_file()] == []
    assert all(0 < len(files) <= 9 for files in steps if files)
    assert sum(map(len, steps)) > 40
