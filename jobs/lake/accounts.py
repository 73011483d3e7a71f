"""`drift/<pipeline>` and `balance/<pipeline>`: the accounts of final slices, and the differences that they found.

An account commits its drift rows first, and its totals after them. A slice has an account only if its totals are there.
If an account is killed between the two commits, the next one removes the drift rows that have no totals.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, Self

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from jobs.lake.columns import TIME, arrow_type, columns_of
from jobs.lake.delta.fenced import FencedTable, kept_for, opened
from jobs.lake.delta.manifest import Manifest
from jobs.lake.delta.reading import dataset, files_with_sizes, value_of
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import day_of_slice
from jobs.storage.folders import Folder, remove
from jobs.storage.parquet import write

_MERGE_EVERY_COMMITS = 50
# A longer list of unexplained slices is not copied from commit to commit, but read from the totals.
_MOST_UNEXPLAINED = 1000
_PROPERTIES = {"delta.checkpointInterval": "50", **kept_for("1 days")}
_TOTAL = pa.decimal128(38, 10)
BALANCE_SCHEMA = pa.schema(
    [
        pa.field("slice", pa.string()),
        pa.field("version", pa.int64()),
        pa.field("run", pa.string()),
        pa.field("as_of", TIME),
        pa.field("kind", pa.string()),
        pa.field("windows", pa.int64()),
        pa.field("differing", pa.int64()),
        pa.field("unexplained", pa.int64()),
        # Why the live and final rows of a slice could not be compared.
        pa.field("note", pa.string()),
        pa.field("cause", pa.string()),
        pa.field("events", pa.int64()),
        pa.field("window_events", pa.int64()),
        pa.field("measure", pa.string()),
        pa.field("age_ms", pa.int64()),
        pa.field("exact", pa.int64()),
        pa.field("error", _TOTAL),
        pa.field("magnitude", _TOTAL),
        pa.field("day", pa.string()),
    ]
)


def drift_schema(pipeline: Pipeline) -> pa.Schema:
    """Return the columns of a pipeline's drift table."""
    types = {each.name: arrow_type(each.type) for each in pipeline.measures}
    values = pa.struct(list(types.items()))
    # Values that cannot be subtracted have the difference 0 if they agree, and null if they do not.
    differences = [(name, pa.int64() if type_ in (pa.string(), TIME) else type_) for name, type_ in types.items()]
    columns = columns_of(pipeline)
    return pa.schema(
        [
            *(columns.field(name) for name in ("window_start", "window_end", *pipeline.keys)),
            pa.field("slice", pa.string()),
            pa.field("version", pa.int64()),
            pa.field("run", pa.string()),
            pa.field("live", values),
            pa.field("final", values),
            pa.field("unexplained", pa.struct(differences)),
            pa.field("causes", pa.map_(pa.string(), pa.int64())),
            pa.field("day", pa.string()),
        ]
    )


class _DayTable(FencedTable):
    """A table partitioned by day. The metadata of a commit lists the accounts that it added."""

    @classmethod
    def open(cls, path: Folder, schema: pa.Schema) -> Self:
        """Open the table to write; create it if it is missing."""
        return cls(path, opened(path, schema, "day", _PROPERTIES))

    @property
    def files(self) -> dict[str, int]:
        """The table's files with their sizes."""
        return files_with_sizes(self._table)

    def rows(self, columns: Sequence[str], where: ds.Expression, days: Collection[str] | None = None) -> pa.Table:
        """Return some rows of the table. With ``days`` only files of these days are opened."""
        files = [file for file in self.files if days is None or value_of(file) in days]
        return dataset(self._table, self.path, files).to_table(columns=list(columns), filter=where)

    def maintain(self, kept_from: str, check: Callable[[], None], metadata: str = "{}") -> None:
        """Now and then remove days before ``kept_from``, merge small files, and delete unneeded files."""
        if self.version % _MERGE_EVERY_COMMITS == 0:
            old = {file: size for file, size in self.files.items() if value_of(file) < kept_from}
            if old:
                check()
                self.transact([self.removal(file, size) for file, size in old.items()], metadata)
            self.merge_small_files(metadata, check)
            self.delete_now_and_then()


class Accounts:
    """The drift and balance tables of a pipeline. A writer must hold the lease of the pipeline's account."""

    def __init__(self, pipeline: Pipeline, drift: _DayTable, balance: _DayTable) -> None:
        """Use `open`."""
        self._pipeline = pipeline
        self._drift = drift
        self._balance = balance

    @classmethod
    def open(cls, lake_root: Folder, pipeline: Pipeline) -> Self:
        """Open both tables to write. If another account commits after this, this one can no longer commit."""
        return cls(
            pipeline,
            _DayTable.open(lake_root / pipeline.drift_table, drift_schema(pipeline)),
            _DayTable.open(lake_root / pipeline.balance_table, BALANCE_SCHEMA),
        )

    @classmethod
    def read(cls, lake_root: Folder, pipeline: Pipeline) -> Self | None:
        """Open both tables to read; return None if there is no account yet."""
        paths = lake_root / pipeline.drift_table, lake_root / pipeline.balance_table
        try:
            drift, balance = (_DayTable(path, DeltaTable(str(path))) for path in paths)
        except TableNotFoundError:
            return None
        return cls(pipeline, drift, balance)

    def done(self, days: Collection[str]) -> set[tuple[str, int]]:
        """Return slice and version of each account of the slices that begin on these days."""
        found = self._balance.rows(["slice", "version"], ds.field("kind") == "slice", days).to_pylist()
        return {(row["slice"], row["version"]) for row in found}

    def unexplained(self) -> list[dict[str, Any]]:
        """Return the slices with unexplained windows in their newest account: slice, version, count, in order."""
        # Each commit has the list in its metadata, unless the list is too long.
        listed = self._balance.newest_metadata().get("unexplained")
        if listed is not None:
            return [{"slice": slice_, "version": version, "unexplained": count} for slice_, version, count in listed]
        rows = self._balance.rows(["slice", "version", "unexplained"], ds.field("kind") == "slice")
        return _still_unexplained(rows.to_pylist())

    def first_unexplained(self, slice_: str, version: int) -> dict[str, Any] | None:
        """Return the row of `drift` for the first unexplained window of an account; None if there is none."""
        differences = drift_schema(self._pipeline).field("unexplained").type
        is_off = reduce(or_, (_is_off(ds.field("unexplained", each.name), each.type) for each in differences))
        of_account = (ds.field("slice") == slice_) & (ds.field("version") == version)
        columns = ["window_start", *self._pipeline.keys, "live", "final", "unexplained"]
        rows = self._drift.rows(columns, of_account & is_off, {day_of_slice(slice_)})
        order = [(name, "ascending") for name in ("window_start", *self._pipeline.keys)]
        return next(iter(rows.sort_by(order).slice(0, 1).to_pylist()), None)

    def new_stage(self) -> Folder:
        """Return the path of a new stage for drift rows, which get a folder per day."""
        return self._drift.new_stage()

    def add(self, stage: Folder, drift_rows: int, totals: Sequence[Mapping[str, Any]]) -> None:
        """Commit the drift rows in a stage first, and then the totals.

        ``drift_rows`` is how many rows were written into the stage. If the stage has other rows, nothing is committed.
        """
        accounts = sorted({(row["slice"], row["version"]) for row in totals})
        added = self._drift.place_all(Manifest.of(stage, drift_rows))
        metadata = {"accounts": accounts, "files": [action.path for action in added]}
        self._drift.transact([*added, *self._left_over()], _json(metadata))
        remove(stage)
        self._add_totals(totals, accounts)

    def maintain(self, kept_from: str, check: Callable[[], None] = lambda: None) -> None:
        """Now and then remove days before ``kept_from``, merge small files, and delete unneeded files.

        ``check`` is called before each commit. It must raise if another process has taken over the lease.

        Unexplained windows of removed days leave the list, too: no operator could look at them or account for them
        again.
        """
        self._drift.maintain(kept_from, check)
        metadata = self._balance.newest_metadata()
        if still := metadata.get("unexplained"):
            metadata["unexplained"] = [row for row in still if row[0] >= kept_from]
        self._balance.maintain(kept_from, check, _json(metadata))

    def _left_over(self) -> list[Any]:
        """Return actions that remove the last account's drift rows, if it was killed before it wrote its totals."""
        metadata, files = self._drift.newest_metadata(), self._drift.files
        accounts = {(slice_, version) for slice_, version in metadata.get("accounts", ())}
        if accounts <= self.done({day_of_slice(slice_) for slice_, _ in accounts}):
            return []
        return [self._drift.removal(file, files[file]) for file in metadata["files"] if file in files]

    def _add_totals(self, totals: Sequence[Mapping[str, Any]], accounts: Sequence[tuple[str, int]]) -> None:
        still = _still_unexplained([*self.unexplained(), *(row for row in totals if row["kind"] == "slice")])
        # With this list in the commit, the next account need not read the totals of all slices.
        told = [list(row.values()) for row in still] if len(still) <= _MOST_UNEXPLAINED else None
        actions = []
        with self._balance.staged() as stage:
            for day in sorted({day_of_slice(row["slice"]) for row in totals}):
                file = stage / f"day={day}" / "totals.parquet"
                rows = [row for row in totals if row["slice"].startswith(day)]
                write(pa.Table.from_pylist(rows, BALANCE_SCHEMA).drop_columns(["day"]), file)
                actions.append(self._balance.place(file))
        self._balance.transact(actions, _json({"accounts": accounts, "unexplained": told}))


def _still_unexplained(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return slice, version and count of unexplained windows of each slice's newest account, if it has any."""
    newest = {row["slice"]: row for row in sorted(rows, key=lambda row: (row["slice"], row["version"]))}
    columns = ("slice", "version", "unexplained")
    return [{name: row[name] for name in columns} for row in newest.values() if row.get("unexplained")]


def _is_off(difference: ds.Expression, type_: pa.DataType) -> ds.Expression:
    return (difference != pa.scalar(0, type_)) | difference.is_null()


def _json(metadata: Mapping[str, Any]) -> str:
    return json.dumps(metadata, separators=(",", ":"))
