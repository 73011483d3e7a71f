"""The relations that people query: complete, named once, and in SQL that both engines read."""

import re
from collections.abc import Iterator
from dataclasses import replace

import duckdb
import pytest

from jobs.pipelines import PIPELINES, SOURCES, relations
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.relations import relations as all_relations
from jobs.pipelines.relations import table_name
from jobs.pipelines.relations import tables as all_tables
from jobs.pipelines.rules import RefusedDefinitionError
from jobs.pipelines.window import View

RELATIONS, TABLES = all_relations(), all_tables()
_DUCKDB_TYPES = {"STRING": "VARCHAR"}


@pytest.fixture
def database() -> Iterator[duckdb.DuckDBPyConnection]:
    """Empty tables of the lake, with the columns that the definitions give them."""
    with duckdb.connect() as database:
        record = 'topic VARCHAR, partition INT, "offset" BIGINT, arrival_time TIMESTAMPTZ, event_time TIMESTAMPTZ'
        rejected = "reason VARCHAR, raw BLOB, raw_key BLOB, raw_headers VARCHAR, hour VARCHAR"
        for source in SOURCES.values():
            own = ", ".join(f'"{field.name}" {_DUCKDB_TYPES.get(field.type, field.type)}' for field in source.columns)
            database.execute(f"CREATE TABLE {table_name(source.events_table)} ({record}, {own}, {rejected})")
        window = "window_start TIMESTAMPTZ, window_end TIMESTAMPTZ, slice VARCHAR, epoch BIGINT, batch BIGINT"
        for pipeline in PIPELINES.values():
            keys = "".join(f', "{key}" VARCHAR' for key in pipeline.keys)
            own = "".join(f', "{measure.name}" {measure.type}' for measure in pipeline.measures)
            database.execute(f"CREATE TABLE {table_name(pipeline.live_table)} ({window}, as_of TIMESTAMPTZ{keys}{own})")
            published = "final_slice VARCHAR, version BIGINT"
            final = f"{window}, as_of TIMESTAMPTZ{keys}{own}, {published}"
            database.execute(f"CREATE TABLE {table_name(pipeline.final_table)} ({final})")
            ledger = ", ".join(f'"{name}" VARCHAR' for name in relations._OF_THE_LEDGER)
            database.execute(f"CREATE TABLE {table_name(pipeline.ledger_table)} ({ledger})")
            for table in (pipeline.drift_table, pipeline.balance_table):
                database.execute(f"CREATE TABLE {table_name(table)} (slice VARCHAR)")
        database.execute("CREATE TABLE lake_incidents (key VARCHAR)")
        yield database


def in_order(names: list[str]) -> Iterator[str]:
    """Relations, each after the relations that it reads."""
    for name in names:
        if name in RELATIONS:
            yield from in_order(list(RELATIONS[name].reads))
            yield name


def test_what_there_is() -> None:
    wanted = {name for source in SOURCES for name in (f"events_{source}", f"quarantine_{source}")}
    views = {view.name for pipeline in PIPELINES.values() for view in pipeline.views}
    batch = {f"{what}_{name}" for name in PIPELINES for what in ("ledger", "slices", "drift", "balance")}
    assert set(RELATIONS) == wanted | set(PIPELINES) | views | batch | {"incidents"}
    assert "word_count_total" in RELATIONS
    assert all(name == relation.name and relation.description for name, relation in RELATIONS.items())


def test_names_are_no_table_s_and_need_no_quotes() -> None:
    assert not set(RELATIONS) & set(TABLES)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in (*RELATIONS, *TABLES))
    assert len(TABLES) == len(SOURCES) + 5 * len(PIPELINES) + 1 == len(set(TABLES.values()))
    assert TABLES["lake_live_rolling_sum"] == "live/rolling_sum"


def test_what_is_read_exists_and_is_all_that_the_sql_reads() -> None:
    for relation in RELATIONS.values():
        assert relation.reads
        known = {*RELATIONS, *TABLES} - {relation.name}
        assert set(relation.reads) == set(re.findall(r"\w+", relation.sql)) & known, relation.name


@pytest.mark.parametrize("name", RELATIONS)
def test_it_can_be_planned(name: str, database: duckdb.DuckDBPyConnection) -> None:
    for each in in_order([name]):
        database.execute(f"CREATE OR REPLACE TEMP VIEW {each} AS {RELATIONS[each].sql}")
    assert database.sql(f"SELECT * FROM {name}").fetchall() == []


def test_columns_are_those_that_are_promised(database: duckdb.DuckDBPyConnection) -> None:
    def columns(name: str) -> list[str]:
        return database.sql(RELATIONS[name].sql).columns

    assert columns("events_numbers") == [
        "topic",
        "partition",
        "offset",
        "arrival_time",
        "event_time",
        "key",
        "id",
        "value",
    ]
    assert columns("quarantine_numbers")[:6] == ["topic", "partition", "offset", "arrival_time", "reason", "raw"]
    for name, pipeline in PIPELINES.items():
        window = ["window_start", "window_end", *pipeline.value_columns, "finality", "version", "as_of"]
        assert columns(name) == window


def test_spark_s_text_differs_in_its_quotes_only() -> None:
    """Spark reads "name" as a string; a backtick is its quote."""
    for name, relation in all_relations(quote="`").items():
        assert '"' not in relation.sql
        assert relation.sql.replace("`", '"') == RELATIONS[name].sql


def test_a_relation_is_defined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_view(name: str) -> Pipeline:
        return replace(PIPELINES["word_count"], views=(View(name=name, sql="SELECT word FROM word_count"),))

    for name in ("events_lines", "word_count", "rolling_sum"):
        monkeypatch.setattr(relations, "PIPELINES", {**PIPELINES, "word_count": with_view(name)})
        with pytest.raises(RefusedDefinitionError, match=f"the relation '{name}' is defined twice: rename one"):
            all_relations()
