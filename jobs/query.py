"""SQL over the lake without Spark: DuckDB reads the Delta tables, an answer takes milliseconds once started."""

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import count
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from jobs.connectors.drift import BALANCE_SCHEMA, drift_schema
from jobs.connectors.fenced import files_of
from jobs.connectors.final import live_schema, schema_of
from jobs.connectors.incidents import Incident, Incidents
from jobs.connectors.ledger import SCHEMA as LEDGER
from jobs.folders import Folder
from jobs.pipelines import PIPELINES
from jobs.pipelines.relations import relations, table_name, tables
from jobs.pipelines.spec import INCIDENTS
from jobs.refusal import Refusal

_WORD = re.compile(r"\w+")
_SAFE: dict[str, Any] = {
    "enable_external_access": "false",
    "python_enable_replacements": "false",
}


class NotThereError(Refusal):
    """A question about something that nobody has written yet."""


class Lake:
    """A read-only view of the lake. Keep one: what it has read of a table's log it need not read again."""

    def __init__(self, root: Folder) -> None:
        """Nothing is read before it is asked for."""
        self._root = root
        self._tables = tables()
        self._relations = relations()
        self._opened: dict[str, DeltaTable] = {}
        # Final rows are served also where no stream has ever run.
        self._live = {table_name(p.live_table): table_name(p.final_table) for p in PIPELINES.values()}
        self._schemas = _schemas()

    def query(self, sql: str) -> pa.Table:
        """The answer to one SELECT, as of now."""
        with duckdb.connect(config=_SAFE) as database:
            # Not in the configuration: the time zones are loaded a moment after it.
            database.execute("SET TimeZone = 'UTC'; SET lock_configuration = true")
            try:
                _require_one_select(database, sql)
                names = sorted(set(_WORD.findall(sql.lower())))
                missing = [name for name in self._needed(names) if not self._define(database, name)]
                return _distinct(database.sql(sql).to_arrow_table())
            except duckdb.CatalogException as error:
                if hint := self._hint(missing):
                    raise NotThereError(hint) from error
                raise Refusal(f"the query cannot be answered: {error}") from error
            except duckdb.Error as error:
                raise Refusal(f"the query cannot be answered: {error}") from error

    def _hint(self, missing: Sequence[str]) -> str | None:
        paths = ", ".join(self._tables[name] for name in missing if name in self._tables)
        return paths and (
            f"{paths} does not exist yet: its streaming job has never run (`tideline demo` starts everything, "
            "a DAG stream_… one job)"
        )

    def _needed(self, names: Iterable[str]) -> Iterator[str]:
        """The relations of a query, each after those that it reads, and these in the order that it names."""
        for name in names:
            if name in self._relations:
                yield from self._needed(self._relations[name].reads)
            if name in self._relations or name in self._tables:
                yield name

    def _define(self, database: duckdb.DuckDBPyConnection, name: str) -> bool:
        """Make a relation known; False if a table that it needs does not exist."""
        relation = self._relations.get(name)
        if relation:
            if not set(relation.reads) <= _defined(database):
                return False
            database.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS {relation.sql}")
            return True
        found = self._rows(name)
        if found is None:
            return False
        database.register(name, found)
        return True

    def _rows(self, name: str) -> ds.Dataset | pa.Table | None:
        """What is in a table; nothing in one that nobody has written rows to, none of one that is still to be made."""
        if self._tables[name] == INCIDENTS:
            return incidents_table(Incidents.of(self._root).all())
        table, schema = self._table(name), self._schemas.get(name)
        # A live table that was reset before its first row has no columns yet.
        if table is not None and (schema is None or len(table.schema().fields) > 1):
            added = schema if name in self._live.values() else None
            return files_of(table, self._root / self._tables[name], added)
        if schema is None or (table is None and name in self._live and self._table(self._live[name]) is None):
            return None
        return schema.empty_table()

    def _table(self, name: str) -> DeltaTable | None:
        path = self._root / self._tables[name]
        try:
            self._opened[name].update_incremental()
        except (KeyError, DeltaError):
            # Not read before, or deleted and created anew since.
            try:
                self._opened[name] = DeltaTable(str(path))
            except TableNotFoundError:
                return None
        return self._opened[name]


def _schemas() -> dict[str, pa.Schema]:
    """The columns of tables as the definitions give them: what is not written yet is empty, or null."""
    found: dict[str, pa.Schema] = {}
    for pipeline in PIPELINES.values():
        found[table_name(pipeline.live_table)] = live_schema(pipeline)
        found[table_name(pipeline.final_table)] = schema_of(pipeline)
        found[table_name(pipeline.ledger_table)] = LEDGER
        found[table_name(pipeline.drift_table)] = drift_schema(pipeline)
        found[table_name(pipeline.balance_table)] = BALANCE_SCHEMA
    return found


def _require_one_select(database: duckdb.DuckDBPyConnection, sql: str) -> None:
    statements = database.extract_statements(sql)
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise Refusal("ask one SELECT: nothing else is possible, the lake is read-only here")


def _distinct(answer: pa.Table) -> pa.Table:
    """Columns of one name, as a join has them, get a number: rows are written by name."""
    names: list[str] = []
    for name in answer.column_names:
        numbered = (f"{name}_{number}" for number in count(1))
        names.append(name if name not in names else next(other for other in numbered if other not in names))
    return answer.rename_columns(names)


def _defined(database: duckdb.DuckDBPyConnection) -> set[str]:
    return {name for (name,) in database.execute("SELECT view_name FROM duckdb_views()").fetchall()}


def as_json(answer: pa.Table) -> str:
    """One array of objects, a row a line; decimals are exact numbers, times ISO 8601 in UTC."""
    rows = (
        "{" + ", ".join(f"{json.dumps(name)}: {_json(value)}" for name, value in row.items()) + "}"
        for row in _rows(answer)
    )
    return "[" + ",\n ".join(rows) + "]"


def as_csv(answer: pa.Table) -> str:
    """A header and the rows."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(answer.column_names)
    writer.writerows(as_text(answer))
    return text.getvalue()


def as_text(answer: pa.Table) -> Sequence[Sequence[str]]:
    """The rows as people read them; NULL is empty."""
    return [["" if value is None else _text(value) for value in row.values()] for row in _rows(answer)]


def _rows(answer: pa.Table) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = answer.to_pylist(maps_as_pydicts="lossy")
    except (ValueError, OverflowError) as error:
        raise Refusal(f"the answer holds a time outside the years 1 to 9999: cast it to VARCHAR ({error})") from error
    return rows


def incidents_table(incidents: Iterable[Incident]) -> pa.Table:
    """The relation `incidents`."""
    moment = pa.timestamp("us", tz="UTC")
    columns = {"key": pa.string(), "opened": moment, "updated": moment, "closed": moment}
    schema = pa.schema({**columns, "text": pa.string(), "link": pa.string(), "told": pa.bool_()})
    rows = [
        {name: getattr(incident, name) for name in schema.names}
        | {"opened": round(incident.opened * 1e6), "updated": round(incident.updated * 1e6)}
        # The word that closes an incident is its last.
        | {"closed": round(incident.updated * 1e6) if incident.closed else None}
        for incident in incidents
    ]
    return pa.Table.from_pylist(rows, schema=schema)


def _json(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "null"
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, list):
        return "[" + ", ".join(_json(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(name))}: {_json(item)}" for name, item in value.items()) + "}"
    return json.dumps(_text(value), ensure_ascii=False)


def _text(value: Any) -> str:
    if isinstance(value, datetime):
        moment = value.astimezone(UTC) if value.tzinfo else value
        precision = "microseconds" if moment.microsecond % 1000 else "milliseconds"
        return moment.replace(tzinfo=None).isoformat(timespec=precision) + ("Z" if value.tzinfo else "")
    if isinstance(value, bytes):
        return "".join(chr(byte) if 32 <= byte < 127 and byte != 92 else f"\\x{byte:02X}" for byte in value)
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, list | dict | bool):
        return _json(value)
    if isinstance(value, pa.MonthDayNano):
        return f"P{value.months}M{value.days}DT{format(Decimal(value.nanoseconds) / 10**9, 'f')}S"
    return value.isoformat() if isinstance(value, date) else str(value)
