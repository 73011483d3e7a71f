"""The commits of simulated days, made by the product's own writers: one class for each process that writes the year.

A step has one or more adjacent slices. A step of one slice makes the same commits as the platform. In a longer step,
the slices share commits that they would have had one by one, and only the last slice gets live rows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pyarrow as pa

from jobs.broker.kafka import TopicState
from jobs.control.events_needed import first_needed_ms, needed_from, write_needed_from
from jobs.control.incidents import Incidents
from jobs.finality.account_inputs import accounts_kept_from
from jobs.finality.run.folder import Plan, RunFolder, Work, discard_old
from jobs.lake.accounts import drift_schema
from jobs.lake.columns import columns_of, live_schema, schema_of
from jobs.lake.delta.manifest import Manifest
from jobs.lake.event_hours import KeptEvents
from jobs.lake.ledger import LateCountPosition
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.publication import Publication
from jobs.lake.slices import Boundary, Header, LedgerLine, State, reconciled
from jobs.lake.stream_tables import TableWriter
from jobs.pipelines import INGEST
from jobs.pipelines.days import DAY_MS
from jobs.pipelines.layout import BATCHES_SLICE, HOUR_FORMAT, HOUR_MS
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import Slice, day_of_slice, over_at, slice_named, start_ms_of
from jobs.pipelines.source import Source
from jobs.settings import KeptDays, Settings
from jobs.storage.folders import Folder
from jobs.storage.parquet import write
from jobs.upkeep import old_files as upkeep
from local.bench.lake import note_of, time_of
from local.bench.year.clock import Clock

ACCOUNT_EVERY_MS = 15 * 60_000
EVENTS_OF_A_SLICE = 3
_STATES = (State.OPEN, State.CLOSED, State.RECOMPUTING, State.AUDITING)
_LIVE_KEPT_MS = HOUR_MS
_FAR_UPKEEP_DAYS = 30
_KEY = "series"


@dataclass(kw_only=True)
class EventsYear:
    """Writes a source's events like `ingest`: one event per partition in each slice."""

    settings: Settings
    source: Source
    topic: TopicState
    schema: pa.Schema
    clock: Clock
    begin_ms: int

    def tables(self) -> list[str]:
        """The source's table of events."""
        return [self.source.events_table]

    def open(self) -> None:
        """Open the table, as a starting driver does."""
        path = self.settings.lake_root / self.source.events_table
        self.writer = TableWriter.open(path, self.schema, "hour", epoch=1)

    def step(self, slices: Sequence[Slice]) -> None:
        """Land the events of these slices in one micro-batch."""
        by_hour: dict[str, list[dict[str, Any]]] = {}
        for slice_ in slices:
            by_hour.setdefault(slice_.start.strftime(HOUR_FORMAT), []).extend(self._events(slice_))
        stage = self.writer.new_stage()
        for hour, rows in by_hour.items():
            _write(rows, self.schema, stage / f"hour={hour}", drop="hour")
        number = offset_at(self.begin_ms, slices[0])
        note = note_of(INGEST, self.source, self.topic, number, number + len(slices), batch=_batch(self.writer))
        self.writer.commit(Manifest.of(stage), note)
        self.writer.discard_stages()
        self.writer.maintain(events=self._kept())

    def _kept(self) -> KeptEvents:
        """Events are kept for as long as their source says, and longer if a pipeline still needs them."""
        root = self.settings.lake_root
        kept = timedelta(days=self.source.events_kept_days)
        return KeptEvents(kept=kept, needed_from_ms=lambda: first_needed_ms(needed_from(root, self.source)))

    def _events(self, slice_: Slice) -> list[dict[str, Any]]:
        offset, at = offset_at(self.begin_ms, slice_), slice_.start
        named = {"topic": self.source.name, "arrival_time": at, "event_time": at, "key": _KEY}
        return [{**named, "partition": each, "offset": offset} for each in range(self.topic.partitions)]


@dataclass(kw_only=True)
class PipelineYear:
    """Writes the tables of a pipeline like its stream, its recompute and its account."""

    settings: Settings
    pipeline: Pipeline
    topic: TopicState
    clock: Clock
    begin_ms: int
    live: list[Slice] = field(default_factory=list)
    unaccounted: list[Header] = field(default_factory=list)

    def tables(self) -> list[str]:
        """The five tables of the pipeline."""
        own = self.pipeline
        return [own.live_table, own.final_table, own.ledger_table, own.drift_table, own.balance_table]

    def open(self) -> None:
        """Open the tables, as starting processes do."""
        lake, schema = PipelineLake(self.settings.lake_root, self.pipeline), live_schema(self.pipeline)
        self._stream = TableWriter.open(lake.root / self.pipeline.live_table, schema, "slice", epoch=1)
        self._final, self._ledger, self._accounts = lake.open_final(), lake.open_ledger(), lake.open_accounts()

    def step(self, slices: Sequence[Slice]) -> None:
        """Show the slices live, make them final, and account for them."""
        self._show_live(slices)
        headers = [self._header(slice_) for slice_ in slices]
        with_folder = self._run_folder(headers) if len(slices) == 1 else _nothing
        self._announce(headers)
        self._publish(headers)
        self._ledger.append([reconciled(header, self._entry(header, State.FINAL)) for header in headers])
        self._final.maintain(_nothing, round(self.clock.now * 1000))
        with_folder()
        self.unaccounted += headers
        if len(slices) > 1 or slices[-1].end_ms % ACCOUNT_EVERY_MS == 0:
            self._account()

    def _show_live(self, slices: Sequence[Slice]) -> None:
        shown, batch = slices[-1], _batch(self._stream)
        signed = {"epoch": 1, "batch": batch, "as_of": shown.end, "fingerprint": self.pipeline.fingerprint}
        stage, schema = self._stream.new_stage(), live_schema(self.pipeline)
        _write([{**self._window(shown.name), **signed}], schema, stage / f"slice={shown.name}", drop="slice")
        about = {**signed, "offsets": "{}", "watermark": shown.start}
        _write([about], schema, stage / f"slice={BATCHES_SLICE}", drop="slice")
        number = offset_at(self.begin_ms, slices[0])
        note = note_of(self.pipeline.name, self.pipeline.source, self.topic, number, number + len(slices), batch=batch)
        self._stream.commit(Manifest.of(stage), note)
        self._stream.discard_stages()
        self._stream.maintain(self._superseded)
        self.live.append(shown)

    def _superseded(self) -> list[str]:
        before = self.clock.now * 1000 - _LIVE_KEPT_MS
        gone, self.live = [s for s in self.live if s.end_ms < before], [s for s in self.live if s.end_ms >= before]
        return [slice_.name for slice_ in gone]

    def _header(self, slice_: Slice) -> Header:
        end = offset_at(self.begin_ms, slice_) + 1
        return Header(
            slice=slice_.name,
            slice_seconds=self.pipeline.slice_seconds,
            version=1,
            as_of_ms=round(self.clock.now * 1000),
            run=f"scheduled__{slice_.end:%Y-%m-%dT%H:%M:%S}",
            fingerprint=self.pipeline.fingerprint,
            topic_id=self.topic.topic_id,
            offsets=dict.fromkeys(range(self.topic.partitions), end),
            events_version=offset_at(self.begin_ms, slice_),
            rows=1,
            events=self.topic.partitions,
            checksum=f"{slice_.start_ms:064x}",
            verdict="passed",
            reason="closed",
        )

    def _entry(self, header: Header, state: State) -> LedgerLine:
        boundary = Boundary(topic_id=header.topic_id, ends=header.offsets)
        return LedgerLine(slice=header.slice, state=state, at_ms=header.as_of_ms, run=header.run, boundary=boundary)

    def _announce(self, headers: Sequence[Header]) -> None:
        """Write the lines of the ledger that a plan and an audit write before a publish."""
        counted = LateCountPosition(topic_id=headers[-1].topic_id, ends=headers[-1].offsets, at_ms=headers[-1].as_of_ms)
        for state in _STATES:
            entries = [self._entry(header, state) for header in headers]
            self._ledger.append(entries, counted=counted if state is State.CLOSED else None)

    def _publish(self, headers: Sequence[Header]) -> None:
        names = [*columns_of(self.pipeline).names, "version", "as_of", "run", "fingerprint"]
        schema = pa.schema([schema_of(self.pipeline).field(name) for name in names])
        rows = pa.Table.from_pylist([self._final_row(header) for header in headers], schema)
        with self._final.staged() as stage:
            publications = []
            for number, header in enumerate(headers):
                file = stage / f"slice={header.slice}" / "part-0.parquet"
                write(rows.slice(number, 1), file)
                publications.append(Publication(header=header, files=(file,)))
            self._final.publish(publications)

    def _final_row(self, header: Header) -> dict[str, Any]:
        signed = {"version": 1, "as_of": time_of(header.as_of_ms), "run": header.run, "fingerprint": header.fingerprint}
        return {**self._window(header.slice), **signed}

    def _run_folder(self, headers: Sequence[Header]) -> Callable[[], None]:
        """Make the folder of a slice's run. Return the function that ends the run."""
        (header,) = headers
        boundary = Boundary(topic_id=header.topic_id, ends=header.offsets)
        work = Work(slice=header.slice, version=0, reason="closed", boundary=boundary, events=3, window_events=3)
        plan = Plan(
            pipeline=self.pipeline.name,
            run=header.run,
            as_of_ms=header.as_of_ms,
            fingerprint=header.fingerprint,
            checks=self.pipeline.checks_fingerprint,
            topic_id=header.topic_id,
            offsets=header.offsets,
            events_version=header.events_version,
            work=(work,),
            unannounced=(),
        )
        lake = PipelineLake(self.settings.lake_root, self.pipeline)
        discard_old(lake, and_abandoned=True)
        folder = RunFolder.of(lake, header.run)
        folder.begin(plan)
        return folder.end

    def _account(self) -> None:
        accounts, signed = self._accounts, {"run": "scheduled", "as_of": time_of(round(self.clock.now * 1000))}
        stage, totals, by_day = accounts.new_stage(), list[dict[str, Any]](), dict[str, list[dict[str, Any]]]()
        for header in self.unaccounted:
            at = {"slice": header.slice, "version": header.version, **signed}
            counts = {"windows": 1, "differing": 1, "unexplained": 0}
            totals += [{**at, "kind": kind, **counts} for kind in ("slice", "age")]
            totals.append({**at, "kind": "cause", "cause": "late", "events": 1, "window_events": 1})
            by_day.setdefault(day_of_slice(header.slice), []).append(
                {**self._window(header.slice), "slice": header.slice, "version": header.version, "run": "scheduled"}
            )
        for day, rows in by_day.items():
            _write(rows, drift_schema(self.pipeline), stage / f"day={day}", drop="day")
        accounts.add(stage, len(self.unaccounted), totals)
        accounts.maintain(accounts_kept_from(self._final))
        self._write_needed_from(self.unaccounted[-1])
        self.unaccounted = []

    def _write_needed_from(self, done: Header) -> None:
        """Record the events that are still needed, as a plan and an account do.

        These are events that may still reopen a slice, and the events of slices without an account.
        """
        root, from_ms = self.settings.lake_root, start_ms_of(done.slice)
        write_needed_from(root, self.pipeline.account_job, from_ms)
        write_needed_from(root, self.pipeline.recompute_job, from_ms - self.pipeline.source.horizon_hours * HOUR_MS)

    def _window(self, slice_name: str) -> dict[str, Any]:
        slice_ = slice_named(self.pipeline, slice_name)
        keys = dict.fromkeys(self.pipeline.keys, _KEY)
        numbers = {each.name: EVENTS_OF_A_SLICE for each in self.pipeline.measures}
        end = time_of(slice_.start_ms + self.pipeline.window.size_ms)
        return {"window_start": slice_.start, "window_end": end, **keys, **numbers}


@dataclass(kw_only=True)
class UpkeepYear:
    """Opens and closes one incident a day, and does the work of the DAG `upkeep`.

    It does the work every 30th day, and each day where hours are written one by one. It runs after the pipelines. So
    their newest commits lie in the future of its clock, and it spares files of the last hour in their tables.
    """

    settings: Settings
    clock: Clock

    def tables(self) -> list[str]:
        """It writes no tables."""
        return []

    def open(self) -> None:
        """Do nothing, since there are no tables."""

    def step(self, slices: Sequence[Slice]) -> None:
        """Do the upkeep at the begin of a day."""
        day, later_ms = divmod(slices[0].start_ms, DAY_MS)
        if later_ms:
            return
        incidents, key = Incidents.of(self.settings.lake_root), f"measured.{slices[0].name}"
        incidents.open(key, "it happened")
        incidents.close(key, "it is over")
        if slices[-1].end_ms - slices[0].start_ms < DAY_MS or day % _FAR_UPKEEP_DAYS == 0:
            upkeep.look_after(self.settings.lake_root, KeptDays())


# Each names its tables in `tables`, opens them in `open`, and makes the commits of some slices in `step`.
Writer = EventsYear | PipelineYear | UpkeepYear


def offset_at(begin_ms: int, slice_: Slice) -> int:
    """The number of records that each partition has before a slice: one for each earlier slice."""
    return (slice_.start_ms - begin_ms) // (slice_.end_ms - slice_.start_ms)


def over_seconds(pipeline: Pipeline, slice_: Slice) -> float:
    """The time when a slice's run begins, a second after the slice is over."""
    return over_at(pipeline, slice_) / 1000 + 1


def _batch(writer: TableWriter) -> int:
    return 0 if writer.note is None or writer.note.batch is None else writer.note.batch + 1


def _write(rows: Iterable[Mapping[str, Any]], schema: pa.Schema, folder: Folder, drop: str) -> None:
    """Write one file into the folder of a partition, without the column ``drop`` of the partition."""
    columns = pa.schema([each.with_nullable(True) for each in schema if each.name != drop])
    write(pa.Table.from_pylist(list(rows), columns), folder / "part-0.parquet")


def _nothing() -> None:
    pass
