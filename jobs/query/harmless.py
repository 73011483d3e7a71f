"""Refuses queries that would reveal the machine, its files, its users or the database's settings.

tests/query/test_harmless.py applies the rule to every function and view of DuckDB, and fails when DuckDB adds one.
"""

import duckdb

from jobs.refusal import Refusal

# The allowed functions that make rows. All others read files, settings or the catalog, or run a text as SQL.
ROWS_FROM = frozenset({"generate_series", "json_each", "json_tree", "range", "repeat", "repeat_row", "unnest"})
# The refused functions of values: they read settings or the catalog, show a plan with the values in it, or write.
TELLING = frozenset(
    {
        "current_setting",
        "format_type",
        "get_block_size",
        "getenv",
        "json_serialize_plan",
        "pg_get_constraintdef",
        "pg_get_viewdef",
        "write_log",
    }
)
# The names of DuckDB's own views begin with one of these. The views of information_schema have other names, and reveal
# nothing of the machine.
CATALOG = ("duckdb_", "pg_", "pragma_", "sqlite_")
_DESCRIBED = {"DESCRIBE", "SUMMARY"}
# DuckDB's own parser finds every name in a query, however it is quoted or nested.
_NAMED = """
SELECT parsed ->> '$.error_message', parsed ->> '$..function_name', parsed ->> '$..table_name',
  parsed ->> '$..show_type', parsed ->> '$..function.function_name'
FROM (SELECT json_serialize_sql(?) AS parsed)
"""


def require_harmless(database: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Refuse a SELECT that names a function or a view that reveals the machine."""
    ((error, functions, views, described, sources),) = database.execute(_NAMED, [sql]).fetchall()
    if error:
        raise Refusal(f"the query cannot be answered: {error}")
    refused = {name for name in functions if name.lower() in TELLING}
    refused |= {name for name in sources if name.lower() not in ROWS_FROM}
    refused |= {name for name in views if name.lower().startswith(CATALOG)}
    refused |= {f"SHOW {name}" for name in described if name not in _DESCRIBED}
    if refused:
        raise Refusal(
            f"the query cannot be answered: {', '.join(sorted(refused))} is not allowed; "
            "query the relations of the lake, or information_schema"
        )
