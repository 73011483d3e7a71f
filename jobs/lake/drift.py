"""`drift/<pipeline>` and `balance/<pipeline>`, and the live table as an account reads it: all of it at one version.

The drift rows of an account are committed first, its totals after them. A slice has an account if its totals are there,
so what an account that died left in `drift` is taken out by the next one.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from operator import or_
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from jobs.control.folder import Control
from jobs.lake.batch_rows import complete_since
from jobs.lake.columns import TIME, arrow_type, columns_of
from jobs.lake.delta.fenced import FencedTable, opened
from jobs.lake.delta.reading import dataset, files_with_sizes, value_of
from jobs.lake.folding import by_day, of_day, stored
from jobs.lake.tables import PRUNE, Note, note_at
from jobs.pipelines.layout import BATCHES_SLICE
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import slice_named
from jobs.storage.folders import Folder, remove
from jobs.storage.parquet import files_in, write

_MERGE_EVERY_COMMITS = 50
# A longer list is not handed on from commit to commit, but read from the totals.
_MOST_UNEXPLAINED = 1000
_PROPERTIES = {
    "delta.checkpointInterval": "50",
    "delta.logRetentionDuration": "interval 1 days",
    "delta.deletedFileRetentionDuration": "interval 1 days",
}
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
        # Why the sides of a slice could not be compared.
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
    """The columns of a pipeline's drift table."""
    types = {each.name: arrow_type(each.type) for each in pipeline.measures}
    values = pa.struct(list(types.items()))
    # What cannot be subtracted is 0 or null.
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
    """A table partitioned by day, whose newest commit says what it brought."""

    @classmethod
    def open(cls, path: Folder, schema: pa.Schema) -> Self:
        """It is made if need be."""
        return cls(path, opened(path, schema, "day", _PROPERTIES))

    @property
    def files(self) -> dict[str, int]:
        """What it consists of."""
        return files_with_sizes(self._table)

    def rows(self, columns: Sequence[str], where: ds.Expression, days: Collection[str] | None = None) -> pa.Table:
        """Some of its rows; only files of these days are opened, if there are any."""
        files = [file for file in self.files if days is None or value_of(file) in days]
        return dataset(self._table, self.path, files).to_table(columns=list(columns), filter=where)

    def tend(self, kept_from: str, said: str = "{}") -> None:
        """Now and then: remove days before one, merge small files, and delete what no reader can need any more."""
        if self.version % _MERGE_EVERY_COMMITS == 0:
            remove(self.staging)
            old = {file: size for file, size in self.files.items() if value_of(file) < kept_from}
            if old:
                self.transact([self.removal(file, size) for file, size in old.items()], said)
            self.merge_small_files(said)
            self.delete_now_and_then()


class Accounts:
    """Both tables of a pipeline. Who writes holds the lease of the pipeline's account."""

    def __init__(self, pipeline: Pipeline, drift: _DayTable, balance: _DayTable) -> None:
        """Use `open`."""
        self._pipeline = pipeline
        self._drift = drift
        self._balance = balance

    @classmethod
    def open(cls, lake_root: Folder, pipeline: Pipeline) -> Self:
        """To write: the first commit of another account since then overtakes this one."""
        return cls(
            pipeline,
            _DayTable.open(lake_root / pipeline.drift_table, drift_schema(pipeline)),
            _DayTable.open(lake_root / pipeline.balance_table, BALANCE_SCHEMA),
        )

    @classmethod
    def read(cls, lake_root: Folder, pipeline: Pipeline) -> Self | None:
        """To read; none as long as nothing has an account."""
        paths = lake_root / pipeline.drift_table, lake_root / pipeline.balance_table
        try:
            drift, balance = (_DayTable(path, DeltaTable(str(path))) for path in paths)
        except TableNotFoundError:
            return None
        return cls(pipeline, drift, balance)

    def done(self, days: Collection[str] | None = None) -> set[tuple[str, int]]:
        """The slices that have an account, each with its version; or those of them that begin on one of these days."""
        found = self._balance.rows(["slice", "version"], ds.field("kind") == "slice", days).to_pylist()
        return {(row["slice"], row["version"]) for row in found}

    def unexplained(self) -> list[dict[str, Any]]:
        """The slices whose newest account leaves something unexplained, in order: slice, version, how many windows."""
        # Each commit hands the list on, unless it is too long.
        said = next((words.get("unexplained") for _, words in self._balance.words()), None)
        if said is not None:
            return [{"slice": slice_, "version": version, "unexplained": count} for slice_, version, count in said]
        rows = self._balance.rows(["slice", "version", "unexplained"], ds.field("kind") == "slice")
        return _still_unexplained(rows.to_pylist())

    def first_unexplained(self, slice_: str, version: int) -> dict[str, Any] | None:
        """The first window of an account that nothing explains, as it is in `drift`."""
        differences = drift_schema(self._pipeline).field("unexplained").type
        is_off = reduce(or_, (_is_off(ds.field("unexplained", each.name), each.type) for each in differences))
        of_account = (ds.field("slice") == slice_) & (ds.field("version") == version)
        columns = ["window_start", *self._pipeline.keys, "live", "final", "unexplained"]
        rows = self._drift.rows(columns, of_account & is_off, {slice_[:8]})
        order = [(name, "ascending") for name in ("window_start", *self._pipeline.keys)]
        return next(iter(rows.sort_by(order).slice(0, 1).to_pylist()), None)

    def new_stage(self) -> Folder:
        """Where the drift rows are staged, a folder per day."""
        return self._drift.new_stage()

    def add(self, stage: Folder | None, totals: Sequence[Mapping[str, Any]]) -> None:
        """First the drift rows, if there are any, then the totals."""
        accounts = sorted({(row["slice"], row["version"]) for row in totals})
        staged = files_in(stage) if stage else []
        added = self._drift.place_all(staged)
        said = {"accounts": accounts, "files": [action.path for action in added]}
        self._drift.transact([*added, *self._left_over()], _json(said))
        remove(stage or self.new_stage())
        self._add_totals(totals, accounts)

    def tend(self, kept_from: str) -> None:
        """Now and then: remove days before one, merge small files, and delete what no reader can need any more.

        What their accounts left unexplained is forgotten with them: nobody could look at it, or account for it again.
        """
        self._drift.tend(kept_from)
        said = next((words for _, words in self._balance.words()), {})
        if still := said.get("unexplained"):
            said["unexplained"] = [row for row in still if row[0] >= kept_from]
        self._balance.tend(kept_from, _json(said))

    def _left_over(self) -> list[Any]:
        """What an account wrote that died before its totals."""
        said, files = next((words for _, words in self._drift.words()), {}), self._drift.files
        accounts = {(slice_, version) for slice_, version in said.get("accounts", ())}
        if accounts <= self.done({slice_[:8] for slice_, _ in accounts}):
            return []
        return [self._drift.removal(file, files[file]) for file in said["files"] if file in files]

    def _add_totals(self, totals: Sequence[Mapping[str, Any]], accounts: Sequence[tuple[str, int]]) -> None:
        still = _still_unexplained([*self.unexplained(), *(row for row in totals if row["kind"] == "slice")])
        # So they are known without the totals of all slices there ever were.
        told = [list(row.values()) for row in still] if len(still) <= _MOST_UNEXPLAINED else None
        actions = []
        with self._balance.staged() as stage:
            for day in sorted({row["slice"][:8] for row in totals}):
                file = stage / f"day={day}" / "totals.parquet"
                rows = [row for row in totals if row["slice"].startswith(day)]
                write(pa.Table.from_pylist(rows, BALANCE_SCHEMA).drop_columns(["day"]), file)
                actions.append(self._balance.place(file))
        self._balance.transact(actions, _json({"accounts": accounts, "unexplained": told}))


def _still_unexplained(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of accounts the newest of each slice, if it leaves something unexplained: slice, version, how many windows."""
    newest = {row["slice"]: row for row in sorted(rows, key=lambda row: (row["slice"], row["version"]))}
    columns = ("slice", "version", "unexplained")
    return [{name: row[name] for name in columns} for row in newest.values() if row.get("unexplained")]


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one micro-batch took of one partition: [start, end), and the watermark that made events late in it."""

    partition: int
    start: int
    end: int
    watermark: datetime


@dataclass(frozen=True, kw_only=True)
class Live:
    """The live table of a pipeline at one version; nothing in it if it was never made."""

    path: Folder
    table: DeltaTable | None
    note: Note | None

    @classmethod
    def at(cls, lake_root: Folder, pipeline: Pipeline) -> Self:
        """As it is now."""
        path = lake_root / pipeline.live_table
        try:
            table = DeltaTable(str(path))
        except TableNotFoundError:
            return cls(path=path, table=None, note=None)
        return cls(path=path, table=table, note=note_at(path, table.version()))

    def reached(self, topic: str) -> dict[int, int]:
        """How far the stream is: the end of its newest batch, or where a reset lets it begin."""
        return dict(self.note.ends.get(topic, {})) if self.note else {}

    def begins(self, topic: str) -> dict[int, int]:
        """Where the stream began: with its first batch, or where a reset lets it; partitions that came later, at 0."""
        batches = self._batches()
        if batches is None:
            return self.reached(topic)
        # The row about the first batch is never removed, but a reset clears it with all others.
        first = pc.min(batches.to_table(["batch"]).column("batch"))
        row = batches.to_table(["offsets"], filter=ds.field("batch") == first).to_pylist()[0]
        return {int(partition): start for partition, (start, _) in json.loads(row["offsets"]).items()}

    def topic_id(self, topic: str) -> str | None:
        """The id of the topic that it reads; none as long as it has read nothing."""
        return self.note.topic_id(topic) if self.note else None

    def slices(self) -> set[str]:
        """The slices of which there are live rows."""
        return {value_of(file) for file in self._files()} - {BATCHES_SLICE}

    def files(self, slices: Collection[str]) -> list[str]:
        """The files of these slices."""
        return [str(self.path / file) for file in self._files() if value_of(file) in slices]

    def complete_since(self) -> datetime | None:
        """Since when there is a row about each batch: rows that are long ago were removed; none if all are there."""
        batches = self._batches()
        return None if batches is None else complete_since(batches)

    def taken(self, since: datetime) -> list[Taken]:
        """The ranges of all batches that were planned since a moment."""
        batches = self._batches()
        if batches is None:
            return []
        rows = batches.to_table(columns=["offsets", "watermark"], filter=ds.field("as_of") >= pa.scalar(since, TIME))
        return [
            Taken(partition=int(partition), start=start, end=end, watermark=row["watermark"])
            for row in rows.to_pylist()
            for partition, (start, end) in json.loads(row["offsets"]).items()
            if start < end
        ]

    def _batches(self) -> ds.Dataset | None:
        """The rows about batches; a table that was only reset has no such columns yet."""
        files = [file for file in self._files() if value_of(file) == BATCHES_SLICE]
        return dataset(self.table, self.path, files) if self.table is not None and files else None

    def _files(self) -> list[str]:
        return list(files_with_sizes(self.table)) if self.table is not None else []


@dataclass(frozen=True, kw_only=True)
class FinalFiles:
    """Where the final rows of some slices are: files of their own, and files that hold those of other slices, too."""

    own: Sequence[str]
    folded: Sequence[str]


def final_files(lake_root: Folder, pipeline: Pipeline, version: int, slices: Collection[str]) -> FinalFiles:
    """The files of the final rows of these slices, at one version of their table."""
    path = lake_root / pipeline.final_table
    files = stored(DeltaTable(str(path), version=version))
    own = {file.path: value_of(file.path) for file in files if value_of(file.path) in slices}
    missing = [slice_named(pipeline, name) for name in sorted(set(slices).difference(own.values()))]
    folded = [f for day, some in by_day(missing).items() for f in of_day(files, day) if any(map(f.may_touch, some))]
    return FinalFiles(own=[str(path / file) for file in own], folded=[str(path / file.path) for file in folded])


def ask_to_prune(lake_root: Folder, pipeline: Pipeline, before: str, slices: Iterable[str]) -> None:
    """Ask the live job to remove the rows of these slices, all of them before one that it must keep."""
    document = {"before": before, "slices": sorted(slices)}
    Control.of(lake_root, pipeline.name).documents.replace(PRUNE, document)


def pruned_before(lake_root: Folder, pipeline: Pipeline) -> str:
    """The slice before which live rows may be gone; no slice is before an empty name."""
    asked = Control.of(lake_root, pipeline.name).documents.read(PRUNE) or {}
    return str(asked.get("before", ""))


def _is_off(difference: ds.Expression, type_: pa.DataType) -> ds.Expression:
    return (difference != pa.scalar(0, type_)) | difference.is_null()


def _json(said: Mapping[str, Any]) -> str:
    return json.dumps(said, separators=(",", ":"))
