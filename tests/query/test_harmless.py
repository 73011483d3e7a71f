"""The names that a query may use, compared with all of this DuckDB: a new name needs a decision."""

from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from jobs.query.harmless import CATALOG, ROWS_FROM, TELLING, require_harmless
from jobs.query.lake import Lake
from jobs.refusal import Refusal

LISTED = Path(__file__).with_name("duckdb_functions.txt")
REFUSED = "is not allowed; query the relations of the lake, or information_schema"


@pytest.fixture(scope="module")
def database() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as database:
        yield database


def functions(database: duckdb.DuckDBPyConnection, *kinds: str) -> set[str]:
    sql = "SELECT DISTINCT lower(function_name) FROM duckdb_functions() WHERE list_contains(?, function_type)"
    return {name for (name,) in database.execute(sql, [kinds]).fetchall()}


def is_refused(database: duckdb.DuckDBPyConnection, sql: str) -> bool:
    try:
        require_harmless(database, sql)
    except Refusal as refused:
        return REFUSED in str(refused)
    return False


def test_every_function_of_values_was_looked_at(database: duckdb.DuckDBPyConnection) -> None:
    """After an upgrade add all new functions to the list, and to TELLING those that read the machine or run SQL."""
    found = functions(database, "scalar", "aggregate", "window", "macro")
    found = {name for name in found if not name.startswith(("collate_", "icu_collate_"))}
    listed = set(LISTED.read_text().splitlines())
    assert (sorted(found - listed), sorted(listed - found)) == ([], [])
    assert found >= TELLING - {"getenv"}, "getenv is a function of DuckDB's own shell"


def test_functions_that_tell_are_refused_and_the_others_are_not(database: duckdb.DuckDBPyConnection) -> None:
    found = functions(database, "scalar", "aggregate", "window", "macro")
    assert {name for name in found if is_refused(database, f"""SELECT "{name}"('x')""")} == found & TELLING


def test_only_functions_that_make_rows_make_rows(database: duckdb.DuckDBPyConnection) -> None:
    found = functions(database, "table", "table_macro")
    assert len(found) > 100
    assert {name for name in found if not is_refused(database, f"""FROM "{name}"('x')""")} == ROWS_FROM


def test_macros_that_are_allowed_stand_for_what_is_allowed(database: duckdb.DuckDBPyConnection) -> None:
    sql = "SELECT lower(function_name), macro_definition FROM duckdb_functions() WHERE function_type = 'macro'"
    macros = database.execute(sql).fetchall()
    assert len(macros) > 100
    assert {name for name, text in macros if is_refused(database, f"SELECT {text}")} <= TELLING


def test_views_of_the_database_are_refused(database: duckdb.DuckDBPyConnection) -> None:
    views = database.execute("SELECT schema_name, view_name FROM duckdb_views() WHERE internal").fetchall()
    assert len(views) > 40
    for schema, name in views:
        is_standard = schema == "information_schema"
        assert is_standard != name.startswith(CATALOG), f"{schema}.{name}"
        assert is_standard != is_refused(database, f'FROM "{schema}"."{name.upper()}"')


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT CURRENT_SETTING('memory_limit')",
        "SELECT \"Current_Setting\" /* quoted */ ('temp_directory')",
        "SELECT 'home_directory'.current_setting()",
        "SELECT main.current_setting('threads'), system.main.current_setting('threads')",
        "SELECT list_transform([1], lambda x: current_setting('threads'))",
        "SELECT 1 ORDER BY (SELECT current_setting('threads'))",
        "SELECT 1 LIMIT current_setting('threads')::INT",
        "SELECT count(*) FILTER (WHERE current_setting('threads') > 0) OVER (ORDER BY 1)",
        "WITH RECURSIVE t AS (SELECT 1 UNION ALL FROM duckdb_settings()) FROM t",
        "WITH pg_settings AS (SELECT 1) FROM pg_catalog.pg_settings",
        "SELECT (FROM pragma_platform())",
        'FROM range(1), LATERAL (FROM "DUCKDB_memory"())',
        "FROM query('FROM duckdb_settings()')",
        "FROM query_table('pg_settings')",
        "FROM histogram_values('pg_settings', name)",
        "FROM pg_settings",
        "FROM duckdb_databases",
        "SELECT json_serialize_plan('SELECT current_setting(''threads'')')",
        "FROM json_execute_serialized_sql(json_serialize_sql('FROM duckdb_settings()'))",
        "DESCRIBE FROM duckdb_settings()",
        "SUMMARIZE FROM duckdb_settings()",
        "SHOW threads",
        "SHOW DATABASES",
        "FROM (SHOW ALL TABLES)",
        "PIVOT (FROM duckdb_settings()) ON name IN ('threads') USING max(value)",
        "UNPIVOT (FROM duckdb_settings()) ON value",
        "VALUES (current_setting('threads'))",
        "FROM (SELECT 1) POSITIONAL JOIN glob('*')",
    ],
)
def test_no_query_tells_of_the_machine(sql: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=REFUSED):
        Lake(tmp_path).query(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT table_name, column_name FROM information_schema.columns WHERE table_name = 'incidents'",
        "SELECT * FROM information_schema.schemata",
        "DESCRIBE incidents",
        "SUMMARIZE incidents",
        "FROM incidents SELECT count(*), now(), random(), current_date, 'current_setting(1)'",
        "SELECT unnest([1, 2]), list_transform([1], lambda x: x + 1) FROM range(3)",
        "WITH RECURSIVE t AS (SELECT 1 AS a UNION ALL SELECT a + 1 FROM t WHERE a < 5) FROM t",
        "FROM json_each('{\"a\": 1}')",
        "SELECT " + "+".join(["1"] * 900),
    ],
)
def test_what_says_nothing_of_the_machine_is_answered(sql: str, tmp_path: Path) -> None:
    assert Lake(tmp_path).query(sql).num_columns
