"""`events/<source>` as recompute reads it, at one pinned version: its files, its number of events, its late events.

This works without Spark: the table's log shows which files can have events of a range, and DuckDB counts them.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import duckdb
import pyarrow as pa
from deltalake import DeltaTable

from jobs.lake.delta.reading import dataset, files_with_sizes, table_at
from jobs.lake.event_hours import hour_ms
from jobs.lake.stream_tables import Note, note_at
from jobs.pipelines.layout import HOUR_MS
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import Slice, event_ranges
from jobs.pipelines.source import Source
from jobs.pipelines.window import WindowKind
from jobs.storage.folders import Folder
from jobs.times import ms_of

_ASKED = (
    *("path", "num_records", "null_count.event_time", "min.event_time", "max.event_time"),
    *("max.offset", "max.arrival_time"),
)


@dataclass(frozen=True, kw_only=True)
class Count:
    """The expected content of a slice: its accepted events, and how often events fall into its windows."""

    events: int = 0
    window_events: int = 0


@dataclass(frozen=True, kw_only=True)
class Landed:
    """The events of a source at one version of their table. ``note`` has the offsets up to which they are landed."""

    path: Folder
    table: DeltaTable
    note: Note | None

    @classmethod
    def at(cls, lake_root: Folder, source: Source, version: int | None = None) -> Self | None:
        """Pin the newest version, or an older one; return None if nothing was ever landed."""
        path = lake_root / source.events_table
        table = table_at(path, version)
        return cls(path=path, table=table, note=note_at(path, table.version())) if table else None

    @property
    def version(self) -> int:
        """The pinned version."""
        return int(self.table.version())

    def topic_id(self, topic: str) -> str | None:
        """Return the id of the topic that was landed last; None if no commit has it yet."""
        return self.note.topic_id(topic) if self.note else None

    @property
    def events_from_ms(self) -> int:
        """Events that happened before this time were removed as too old; 0 if none were."""
        return self.note.events_from_ms if self.note else 0

    def ends(self, topic: str, topic_id: str) -> dict[int, int]:
        """Return how far each partition is landed; empty if a topic with another id was landed last."""
        return self.note.ends[topic] if self.note and self.note.topic_id(topic) == topic_id else {}

    def first_ms(self) -> int | None:
        """Return the earliest event time, by the log alone. A file without statistics counts with its hour's begin."""
        firsts = [first for first, _ in self._spans.values()]
        return min(firsts, default=None)

    def files(self, ranges: Iterable[tuple[int, int]]) -> list[str]:
        """Return the files, relative to the table, that may have events of these ranges [from, to) of event time."""
        wanted = list(ranges)
        return [
            file
            for file, (first, last) in self._spans.items()
            if any(first < to and from_ <= last for from_, to in wanted)
        ]

    def deleted(self, files: Iterable[str]) -> list[str]:
        """Return those of the files that no longer exist: merged files are deleted some hours later."""
        now = files_with_sizes(DeltaTable(str(self.path)))
        return [file for file in files if file not in now and not (self.path / file).is_file()]

    def count(self, pipeline: Pipeline, slices: Sequence[Slice]) -> dict[str, Count]:
        """Count the accepted events of each slice, and how often events fall into its windows.

        Duplicates count as events of the slice, but not in its windows. Slices without events are left out.
        """
        if not slices:
            return {}
        window, length = pipeline.window, pipeline.slice_seconds * 1000
        same = ", ".join(["time", *(f'"{name}"' for name in pipeline.source.identity)])
        counted = f"(SELECT DISTINCT {same} FROM accepted)" if pipeline.source.identity else "accepted"
        happened = _happened(min(slices).start_ms, max(slices).end_ms + window.reach_ms)
        in_slice = f"SELECT time // {length} AS slice, count(*) FROM accepted GROUP BY 1"
        in_windows = f"""
            SELECT start // {length} AS slice, count(*)
            FROM (SELECT unnest(range(
                (time - {window.size_ms} + {window.slide_ms}) // {window.slide_ms} * {window.slide_ms},
                time + 1, {window.slide_ms})) AS start FROM {counted})
            GROUP BY 1"""
        # One late slice of last week must not cause a read of the whole week.
        with self._accepted(self.files(event_ranges(pipeline, slices)), happened) as database:
            events: dict[int, int] = dict(database.execute(in_slice).fetchall())
            # The time of an event alone gives its windows, except for sessions.
            has_grid = window.kind is not WindowKind.SESSION
            windows: dict[int, int] = dict(database.execute(in_windows).fetchall()) if has_grid else events
        counts = {
            slice_.name: Count(
                events=events.get(slice_.start_ms // length, 0), window_events=windows.get(slice_.start_ms // length, 0)
            )
            for slice_ in slices
        }
        return {name: count for name, count in counts.items() if count.events or count.window_events}

    def newest_arrival_ms(self) -> int:
        """Return when the newest record arrived, by the log alone; the present time if a file has no statistics."""
        newest = [action.get("max.arrival_time") for action in self._actions]
        known = [ms_of(moment) for moment in newest if moment]
        return max(known) if len(known) == len(newest) and known else round(time.time() * 1000)

    def since(self, ends: Mapping[int, int], since_ms: int, before_ms: int) -> pa.Table:
        """Return the accepted events at or after the offsets ``ends`` that arrived after ``since_ms``.

        Only events that happened before ``before_ms`` are returned. The columns are partition, offset, time and
        arrival.
        """
        landed_after = " OR ".join(
            [f'(partition = {p} AND "offset" >= {end})' for p, end in ends.items()]
            + [f"partition NOT IN ({', '.join(map(str, ends))})" if ends else "true"]
        )
        # Of a partition that is missing in ``ends`` all events are returned.
        files = self._holding_offsets_from(min((ends.get(partition, 0) for partition in self._partitions), default=0))
        with self._accepted(
            [file for file in self.files([(0, before_ms)]) if file in files], _happened(0, before_ms)
        ) as database:
            where = f"arrival > {since_ms} AND ({landed_after})"
            return database.sql(
                f'SELECT partition, "offset", time, arrival FROM accepted WHERE {where}'
            ).to_arrow_table()

    def newest(self, span_ms: int) -> duckdb.DuckDBPyConnection:
        """Open a database with the view `accepted`: the events that arrived within ``span_ms`` of the newest record."""
        arrivals = {action["path"]: action.get("max.arrival_time") for action in self._actions}
        from_ms = max(0, max((ms_of(newest) for newest in arrivals.values() if newest), default=0) - span_ms)
        files = [path for path, newest in arrivals.items() if newest is None or ms_of(newest) >= from_ms]
        return self._accepted(files, f"arrival_time >= make_timestamptz({from_ms * 1000})")

    def _accepted(self, files: Sequence[str], condition: str) -> duckdb.DuckDBPyConnection:
        """Open a database with the view `accepted`: accepted events under a condition, with times in milliseconds."""
        database = duckdb.connect()
        # One thread, because the streams use the same machine.
        database.execute("SET TimeZone = 'UTC'; SET threads = 1")
        database.register("landed", dataset(self.table, self.path, files))
        database.execute(
            f"""CREATE TEMP VIEW accepted AS
            SELECT *, epoch_ms(event_time) AS time, epoch_ms(arrival_time) AS arrival
            FROM landed WHERE reason IS NULL AND {condition}"""
        )
        return database

    @cached_property
    def _actions(self) -> list[dict[str, Any]]:
        """The log's statistics of each file, reduced to the columns that are used here."""
        table = pa.table(self.table.get_add_actions(flatten=True))
        asked = table.select([name for name in _ASKED if name in table.column_names])
        rows: list[dict[str, Any]] = asked.to_pylist()
        return rows

    @cached_property
    def _spans(self) -> dict[str, tuple[int, int]]:
        """The first and last event time of each file, by the log; those of its hour if the log has no statistics.

        Files with only rejected records are left out.
        """
        found = {}
        for action in self._actions:
            hour = hour_ms(action["path"])
            rows, nulls = action.get("num_records"), action.get("null_count.event_time")
            if rows is not None and rows == nulls:
                continue
            first, last = action.get("min.event_time"), action.get("max.event_time")
            found[action["path"]] = (
                max(ms_of(first), hour) if first else hour,
                min(ms_of(last), hour + HOUR_MS - 1) if last else hour + HOUR_MS - 1,
            )
        return found

    @property
    def _partitions(self) -> set[int]:
        """The partitions of the topic that was landed last."""
        topics = self.note.topics.values() if self.note else ()
        return {partition for ranges in topics for partition in ranges.offsets}

    def _holding_offsets_from(self, offset: int) -> set[str]:
        last = ((action["path"], action.get("max.offset")) for action in self._actions)
        return {path for path, newest in last if newest is None or newest >= offset}


def _happened(from_ms: int, before_ms: int) -> str:
    from_, before = (f"make_timestamptz({ms * 1000})" for ms in (from_ms, before_ms))
    return f"event_time >= {from_} AND event_time < {before}"
