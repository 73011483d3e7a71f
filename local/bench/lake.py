"""A made-up lake for the benchmark of recompute: invented rows, written by the product's own writers.

Events and live rows come in micro-batches and are merged as the streaming jobs merge them; final slices have their
headers, and the ledger its lines.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Self

import duckdb
import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from jobs.broker.kafka import TopicState, admin, require
from jobs.broker.streams import arrow_schema
from jobs.control.writing import writing
from jobs.lake.columns import columns_of, live_schema, schema_of
from jobs.lake.delta.manifest import Manifest
from jobs.lake.final import FinalTable
from jobs.lake.ledger import LateCountPosition
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.publication import Publication
from jobs.lake.slices import Boundary, Header, LedgerLine, State, reconciled
from jobs.lake.stream_tables import Note, Ranges, TableWriter
from jobs.pipelines import INGEST, PIPELINES
from jobs.pipelines.layout import BATCHES_SLICE, HOUR_FORMAT, HOUR_MS
from jobs.pipelines.slices import Slice, slice_at, slice_named
from jobs.pipelines.source import Source
from jobs.settings import Settings
from jobs.storage.folders import Folder, remove
from jobs.storage.parquet import write
from jobs.streaming.ingest import landed

PIPELINE = PIPELINES["rolling_sum"]
KEYS = 100
WINDOWS = PIPELINE.slice_seconds * 1000 // PIPELINE.window.size_ms
_SOURCE = PIPELINE.source
_LIVE_BATCH_SECONDS = 5
_RECORDS = (
    "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, "
    "headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
)
# The values look random but are the same in every run. A few series have most of the events.
_EVENTS = """
SELECT '{topic}' AS topic, n % {partitions} AS partition, n // {partitions} AS "offset",
  make_timestamptz((happened + 200) * 1000) AS arrival_time,
  make_timestamptz((happened + CAST(hash(n) % 200 AS BIGINT)) * 1000) AS event_time,
  printf('series-%04d', CAST(floor({keys} * pow(hash(n + 1) % 65536 / 65536, 3)) AS INTEGER)) AS key,
  n AS id, CAST(hash(n + 2) % 1000000000 AS DECIMAL(12,0)) * CAST(0.000001 AS DECIMAL(6,6)) AS value
FROM (SELECT range AS n, {from_ms} + (range - {first}) * ({to_ms} - {from_ms} - 200) // {count} AS happened
      FROM range({first}, {first} + {count}))"""
_WINDOWS = """
SELECT make_timestamptz(start * 1000) AS window_start, make_timestamptz((start + {size}) * 1000) AS window_end,
  printf('series-%04d', series) AS key, (hash(start + series) % 1000000000) / 1000 AS total,
  (hash(start + series) % 1000000000) / 10000 AS mean, 10 AS events
FROM range({from_ms}, {to_ms}, {size}) AS starts(start), range({keys}) AS keys(series)"""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Events that lie evenly in [from, to) of event time, within one hour, and are landed in some micro-batches."""

    from_ms: int
    to_ms: int
    events: int
    batches: int


@dataclass(frozen=True, kw_only=True)
class MadeLake:
    """The place of a made-up lake, and the topic that its rows seem to come from."""

    settings: Settings
    topic: TopicState

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Use the lake and the broker of the settings."""
        with admin(settings.kafka) as client:
            return cls(settings=settings, topic=require(client, [_SOURCE.name])[_SOURCE.name])

    @property
    def tables(self) -> PipelineLake:
        """The tables of the pipeline that is measured."""
        return PipelineLake(self.settings.lake_root, PIPELINE)

    def land(self, schema: pa.Schema, stretches: Iterable[Stretch]) -> int:
        """Write events as `ingest` does. Return how many each partition has afterwards."""
        writer = TableWriter.open(self.settings.lake_root / _SOURCE.events_table, schema, "hour", epoch=1)
        partitions, total = self.topic.partitions, 0
        named = {"topic": _SOURCE.name, "partitions": partitions, "keys": KEYS}
        parts = (part for stretch in stretches for part in _parts(stretch, partitions))
        with _database() as database:
            for batch, (from_ms, to_ms, count) in enumerate(parts):
                stage = writer.new_stage()
                folder = stage / f"hour={time_of(from_ms):{HOUR_FORMAT}}"
                query = _EVENTS.format(**named, from_ms=from_ms, to_ms=to_ms, first=total, count=count)
                _write(_rows(database, query, schema), folder, drop="hour")
                offsets = total // partitions, (total + count) // partitions
                writer.commit(Manifest.of(stage), note_of(INGEST, _SOURCE, self.topic, *offsets, batch=batch))
                writer.maintain()
                writer.discard_stages()
                total += count
        return total // partitions

    def show_live(self, slices: Sequence[Slice], as_of_ms: int) -> None:
        """Write live rows as a stream does: every window twice, and a row for each micro-batch."""
        schema = live_schema(PIPELINE)
        writer = TableWriter.open(self.settings.lake_root / PIPELINE.live_table, schema, "slice", epoch=1)
        step_ms = _LIVE_BATCH_SECONDS * 1000
        starts = [at for slice_ in slices for at in range(slice_.start_ms, slice_.end_ms, step_ms)]
        with _database() as database:
            for batch, start in enumerate(starts):
                stage = writer.new_stage()
                signed = {"epoch": 1, "batch": batch, "as_of": time_of(as_of_ms), "fingerprint": PIPELINE.fingerprint}
                for from_ms in (start - step_ms, start) if batch else (start,):
                    rows = _signed(_rows(database, _windows(from_ms, from_ms + step_ms, KEYS), schema), signed)
                    _write(rows, stage / f"slice={slice_at(PIPELINE, from_ms).name}", drop="slice")
                about = pa.Table.from_pylist([{**signed, "offsets": "{}", "watermark": time_of(start)}], schema)
                _write(about, stage / f"slice={BATCHES_SLICE}", drop="slice")
                note = note_of(PIPELINE.name, _SOURCE, self.topic, batch, batch + 1, batch=batch)
                writer.commit(Manifest.of(stage), replace(note, fingerprint=PIPELINE.fingerprint))
                writer.maintain()
                writer.discard_stages()

    def make_final(self, slices: Sequence[Slice], *, keys: int, as_of_ms: int, end: int = 0) -> None:
        """Publish slices, each with one window a second for each key, and add the lines of the ledger."""
        with writing(self.settings.lake_root, PIPELINE.recompute_job):
            final = self.tables.open_final()
            headers = [self.header(slice_, rows=WINDOWS * keys, as_of_ms=as_of_ms, end=end) for slice_ in slices]
            files = stage_windows(final, headers, keys)
            final.publish([Publication(header=h, files=(file,)) for h, file in zip(headers, files, strict=True)])
            # That many publishes would have left a checkpoint of the log, since every 50th commit writes one.
            DeltaTable(str(final.path)).create_checkpoint()
            boundary = Boundary(topic_id=self.topic.topic_id, ends=self._ends(end))
            taken = LedgerLine(slice="", state=State.FINAL, at_ms=as_of_ms, run="made-up", boundary=boundary)
            lines = [reconciled(header, taken) for header in headers]
            counted = LateCountPosition(topic_id=self.topic.topic_id, ends=self._ends(end), at_ms=as_of_ms)
            self.tables.open_ledger().append(lines, counted=counted)

    def header(self, slice_: Slice, *, rows: int, as_of_ms: int, end: int = 0, version: int = 1) -> Header:
        """The header of a final slice."""
        return Header(
            slice=slice_.name,
            slice_seconds=PIPELINE.slice_seconds,
            version=version,
            as_of_ms=as_of_ms,
            run="made-up",
            fingerprint=PIPELINE.fingerprint,
            topic_id=self.topic.topic_id,
            offsets=self._ends(end),
            events_version=0,
            rows=rows,
            events=10 * rows,
            checksum="",
            verdict="passed",
            reason="made up",
        )

    def _ends(self, end: int) -> dict[int, int]:
        return dict.fromkeys(range(self.topic.partitions), end)


@contextmanager
def lake_beside(settings: Settings, name: str) -> Iterator[MadeLake]:
    """Make an empty lake beside the others, and remove it afterwards."""
    root = settings.lake_root / name
    try:
        yield MadeLake.of(replace(settings, lake_root=root))
    finally:
        remove(root)


def newest_hour() -> int:
    """The begin of the newest hour of made-up events. The slices of this hour are over."""
    return int(time.time() * 1000) // HOUR_MS * HOUR_MS - 2 * HOUR_MS


def note_of(job: str, source: Source, topic: TopicState, start: int, end: int, *, batch: int) -> Note:
    """The note of a commit about invented offsets."""
    offsets = {partition: (start, end) for partition in range(topic.partitions)}
    ranges = Ranges(topic_id=topic.topic_id, offsets=offsets)
    return Note(
        job=job, write_id="made-up", batch=batch, epoch=1, cluster_id=topic.cluster_id, topics={source.name: ranges}
    )


def events_schema(spark: SparkSession, source: Source = _SOURCE) -> pa.Schema:
    """The columns of the table of a source's events, as `ingest` writes them."""
    return arrow_schema(landed(spark.createDataFrame([], _RECORDS), source))


def stage_windows(final: FinalTable, headers: Sequence[Header], keys: int) -> list[Folder]:
    """Stage the rows of slices as Spark would, a file for each slice: one window a second for each key."""
    files, stage = [], final.new_stage()
    with _database() as database:
        for header in headers:
            slice_ = slice_named(PIPELINE, header.slice)
            rows = _rows(database, _windows(slice_.start_ms, slice_.end_ms, keys), schema_of(PIPELINE))
            signed = {"version": header.version, "as_of": time_of(header.as_of_ms), "run": header.run}
            signed |= {"fingerprint": header.fingerprint}
            staged = _signed(rows, signed).select([*columns_of(PIPELINE).names, *signed])
            files.append(_write(staged, stage / f"slice={header.slice}"))
    return files


def _windows(from_ms: int, to_ms: int, keys: int) -> str:
    return _WINDOWS.format(from_ms=from_ms, to_ms=to_ms, keys=keys, size=PIPELINE.window.size_ms)


def _parts(stretch: Stretch, partitions: int) -> Iterator[tuple[int, int, int]]:
    """Its micro-batches: from, to, and the number of events, which is the same for each partition of the topic."""
    step, each = (stretch.to_ms - stretch.from_ms) // stretch.batches, stretch.events // partitions
    for number in range(stretch.batches):
        from_ms = stretch.from_ms + number * step
        count = each * (number + 1) // stretch.batches - each * number // stretch.batches
        if count:
            yield from_ms, from_ms + step, count * partitions


@contextmanager
def _database() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as database:
        database.execute("SET TimeZone = 'UTC'")
        yield database


def _rows(database: duckdb.DuckDBPyConnection, query: str, schema: pa.Schema) -> pa.Table:
    """The result of a query with a table's columns. Columns that the query does not return are null."""
    made = database.sql(query).to_arrow_table()
    columns = [
        made.column(field.name).cast(field.type) if field.name in made.schema.names else pa.nulls(len(made), field.type)
        for field in schema
    ]
    return pa.table(columns, pa.schema([field.with_nullable(True) for field in schema]))


def _signed(rows: pa.Table, values: dict[str, object]) -> pa.Table:
    """The rows with the same value in every row of some columns."""
    for name, value in values.items():
        field = rows.schema.field(name)
        column = pa.repeat(pa.scalar(value, field.type), len(rows))
        rows = rows.set_column(rows.schema.get_field_index(name), field, column)
    return rows


def _write(rows: pa.Table, folder: Folder, drop: str | None = None) -> Folder:
    """Write one file into the folder of a partition, without the column ``drop`` of the partition."""
    file = folder / f"{time.monotonic_ns()}.parquet"
    write(rows.drop_columns([drop]) if drop else rows, file)
    return file


def time_of(milliseconds: int) -> datetime:
    """Milliseconds since 1970 as a time."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)
