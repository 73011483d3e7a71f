"""The columns, tables and definitions that pages describe are those of the code."""

import json
import re
from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from deltalake import DeltaTable

from jobs import pipelines
from jobs.lake.delta import freeing
from jobs.pipelines import PIPELINES, SOURCES, STREAMS
from jobs.pipelines.layout import INCIDENTS
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.relations import relations
from jobs.pipelines.relations import tables as tables_of_the_lake
from jobs.pipelines.source import Source
from jobs.query.lake import Lake
from jobs.streaming import reset
from jobs.streaming.reset_plan import Request, To
from tests import pages
from tests.empty_lake import empty_lake
from tests.pages import PAGES, Table, in_backticks

OF_COLUMNS = [table for page in PAGES for table in pages.tables(page) if table.head[0] == "column"]
_OWNERS = {"SOURCE": SOURCES, "PIPELINE": PIPELINES}
_COLUMN = re.compile(r"`(\w+)`|(source's columns|keys|measures)")
_ONLY = re.compile(r"`(\w+)` only")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lake")


@pytest.fixture(scope="module")
def lake(root: Path) -> Lake:
    return empty_lake(root)


def of_each(template: str) -> Iterable[tuple[str, Source | Pipeline | None]]:
    """The names that a name with SOURCE or PIPELINE stands for, each with its definition."""
    for placeholder, definitions in _OWNERS.items():
        if placeholder in template:
            return [(template.replace(placeholder, name), owner) for name, owner in definitions.items()]
    return [(template, None)]


def described(table: Table, relation: str, owner: Source | Pipeline | None) -> list[str]:
    """The columns that a table of a page gives to a relation, in its order."""
    rows = [row for row in table.rows if not (only := _ONLY.match(row[1])) or relation.startswith(only[1])]
    found = [each for row in rows for each in _COLUMN.findall(row[0])]
    return [name for column, group in found for name in ([column] if column else own(owner, group))]


def own(owner: Source | Pipeline | None, what: str) -> list[str]:
    if isinstance(owner, Source):
        return [field.name for field in owner.columns]
    assert owner, f"{what} of nothing"
    return list(owner.keys) if what == "keys" else [measure.name for measure in owner.measures]


@pytest.mark.parametrize("table", OF_COLUMNS, ids=str)
def test_the_columns_of_a_relation(table: Table, lake: Lake) -> None:
    assert in_backticks(table.heading), "the heading names the relations"
    for relation in in_backticks(table.heading):
        for name, owner in of_each(relation):
            assert described(table, relation, owner) == lake.query(f"SELECT * FROM {name}").column_names, name


def test_every_relation_has_a_table_of_its_columns() -> None:
    shown = {name for table in OF_COLUMNS for one in in_backticks(table.heading) for name, _ in of_each(one)}
    views = {view.name for pipeline in PIPELINES.values() for view in pipeline.views}
    assert shown == set(relations()) - views


@pytest.mark.parametrize(("page", "chapter"), [("data.md", "The lake"), ("operations.md", "Growth")])
def test_every_table_of_the_lake_is_described(page: str, chapter: str) -> None:
    named = pages.table(page, chapter, "table").names
    assert {name for one in named for name, _ in of_each(one)} == set(tables_of_the_lake().values()) - {INCIDENTS}
    # Files that no reader needs are deleted from all of them, as the chapter about growth promises.
    assert {one.partition("/")[0] for one in named} == set(freeing._KINDS)


def test_a_table_is_partitioned_as_its_page_says(lake: Lake, root: Path) -> None:
    """The tables of streams are made with Spark, and a reset opens them with the same partition."""
    queries = [query for job in STREAMS for query in reset._queries(Request(job=job, to=To.EARLIEST))]
    by_streams = {query.table: query.partition for query in queries}
    for names, *_, partitioned in pages.table("data.md", "The lake", "table").rows:
        for name in (name for one in in_backticks(names) for name, _ in of_each(one)):
            found = by_streams.get(name) or DeltaTable(str(root / name)).metadata().partition_columns[0]
            assert in_backticks(partitioned)[0] == found, name


@pytest.mark.parametrize(("chapter", "definition"), [("A source", Source), ("A pipeline", Pipeline)])
def test_every_argument_of_a_definition_is_described_with_its_default(chapter: str, definition: type) -> None:
    shown: dict[str, str] = {}
    for cell, _, defaults in pages.table("pipelines.md", chapter, "argument").rows:
        names = in_backticks(cell)
        shown |= zip(names, defaults.split(", ") if len(names) > 1 else [defaults], strict=True)
    assert set(shown) == {field.name for field in fields(definition)}
    for field in fields(definition):
        if field.default is MISSING:
            assert shown[field.name] == "", field.name
        elif isinstance(field.default, bool):
            assert shown[field.name] == ("yes" if field.default else "no"), field.name
        elif isinstance(field.default, int | float):
            assert shown[field.name] == f"{field.default:g}", field.name
        else:
            # No key, no checks: the page says in words what happens then.
            assert shown[field.name], field.name


def test_definitions_that_a_page_shows_give_the_results_of_those_that_ship() -> None:
    shown: dict[str, Source | Pipeline] = {}
    known = {**vars(pipelines.shipped.sources), **vars(pipelines.window), **vars(pipelines.pipeline)}
    for block in pages.blocks(pages.page("pipelines.md").read_text()):
        exec(block, known, shown)
    assert shown["NUMBERS"] == SOURCES["numbers"]
    assert shown["WORD_COUNT"].fingerprint == PIPELINES["word_count"].fingerprint


def test_a_message_has_the_columns_of_its_relation(lake: Lake) -> None:
    (message,) = (block for block in pages.blocks(pages.page("data.md").read_text()) if block.startswith("{"))
    assert list(json.loads(message)) == lake.query("SELECT * FROM rolling_sum").column_names
