"""`ledger/<pipeline>`: the history of each slice's states. Lines are added and never changed."""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from jobs.lake.columns import TIME, adapt
from jobs.lake.delta.fenced import Action, FencedTable, kept_for, opened
from jobs.lake.delta.reading import dataset, files_with_sizes, table_at, value_of
from jobs.lake.slices import Boundary, LedgerLine, State
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import day_of_slice, slice_named
from jobs.settings import KeptDays
from jobs.storage.folders import Folder
from jobs.storage.json_line import JsonLine
from jobs.storage.parquet import write

_MERGE_EVERY_COMMITS = 50
# A turn removes the old lines of at most this many days, because a plan waits for it.
_DAYS_A_TURN = 3
_PROPERTIES = {"delta.checkpointInterval": "50", **kept_for("1 days")}
SCHEMA = pa.schema(
    [
        pa.field("slice", pa.string()),
        pa.field("slice_start", TIME),
        pa.field("slice_end", TIME),
        pa.field("state", pa.string()),
        pa.field("as_of", TIME),
        pa.field("run", pa.string()),
        pa.field("version", pa.int64()),
        pa.field("fingerprint", pa.string()),
        pa.field("boundary", pa.string()),
        pa.field("offsets", pa.string()),
        pa.field("events_version", pa.int64()),
        pa.field("rows", pa.int64()),
        pa.field("events", pa.int64()),
        pa.field("late", pa.int64()),
        pa.field("in_time", pa.int64()),
        pa.field("checks", pa.string()),
        pa.field("checksum", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("docs", pa.string()),
        # The version of the table that brought the line: it shows which of two lines came later.
        pa.field("commit", pa.int64()),
        pa.field("day", pa.string()),
    ]
)


# All columns of a file. The day is not among them: it is the name of the file's folder.
_WRITTEN = [name for name in SCHEMA.names if name != "day"]
_DERIVED = ("slice_start", "slice_end", "day")
_READ = [name for name in SCHEMA.names if name not in _DERIVED]


@dataclass(frozen=True, kw_only=True)
class LateCountPosition(JsonLine):
    """How far late events were counted: up to the offsets ``ends``, and up to the arrival time ``at_ms``."""

    topic_id: str
    ends: Mapping[int, int]
    # 0 until a count finds that the topic was re-created. That count sets it to the arrival time of the newest landed
    # record. Records that arrived up to then may be of the earlier topic, so the offsets ``ends`` do not apply to them.
    # That count took them by their arrival times, and later counts leave them out.
    since_ms: int = 0
    at_ms: int = 0
    # Old slices with counted late events, about which the last plan did not decide. The next plan needs their names,
    # because it reads only recent days by itself.
    undecided: tuple[str, ...] = ()


class Ledger(FencedTable):
    """The ledger of a pipeline. A writer must hold the lease of the pipeline's recompute."""

    def __init__(self, pipeline: Pipeline, path: Folder, table: DeltaTable) -> None:
        """Use `open` or `read`."""
        super().__init__(path, table)
        self._pipeline = pipeline

    @classmethod
    def open(cls, lake_root: Folder, pipeline: Pipeline) -> Self:
        """Open the ledger to write. Create it if it is missing, and add columns that an older version did not have."""
        path = lake_root / pipeline.ledger_table
        table = opened(path, SCHEMA, "day", _PROPERTIES)
        adapt(table, SCHEMA, path)
        return cls(pipeline, path, table)

    @classmethod
    def read(cls, lake_root: Folder, pipeline: Pipeline) -> Self | None:
        """Open the ledger to read; return None if there was never a plan."""
        path = lake_root / pipeline.ledger_table
        table = table_at(path)
        return cls(pipeline, path, table) if table else None

    def late_count_position(self) -> LateCountPosition | None:
        """Return how far late events were counted at the last write; None before the first count."""
        # Each commit of lines repeats this position. The commit that created the table does not have it.
        counted = next((metadata["counted"] for _, metadata in self.metadata() if "counted" in metadata), None)
        return LateCountPosition.from_json(counted) if counted else None

    def newest(self, slices: Collection[str]) -> dict[str, LedgerLine]:
        """Return the newest line of each of these slices."""
        rows = self._newest({day_of_slice(slice_) for slice_ in slices})
        return _entries(rows.filter(pc.is_in(rows.column("slice"), pa.array(slices, pa.string()))))

    def days(self) -> list[str]:
        """Return the days with slices that have a line, in order."""
        return sorted({value_of(file) for file in files_with_sizes(self._table)})

    def newest_of(self, days: Collection[str]) -> dict[str, LedgerLine]:
        """Return the newest line of each slice that begins on one of these days."""
        return _entries(self._newest(days))

    def unsettled(self, days: Collection[str], versions: Mapping[str, int]) -> tuple[dict[str, LedgerLine], set[str]]:
        """Return the newest lines of slices of these days that are not settled, and the names of settled slices.

        A slice is settled if its newest line is final, with its version in ``versions`` and without late events.
        """
        rows = self._newest(days)
        at = pc.index_in(rows.column("slice"), pa.array(versions, pa.string()))
        as_final = pa.array(versions.values(), pa.int64()).take(at)
        settled = pc.and_(
            pc.and_(pc.equal(rows.column("state"), State.FINAL.value), pc.equal(rows.column("late"), 0)),
            pc.fill_null(pc.equal(rows.column("version"), as_final), False),
        )
        return _entries(rows.filter(pc.invert(settled))), set(rows.column("slice").filter(settled).to_pylist())

    def _newest(self, days: Collection[str]) -> pa.Table:
        rows = self._rows(days)
        return rows.take(_last_of_each(rows))

    def history(self, slice_: str) -> list[LedgerLine]:
        """Return all lines of a slice, in order."""
        rows = self._rows({day_of_slice(slice_)}).to_pylist()
        return [_entry(row) for row in rows if row["slice"] == slice_]

    def _rows(self, days: Collection[str]) -> pa.Table:
        """The lines of some days, in the order of their commits.

        Columns that an older version did not write are null.
        """
        files = [file for file in files_with_sizes(self._table) if value_of(file) in days]
        rows = dataset(self._table, self.path, files, SCHEMA).to_table(_READ)
        return rows.sort_by([("commit", "ascending")])

    def append(self, entries: Iterable[LedgerLine], *, counted: LateCountPosition | None = None) -> None:
        """Add lines in one commit, at most one per slice, so that the commits give the order of a slice's lines.

        ``counted``: how far late events were counted for these lines. Without it, the commit repeats the last position.
        """
        by_day: dict[str, list[LedgerLine]] = {}
        for entry in entries:
            by_day.setdefault(day_of_slice(entry.slice), []).append(entry)
        if not by_day:
            return
        with self.staged() as stage:
            actions = [self.place(self._write(stage, day, lines)) for day, lines in by_day.items()]
        counted = counted or self.late_count_position()
        metadata = json.dumps({"counted": counted.to_json() if counted else None}, separators=(",", ":"))
        self.transact(actions, metadata)
        if self.version % _MERGE_EVERY_COMMITS == 0:
            self._remove_old_lines(metadata)
            self.merge_small_files(metadata)
            self.delete_now_and_then()

    def _remove_old_lines(self, metadata: str) -> None:
        """Remove lines older than `LEDGER_KEPT_DAYS`, except each slice's newest line; a few days per turn.

        A plan reads the state of a slice from its newest line, even of very old slices.
        """
        actions = list[Action]()
        with self.staged() as stage:
            for day, (files, before) in self._days_with_old_lines().items():
                rows = dataset(self._table, self.path, files, SCHEMA).to_table(_WRITTEN)
                rows = rows.sort_by([("commit", "ascending")])
                is_newest = pc.is_in(pa.array(range(rows.num_rows)), _last_of_each(rows))
                kept = rows.filter(pc.or_(pc.greater_equal(rows.column("as_of"), before), is_newest))
                if kept.num_rows == rows.num_rows:
                    continue
                file = stage / f"day={day}" / "lines.parquet"
                write(kept, file)
                actions += [self.place(file), *(self.removal(name, size) for name, size in files.items())]
        if actions:
            self.transact(actions, metadata)

    def _days_with_old_lines(self) -> dict[str, tuple[dict[str, int], pa.Scalar]]:
        """The files of days that have old lines and more lines than slices; the days with most lines come first.

        A line's age is measured from the newest line, or from the newest plan if that is earlier. Plans have the
        broker's time. An older version of Tideline stamped some lines by the clock of a machine, which may be ahead.
        """
        actions = pa.table(self._table.get_add_actions(flatten=True))
        if not {"min.as_of", "max.as_of"} <= set(actions.column_names):
            return {}
        kept = pa.scalar(timedelta(days=KeptDays.from_env().ledger), pa.duration("us"))
        newest, counted = pc.max(actions.column("max.as_of")), self.late_count_position()
        if counted and counted.at_ms:
            newest = min(newest, pa.scalar(counted.at_ms * 1000, newest.type), key=lambda moment: moment.value)
        before = pc.subtract(newest, kept)
        days = actions.group_by("partition.day").aggregate([("num_records", "sum"), ("min.as_of", "min")])
        most = 86_400 // self._pipeline.slice_seconds
        found = days.filter(
            pc.and_(pc.less(days.column("min.as_of_min"), before), pc.greater(days.column("num_records_sum"), most))
        ).sort_by([("num_records_sum", "descending")])
        chosen = found.column("partition.day").to_pylist()[:_DAYS_A_TURN]
        by_day: dict[str, dict[str, int]] = {day: {} for day in chosen}
        for file, size in files_with_sizes(self._table).items():
            if value_of(file) in by_day:
                by_day[value_of(file)][file] = size
        return {day: (files, before.cast(TIME)) for day, files in by_day.items()}

    def _write(self, stage: Folder, day: str, lines: Iterable[LedgerLine]) -> Folder:
        file = stage / f"day={day}" / "lines.parquet"
        rows = [self._row(line) for line in lines]
        write(pa.Table.from_pylist(rows, SCHEMA).drop_columns(["day"]), file)
        return file

    def _row(self, entry: LedgerLine) -> dict[str, Any]:
        slice_ = slice_named(self._pipeline, entry.slice)
        return {
            **vars(entry),
            "state": entry.state.value,
            "slice_start": slice_.start,
            "slice_end": slice_.end,
            "as_of": datetime.fromtimestamp(entry.at_ms / 1000, UTC),
            "boundary": entry.boundary.to_json() if entry.boundary else None,
            "offsets": json.dumps(dict(entry.offsets), separators=(",", ":")),
            "commit": self.version + 1,
        }


def _last_of_each(rows: pa.Table) -> pa.Array:
    """The index of the last row of each slice."""
    last = {slice_: at for at, slice_ in enumerate(rows.column("slice").to_pylist())}
    return pa.array(last.values(), pa.int64())


def _entries(rows: pa.Table) -> dict[str, LedgerLine]:
    return {row["slice"]: _entry(row) for row in rows.to_pylist()}


def _entry(row: dict[str, Any]) -> LedgerLine:
    as_of, boundary, offsets = row.pop("as_of"), row.pop("boundary"), row.pop("offsets")
    del row["commit"]
    # A line that an older version of Tideline wrote has no in_time. If it has no late events, the number is 0.
    in_time = row["in_time"] if row["late"] else 0
    return LedgerLine(
        **{**row, "state": State(row["state"]), "in_time": in_time},
        at_ms=round(as_of.timestamp() * 1000),
        boundary=_boundary(boundary) if boundary else None,
        offsets=_offsets(offsets or "{}"),
    )


# Slices of one plan have the same boundary and offsets, so these are cached.
@lru_cache(maxsize=1024)
def _boundary(text: str) -> Boundary:
    return Boundary.from_json(text)


@lru_cache(maxsize=1024)
def _offsets(text: str) -> Mapping[int, int]:
    return {int(partition): end for partition, end in json.loads(text).items()}
