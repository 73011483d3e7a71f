"""A lake with the tables of a scene, and what an account says of it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.control.folder import Control
from jobs.finality import account
from jobs.lake.accounts import Accounts
from jobs.lake.columns import TIME, columns_of
from jobs.lake.delta.manifest import Manifest
from jobs.lake.final import FinalTable
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.publication import Publication
from jobs.lake.slices import Header
from jobs.lake.stream_tables import Note, Ranges, TableWriter
from jobs.pipelines import PIPELINES
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import slice_at
from jobs.query.lake import Lake
from jobs.settings import Settings
from tests.judges.naive_stream import T0, Batch, Event, Scene, at
from tests.query.test_query import EVENTS

# These slices lie weeks ago.
PIPELINE = PIPELINES["rolling_sum"]
FIRST, SECOND, THIRD = (slice_at(PIPELINE, T0 + minute * 60_000) for minute in range(3))
LIVE = pa.schema(
    [
        *columns_of(PIPELINE),
        pa.field("slice", pa.string()),
        pa.field("epoch", pa.int64()),
        pa.field("batch", pa.int64()),
        pa.field("as_of", TIME),
        pa.field("fingerprint", pa.string()),
        pa.field("offsets", pa.string()),
        pa.field("watermark", TIME),
    ]
)


@dataclass
class Made:
    """A lake with the tables of a scene."""

    settings: Settings
    pipeline: Pipeline = PIPELINE

    @property
    def root(self) -> Path:
        return self.settings.lake_root

    def build(self, made: Scene) -> None:
        self.land(made.events)
        for number, batch in enumerate(made.batches):
            rows = [row for row in made.live_rows() if row[-2] == number]
            self.stream(number, batch, rows)
        for name, offsets in sorted(made.finals.items()):
            rows = [row for row in made.final_rows() if made.slice(round(row[0].timestamp() * 1000)) == name]
            self.publish(name, rows, offsets)

    def land(self, events: Iterable[Event], batch: int = 0) -> None:
        writer = TableWriter.open(self.root / "events" / "numbers", EVENTS, "hour", epoch=1)
        found = list(events)
        rows = [
            {"topic": "numbers", "partition": e.partition, "offset": e.offset, "key": e.name, "id": e.id}
            | {"arrival_time": at(e.arrival_ms), "event_time": at(e.event_ms), "value": e.value, "reason": None}
            for e in found
        ]
        schema = pa.schema([field for field in EVENTS if field.name in rows[0]])
        stage = writer.new_stage()
        write(stage / f"hour={at(T0):%Y-%m-%dT%H}", pa.Table.from_pylist(rows, schema))
        ends = {p: max(e.offset + 1 for e in found if e.partition == p) for p in {e.partition for e in found}}
        writer.commit(Manifest.of(stage), note("ingest", batch, {p: (0, end) for p, end in ends.items()}))

    def stream(self, number: int, batch: Batch, rows: Iterable[tuple[Any, ...]]) -> None:
        writer = TableWriter.open(self.root / self.pipeline.live_table, LIVE, "slice", epoch=1)
        stage = writer.new_stage()
        by_slice: dict[str, list[dict[str, Any]]] = {}
        names = [*columns_of(self.pipeline).names, "epoch", "batch", "as_of"]
        for row in rows:
            name = slice_at(self.pipeline, round(row[0].timestamp() * 1000)).name
            values = dict(zip(names, row, strict=True), fingerprint=self.pipeline.fingerprint)
            by_slice.setdefault(name, []).append(values)
        for name, lines in by_slice.items():
            schema = pa.schema([field for field in LIVE if field.name in lines[0]])
            write(stage / f"slice={name}", pa.Table.from_pylist(lines, schema))
        line = {"epoch": 1, "batch": number, "as_of": at(batch.as_of_ms), "watermark": at(batch.watermark_ms)}
        line |= {"fingerprint": self.pipeline.fingerprint, "offsets": json.dumps(dict(batch.ranges))}
        schema = pa.schema([field for field in LIVE if field.name in line])
        write(stage / "slice=batches", pa.Table.from_pylist([line], schema))
        writer.commit(Manifest.of(stage), note("rolling_sum", number, batch.ranges, self.pipeline.fingerprint))

    def publish(
        self, name: str, rows: Iterable[tuple[Any, ...]], offsets: Mapping[int, int], version: int = 1, **more: Any
    ) -> None:
        final, lines = FinalTable.open(self.root, self.pipeline), list(rows)
        header = Header(
            slice=name,
            slice_seconds=self.pipeline.slice_seconds,
            version=version,
            as_of_ms=T0,
            run="r",
            fingerprint=more.get("fingerprint", self.pipeline.fingerprint),
            topic_id=more.get("topic_id", "t"),
            offsets=offsets,
            events_version=0,
            rows=len(lines),
            events=more.get("events", 0),
            checksum="",
            verdict="passed",
            reason="closed",
        )
        names = columns_of(self.pipeline).names
        values = [dict(zip(names, row, strict=True)) for row in lines]
        file = final.new_stage() / f"slice={name}"
        files = (write(file, pa.Table.from_pylist(values, columns_of(self.pipeline))),) if values else ()
        final.publish([Publication(header=header, files=files)])

    def account(self, run: str = "run") -> None:
        account.run(PipelineLake(self.settings.lake_root, self.pipeline), self.settings, run)

    def query(self, sql: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = Lake(self.root).query(sql).to_pylist(maps_as_pydicts="lossy")
        return found

    def slices(self) -> list[tuple[Any, ...]]:
        sql = (
            "SELECT slice, version, windows, differing, unexplained, note FROM balance_rolling_sum WHERE kind = 'slice'"
        )
        return [tuple(row.values()) for row in self.query(f"{sql} ORDER BY 1, 2")]

    def asked(self) -> dict[str, Any] | None:
        return Control.of(self.root, "rolling_sum").documents.read("prune")


def write(folder: Path, rows: pa.Table) -> Path:
    folder.mkdir(parents=True)
    pq.write_table(rows, folder / "rows.parquet")
    return folder / "rows.parquet"


def note(job: str, batch: int, ranges: Mapping[int, tuple[int, int]], fingerprint: str | None = None) -> Note:
    topics = {"numbers": Ranges(topic_id="t", offsets=dict(ranges))}
    return Note(job=job, write_id=job, batch=batch, epoch=1, cluster_id="c", topics=topics, fingerprint=fingerprint)


def two_slices() -> Scene:
    """One event in time in each slice, and a late one in the first."""
    first_ms, second_ms = FIRST.end_ms - 1000, SECOND.start_ms + 1000
    events = [
        Event(0, 0, first_ms, "a", arrival_ms=first_ms),
        Event(0, 1, second_ms, "a", arrival_ms=second_ms),
        Event(0, 2, first_ms, "b", arrival_ms=second_ms),
    ]
    batches = [Batch({0: (0, 1)}, 0), Batch({0: (1, 2)}, T0), Batch({0: (2, 3)}, SECOND.start_ms + 500)]
    return Scene(PIPELINE, events, batches, {FIRST.name: {0: 3}, SECOND.name: {0: 3}})


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("it started Spark")


def done(made: Made, *accounts: tuple[str, int]) -> None:
    """Write an account of these slices and versions."""
    totals = [{"slice": name, "version": version, "run": "r", "kind": "slice"} for name, version in accounts]
    accounts = Accounts.open(made.root, made.pipeline)
    accounts.add(accounts.new_stage(), 0, totals)
    accounts.maintain("")
