"""SQL over the lake without Spark. DuckDB reads the Delta tables, and answers within milliseconds once started.

The relations that a query can name, with their SQL, are defined in `jobs.pipelines.relations`.
"""

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from typing import Any, Self

import duckdb
import psutil
import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from jobs.control.incident import Incident
from jobs.control.incidents import Incidents
from jobs.lake.accounts import BALANCE_SCHEMA, drift_schema
from jobs.lake.columns import live_schema, schema_of
from jobs.lake.delta.reading import files_of
from jobs.lake.ledger import SCHEMA as LEDGER
from jobs.pipelines import PIPELINES
from jobs.pipelines.layout import INCIDENTS
from jobs.pipelines.relations import relations, table_name, tables
from jobs.query.harmless import require_harmless
from jobs.refusal import Refusal
from jobs.settings import QueryLimits
from jobs.storage.folders import Folder

_WORD = re.compile(r"\w+")
_SAFE: dict[str, Any] = {
    "enable_external_access": "false",
    "python_enable_replacements": "false",
    "autoload_known_extensions": "false",
    "autoinstall_known_extensions": "false",
    # By default DuckDB makes a folder `.tmp` in the working directory, which may fill 90 % of the disk.
    "temp_directory": "",
    "max_temp_directory_size": "0KB",
}
# One vector of DuckDB. With wide rows, larger batches would need much memory.
_BATCH_ROWS = 2048
# For Tideline's own queries, such as those of a check. No person waits for them, so a slow one must not fail.
_OURS_SECONDS = 3600
_TICK_SECONDS = 0.05
_GRACE_SECONDS = 3.0


class NotThereError(Refusal):
    """A query reads a table that does not exist yet."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Columns with distinct names, and rows that are computed while they are read."""

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]


class Lake:
    """A read-only view of the lake. Use the same object again: it reads only new entries of a table's log."""

    def __init__(
        self, root: Folder, limits: QueryLimits | None = None, last_resort: Callable[[str], object] | None = None
    ) -> None:
        """Store the settings. A table is read when a query needs it. Without limits, those of the environment apply.

        ``last_resort`` is called with a sentence when a query does not stop. It must end the process: DuckDB notices an
        interrupt only between two calls of a function, and one call can take hours or all memory.
        """
        self._root = root
        self._limits = limits or QueryLimits.from_env()
        self._last_resort = last_resort
        self._tables = tables()
        self._relations = relations()
        self._opened: dict[str, DeltaTable] = {}
        # Live table -> final table of the same pipeline. If only the final table exists, the live table counts as
        # empty.
        self._live = {table_name(p.live_table): table_name(p.final_table) for p in PIPELINES.values()}
        self._schemas = _schemas()

    def query(self, sql: str) -> pa.Table:
        """Answer one of Tideline's own SELECTs, as of now, with all its rows. Memory is limited."""
        with self._ask(sql, replace(self._limits, seconds=max(_OURS_SECONDS, self._limits.seconds))) as answer:
            return pa.Table.from_batches(answer.batches, answer.schema)

    @contextmanager
    def ask(self, sql: str) -> Iterator[Answer]:
        """Answer one SELECT of a user, as of now. After the allowed number of rows it raises a refusal."""
        with self._ask(sql, self._limits) as answer:
            yield Answer(schema=answer.schema, batches=_limited(answer.batches, self._limits.rows))

    @contextmanager
    def _ask(self, sql: str, limits: QueryLimits) -> Iterator[Answer]:
        sizes = {"memory_limit": f"{limits.memory_mb}MiB", "threads": str(limits.threads)}
        with duckdb.connect(config=_SAFE | sizes) as database, _Limiter(database, limits, self._last_resort) as limiter:
            # Set here and not in the configuration, because DuckDB reads that before it has loaded the time zones.
            database.execute("SET TimeZone = 'UTC'; SET lock_configuration = true")
            with limiter.running():
                _require_one_select(database, sql)
                require_harmless(database, sql)
            names = sorted(set(_WORD.findall(sql.lower())))
            missing = [name for name in self._needed(names) if not self._define(database, limiter, name)]
            try:
                with limiter.running():
                    reader = database.sql(sql).to_arrow_reader(_BATCH_ROWS)
                    # Most failing queries fail before their first row. Then no output has been written yet.
                    first = list(islice(reader, 1))
            except _UnknownNameError as error:
                if hint := self._hint(missing):
                    raise NotThereError(hint) from error
                raise
            schema = pa.schema(
                map(pa.Field.with_name, reader.schema, _distinct(reader.schema.names)), reader.schema.metadata
            )
            batches = chain(first, limiter.read(reader))
            yield Answer(schema=schema, batches=(batch.rename_columns(schema.names) for batch in batches))

    def _hint(self, missing: Sequence[str]) -> str | None:
        paths = ", ".join(self._tables[name] for name in missing if name in self._tables)
        return paths and (
            f"{paths} does not exist yet, because the job that writes it has never run: start its stream with "
            "`tideline streams start JOB`, or everything with `tideline demo`"
        )

    def _needed(self, names: Iterable[str]) -> Iterator[str]:
        """The relations and tables that a query needs, each after those that it reads itself."""
        for name in names:
            if name in self._relations:
                yield from self._needed(self._relations[name].reads)
            if name in self._relations or name in self._tables:
                yield name

    def _define(self, database: duckdb.DuckDBPyConnection, limiter: "_Limiter", name: str) -> bool:
        """Define a relation in the database; False if a table that it needs does not exist."""
        relation = self._relations.get(name)
        if relation:
            if not set(relation.reads) <= _defined(database):
                return False
            with limiter.running():
                database.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS {relation.sql}")
            return True
        found = self._rows(name)
        if found is None:
            return False
        database.register(name, found)
        return True

    def _rows(self, name: str) -> ds.Dataset | pa.Table | None:
        """The rows of a table. A table that does not exist yet is empty if a definition gives its columns.

        None if a table is missing and no definition gives its columns, such as `events/numbers`. None, too, for a live
        table if the final table is missing as well. Then the query says which job has never run.
        """
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
    """The columns of tables as the definitions give them. Unwritten tables are empty, unwritten columns are NULL."""
    found: dict[str, pa.Schema] = {}
    for pipeline in PIPELINES.values():
        found[table_name(pipeline.live_table)] = live_schema(pipeline)
        found[table_name(pipeline.final_table)] = schema_of(pipeline)
        found[table_name(pipeline.ledger_table)] = LEDGER
        found[table_name(pipeline.drift_table)] = drift_schema(pipeline)
        found[table_name(pipeline.balance_table)] = BALANCE_SCHEMA
    return found


def incidents_table(incidents: Iterable[Incident]) -> pa.Table:
    """The relation `incidents`."""
    moment = pa.timestamp("us", tz="UTC")
    columns = {"key": pa.string(), "opened": moment, "updated": moment, "closed": moment}
    schema = pa.schema({**columns, "text": pa.string(), "link": pa.string(), "told": pa.bool_()})
    rows = [
        {name: getattr(incident, name) for name in schema.names}
        | {"opened": round(incident.opened * 1e6), "updated": round(incident.updated * 1e6)}
        # The update that closes an incident is its last one.
        | {"closed": round(incident.updated * 1e6) if incident.closed else None}
        for incident in incidents
    ]
    return pa.Table.from_pylist(rows, schema=schema)


def _require_one_select(database: duckdb.DuckDBPyConnection, sql: str) -> None:
    statements = database.extract_statements(sql)
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise Refusal("write one SELECT: a query can only read the lake")


def _distinct(columns: Sequence[str]) -> list[str]:
    """Add a number to the name of a column if another has this name, as after a join. Rows are written by name."""
    names: list[str] = []
    for name in columns:
        numbered = (f"{name}_{number}" for number in count(1))
        names.append(name if name not in names else next(other for other in numbered if other not in names))
    return names


def _limited(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    left = rows
    for batch in batches:
        if left:
            yield batch.slice(0, left)
        if batch.num_rows > left:
            raise Refusal(
                f"the answer has more than {rows:,} rows, and the rest is left out: add LIMIT, aggregate, "
                "or allow more with --rows or QUERY_ROWS"
            )
        left -= batch.num_rows


def _defined(database: duckdb.DuckDBPyConnection) -> set[str]:
    return {name for (name,) in database.execute("SELECT view_name FROM duckdb_views()").fetchall()}


class _UnknownNameError(Refusal):
    """A query uses a name that is not defined in the database."""


class _Limiter:
    """Stops a query that has computed for too long. The reader's time between two batches is not counted."""

    def __init__(
        self, database: duckdb.DuckDBPyConnection, limits: QueryLimits, last_resort: Callable[[str], object] | None
    ) -> None:
        self._database, self._limits, self._last_resort = database, limits, last_resort
        self._spent_seconds = 0.0
        self._since: float | None = None
        self._process = psutil.Process()
        self._bytes_before = self._process.memory_info().rss
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time in which the database computes. An error of the database is raised as a refusal."""
        self._since = time.monotonic()
        try:
            yield
        # While a batch is read, errors come through Arrow.
        except (duckdb.Error, pa.ArrowException, OSError, MemoryError) as error:
            raise self._refusal(error) from error
        except RuntimeError as error:
            if str(error) == "Query interrupted":
                # DuckDB raises this after Ctrl-C.
                raise KeyboardInterrupt from error
            raise
        finally:
            self._spent_seconds, self._since = self._seconds(), None

    def read(self, reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        """The batches that are left."""
        while True:
            with self.running():
                batch = next(reader, None)
            if batch is None:
                return
            yield batch

    def _seconds(self) -> float:
        since = self._since
        return self._spent_seconds + (time.monotonic() - since if since else 0)

    def _watch(self) -> None:
        allowed_bytes = 2 * self._limits.memory_mb * 1024 * 1024
        while not self._closed.wait(_TICK_SECONDS):
            over_seconds = self._seconds() - self._limits.seconds
            if self._since and over_seconds > 0:
                # Repeated at each tick, because an interrupt just before a query begins has no effect.
                self._database.interrupt()
            if self._last_resort and self._since and over_seconds > _GRACE_SECONDS:
                self._last_resort(self._too_slow())
            # DuckDB's limit does not count all memory: a batch of Arrow, or one huge value, comes on top of it.
            if self._last_resort and self._process.memory_info().rss - self._bytes_before > allowed_bytes:
                self._last_resort(self._too_large())

    def _refusal(self, error: Exception) -> Refusal:
        if isinstance(error, duckdb.InterruptException) or "INTERRUPT Error" in str(error):
            return Refusal(self._too_slow())
        if isinstance(error, MemoryError) or "Out of Memory Error" in str(error):
            return Refusal(self._too_large())
        kind = _UnknownNameError if isinstance(error, duckdb.CatalogException) else Refusal
        return kind(f"the query cannot be answered: {error}")

    def _too_slow(self) -> str:
        return (
            f"the query was stopped after {self._limits.seconds} s: ask for less, such as the windows of one hour, "
            "or allow more with --seconds or QUERY_SECONDS"
        )

    def _too_large(self) -> str:
        return (
            f"the query needs more than {self._limits.memory_mb} MB of memory: ask for fewer rows or columns, "
            "sort with a LIMIT, aggregate, or allow more with QUERY_MEMORY_MB"
        )
