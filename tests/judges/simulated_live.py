"""A simulation's live stream, its resets, and the account that compares live with final.

The decisions are the product's: may the stream begin, where does a reset begin, which slices are compared, noted or
left to wait, and which live rows may be removed. Tables and checkpoint are models.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from jobs.broker.kafka import TopicState, require
from jobs.control.writing import writing
from jobs.finality import account
from jobs.finality import account_inputs as accounted
from jobs.finality.comparison import Comparison
from jobs.lake.columns import TIME
from jobs.lake.delta.fenced import OvertakenError
from jobs.lake.live import BatchRange, Live, PruneRequest
from jobs.lake.slices import Header
from jobs.lake.stream_tables import Note, Ranges
from jobs.refusal import Refusal
from jobs.streaming import reset
from jobs.streaming.start import CheckpointProgress, Start, check_start
from tests.judges.simulated_broker import AdminModel, Record
from tests.judges.simulated_tables import LakeModel
from tests.judges.simulated_world import SUM, World, in_slice, slice_of

TOPIC = SUM.source.name
LIVE_KEPT_SECONDS = 60
_BATCHES = pa.schema([("batch", pa.int64()), ("as_of", TIME), ("offsets", pa.string()), ("watermark", TIME)])


@dataclass(frozen=True)
class Rows:
    """The live table at one version: for each slice the events that its rows count, and the rows about batches."""

    version: int = 0
    note: Note | None = None
    slices: Mapping[str, tuple[Record, ...]] = field(default_factory=dict)
    batches: tuple[Mapping[str, Any], ...] = ()


@dataclass
class Stream:
    """The live table and the checkpoint beside it."""

    world: World
    rows: Rows = field(default_factory=Rows)
    progress: CheckpointProgress | None = None
    checkpoints: int = 0
    accounted: set[tuple[str, int]] = field(default_factory=set)

    @property
    def client(self) -> Any:
        return AdminModel(self.world.broker)

    def commit(self, seen: Rows, rows: Rows) -> None:
        """Commit as Delta does: only if the table is still at the version that the writer has seen."""
        self.world.operate("live: commit")
        if self.rows.version != seen.version:
            raise OvertakenError("another writer has committed")
        self.rows = replace(rows, version=seen.version + 1)
        self.world.operate("live: committed")

    def stream(self, batches: int) -> None:
        """Run a driver that ends after some batches. Each batch is refused where the product would not begin."""
        for _ in range(batches):
            with writing(self.world.root, SUM.name) as lease:
                seen, topic = self.rows, require(self.client, [TOPIC])[TOPIC]
                check_start(SUM.name, self.progress, seen.note, {TOPIC: topic}, fingerprint=SUM.fingerprint)
                self._finish()
                rows = self._counted(seen, topic)
                lease.check()
                self.commit(seen, rows)
                self._finish()
                self._prune(PruneRequest.read(lease.control.documents).slices)

    def _finish(self) -> None:
        """Note in the checkpoint that the newest batch is written, as Spark does when the table already has it."""
        note = self.rows.note
        if note and note.batch is not None:
            batch, ends = note.batch, note.ends
            self.progress = CheckpointProgress(
                write_id=note.write_id, planned=batch, committed=batch, resume=ends, reached=ends, ends={batch: ends}
            )

    def _counted(self, seen: Rows, topic: TopicState) -> Rows:
        """Add one batch: it takes a range of each partition, and its events are added to their slices."""
        chance, log = self.world.chance, self.world.broker.logs
        starts = self.progress.resume[TOPIC] if self.progress else Start.of(TOPIC, {TOPIC: topic}, seen.note).reached
        ends = {p: chance.choice((len(log[p]), chance.randint(starts.get(p, 0), len(log[p])))) for p in log}
        ranges = {p: (starts.get(p, 0), end) for p, end in ends.items()}
        taken = [record for p, (start, end) in ranges.items() for record in log[p][start:end]]
        late_ms = seen.batches[-1]["next_ms"] if seen.batches else 0
        counted = [record for record in taken if is_counted(record, late_ms)]
        slices = {name: tuple(records) for name, records in seen.slices.items()}
        state = slices if self.progress else {}
        for record in counted:
            name = slice_of(record.time).name
            # A new checkpoint has no state, so its counts replace the earlier ones.
            slices[name] = state[name] = (*state.get(name, ()), record)
        newest_ms = max([late_ms, *(record.time - SUM.watermark_delay_seconds * 1000 for record in taken)])
        number = seen.note.batch + 1 if seen.note and seen.note.batch is not None else 0
        line = {
            "batch": number,
            "as_of": at(self.world.clock_ms),
            "offsets": json.dumps(ranges),
            "watermark": at(late_ms),
            "next_ms": newest_ms,
        }
        note = self._note(topic, number, ranges)
        return replace(seen, note=note, slices=slices, batches=(*seen.batches, line))

    def _note(self, topic: TopicState, number: int, ranges: Mapping[int, tuple[int, int]]) -> Note:
        if self.progress is None:
            self.checkpoints += 1
        return Note(
            job=SUM.name,
            write_id=self.progress.write_id if self.progress else f"checkpoint {self.checkpoints}",
            batch=number,
            epoch=1,
            cluster_id="c",
            topics={TOPIC: Ranges(topic_id=topic.topic_id, offsets=dict(ranges))},
            fingerprint=SUM.fingerprint,
        )

    def _prune(self, slices: Collection[str]) -> None:
        kept = {name: records for name, records in self.rows.slices.items() if name not in slices}
        if len(kept) < len(self.rows.slices):
            self.commit(self.rows, replace(self.rows, slices=kept))

    def reset(self, to: reset.To) -> None:
        """Reset the stream as an operator does, because it was refused or for another reason."""
        settings: Any = SimpleNamespace(lake_root=self.world.root)
        reset.apply(settings, self.client, reset.Request(job=SUM.name, to=to))

    def account(self, run: str) -> None:
        """Run the account."""
        settings: Any = SimpleNamespace(live_kept_seconds=LIVE_KEPT_SECONDS)
        account.run(LiveLake.of_stream(self), settings, run)


def is_counted(record: Record, watermark_ms: int) -> bool:
    """Whether a batch with this watermark counts an event: the event's window is not over."""
    size_ms = SUM.window.size_ms
    return record.time - record.time % size_ms + size_ms > watermark_ms


def at(time_ms: int) -> datetime:
    """Convert milliseconds to a datetime."""
    return datetime.fromtimestamp(time_ms / 1000, UTC)


@dataclass
class ResetWriter:
    """`TableWriter`, with the parts that a reset uses."""

    stream: Stream
    seen: Rows

    @property
    def note(self) -> Note | None:
        return self.seen.note

    def reset(self, note: Note, *, clear: bool) -> None:
        kept = Rows() if clear else self.seen
        self.stream.commit(self.seen, replace(kept, note=note))


@dataclass(frozen=True, kw_only=True)
class LiveView(Live):
    """`Live` in memory, at one version."""

    rows: Rows

    def slices(self) -> set[str]:
        return set(self.rows.slices)

    def _batches(self) -> ds.Dataset | None:
        names = _BATCHES.names
        lines = [{name: line[name] for name in names} for line in self.rows.batches]
        return ds.dataset(pa.Table.from_pylist(lines, _BATCHES)) if lines else None


@dataclass
class AccountsModel:
    """`Accounts` in memory."""

    stream: Stream

    def done(self, days: Collection[str] | None = None) -> set[tuple[str, int]]:
        return {each for each in self.stream.accounted if days is None or each[0][:8] in days}

    def unexplained(self) -> list[dict[str, Any]]:
        """Return nothing: the judge looks at each comparison itself."""
        return []

    def new_stage(self) -> Path:
        return self.stream.world.root / "no drift rows"

    def add(self, _stage: Path, _drift_rows: int, totals: Sequence[Mapping[str, Any]]) -> None:
        self.stream.world.operate("account: commit")
        self.stream.accounted |= {(row["slice"], row["version"]) for row in totals}
        self.stream.world.operate("account: committed")

    def maintain(self, kept_from: str, check: Callable[[], None]) -> None:
        """Do nothing: files have no part in the simulation."""


@dataclass(frozen=True)
class LiveLake(LakeModel):
    """`LakeModel` with a live stream and its accounts."""

    stream: Stream

    @classmethod
    def of_stream(cls, stream: Stream) -> Self:
        return cls(stream.world.root, SUM, stream.world, stream)

    def events(self, version: int | None = None) -> Any:
        self.world.operate("account: look at events")
        return super().events(version)

    def live(self) -> Live:
        self.world.operate("account: look at live")
        rows = self.stream.rows
        return LiveView(path=self.root / SUM.live_table, table=None, note=rows.note, rows=rows)

    def open_accounts(self) -> Any:
        return AccountsModel(self.stream)


def compare(world: World, seen: accounted.AccountInputs, header: Header, taken: Sequence[BatchRange]) -> dict[str, Any]:
    """The total of a slice. Like the product it goes by offsets, so records of two topics do not add up."""
    records = in_slice(seen.landed.records if seen.landed else [], header.slice)  # type: ignore[attr-defined]
    batches = [(each, round(each.watermark.timestamp() * 1000)) for each in taken]
    wanted = sorted(
        (record.partition, record.offset)
        for record in records
        for each, watermark_ms in batches
        if each.partition == record.partition and each.start <= record.offset < each.end
        if is_counted(record, watermark_ms)
    )
    rows = seen.live.rows.slices.get(header.slice, ())  # type: ignore[attr-defined]
    found = sorted((record.partition, record.offset) for record in rows)
    final = sum(record.offset < header.offsets.get(record.partition, 0) for record in records)
    _, content = world.history[seen.final.version][header.slice]
    if wanted != found or (final != content and not header.verdict.startswith("rolled back")):
        world.defects.append(
            f"slice {header.slice} version {header.version}: live counts {found}, its batches {wanted}; final {content}"
            f", its offsets {final}"
        )
    return {"slice": header.slice, "version": header.version, "kind": "slice"}


@contextmanager
def live_of(world: World) -> Iterator[Stream]:
    """Run the product's account and reset on a stream of the world, within `model_of`."""
    stream = Stream(world)

    def compared(
        _spark: object, _lake: object, _run: str, seen: Any, headers: Any, taken: Any, _stage: object
    ) -> Comparison:
        return Comparison(totals=[compare(world, seen, header, taken) for header in headers])

    def last_note(path: Path) -> Note | None:
        return stream.rows.note if path.name == SUM.name else landed_note(world)

    def put_aside(*_: object) -> None:
        world.operate("reset: put the checkpoint aside")
        stream.progress = None

    class Now(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return at(world.clock_ms)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(account, "session", SimpleNamespace(opened=lambda *_: nullcontext()))
        patch.setattr(account, "compare", compared)
        patch.setattr(account, "datetime", Now)
        now = SimpleNamespace(time=lambda: world.clock_ms / 1000, monotonic=lambda: world.clock_ms / 1000)
        patch.setattr(account, "time", now)
        world.leases.install_in(patch, reset)
        patch.setattr(reset, "last_note", last_note)
        patch.setattr(
            reset, "TableWriter", SimpleNamespace(open=lambda *_, **__: ResetWriter(stream=stream, seen=stream.rows))
        )
        patch.setattr(reset, "_rows", lambda _: len(stream.rows.slices))
        patch.setattr(
            reset, "_state_of", lambda _: ("there", stream.progress.write_id) if stream.progress else (None, "")
        )
        patch.setattr(reset, "_put_aside", put_aside)
        yield stream


def landed_note(world: World) -> Note | None:
    """The note of the newest commit of `events`."""
    note = world.broker.note
    ranges = Ranges(topic_id=f"t{note.topic}", offsets={p: (0, end) for p, end in note.ends.items()})
    topics = {TOPIC: ranges}
    return Note(job="ingest", write_id="i", batch=0, epoch=1, cluster_id="c", topics=topics) if note.landed else None


def judge_account(stream: Stream) -> list[str]:
    """When stream, ingest and account have caught up, each final slice has an account."""
    final = {(name, header.version) for name, (header, _) in stream.world.history[-1].items()}
    return [f"slice {name} version {version} has no account" for name, version in sorted(final - stream.accounted)]


def or_reset(stream: Stream, batches: int, to: reset.To) -> None:
    """Run the stream; if it is refused and the refusal names a reset, reset the stream as an operator does."""
    try:
        stream.stream(batches)
    except Refusal as error:
        if "reset" not in str(error):
            raise
        stream.reset(to)
