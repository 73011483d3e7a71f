"""The protocol of recompute on tables that exist only in memory: actors that are paused, killed and overtaken anywhere.

Plan, publish and lease are the product's own code. The tables behave as Delta's do: a commit is there or not, and
succeeds on the version only that its writer has seen. Rows and verdicts are made up: a slice has one window, which
counts events. Its key changes with their number, so most new versions take a window away.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from greenlet import getcurrent, greenlet

from jobs.connectors import late, plan_inputs, planning, publishing
from jobs.connectors.events import Count
from jobs.connectors.fenced import OvertakenError
from jobs.connectors.final import FinalTable, Publication, columns_of
from jobs.connectors.publishing import Published
from jobs.connectors.runs import RunFolder, Work
from jobs.connectors.states import Counted, Entry, Header, Request, State, closes_at
from jobs.connectors.tries import StagedSlice, Try
from jobs.pipelines import PIPELINES
from jobs.pipelines.slices import Slice, slice_at, slice_named
from jobs.refusal import Refusal
from tests.leases import Leases

SUM = PIPELINES["rolling_sum"]
MINUTE_MS = 60_000
# Three minutes before midnight: slices of two days.
BEGIN_MS = 1_800_057_600_000 - 3 * MINUTE_MS
TOPIC_ID = "t1"
SEND = "topic: send"
BEGUN = (State.CLOSED, State.REOPENED, State.RECOMPUTING, State.AUDITING)


class Killed(BaseException):
    """What `kill -9` is to an actor."""


@dataclass
class World:
    """Everything that outlives an actor."""

    root: Path
    chance: random.Random
    clock_ms: int = BEGIN_MS
    events: list[int] = field(default_factory=list)  # The time of each; its place is its offset.
    arrived: dict[int, int] = field(default_factory=dict)  # When, by offset; others arrived when they happened.
    landed: int = 0
    final: dict[str, tuple[Header, int]] = field(default_factory=dict)
    history: list[dict[str, tuple[Header, int]]] = field(default_factory=lambda: [{}])
    lines: list[Entry] = field(default_factory=list)
    commits: int = 0
    counted: Counted | None = None
    topic: dict[bytes, bytes | None] = field(default_factory=dict)
    leases: Leases = field(init=False)
    bad: set[str] = field(default_factory=set)
    reported: list[tuple[str, int]] = field(default_factory=list)
    defects: list[str] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.leases = Leases(lambda name: self.operate(name))

    def operate(self, name: str) -> None:
        """A moment before or after an operation: here an actor may be paused for ever, or killed."""
        self.operations.append(name)
        parent = getcurrent().parent
        if parent is not None:
            parent.switch(name)

    def arrive(self, at: int) -> None:
        """An event of this time comes now."""
        self.arrived[len(self.events)] = self.clock_ms
        self.events.append(at)

    def count(self, slice_: Slice, landed: int) -> int:
        """How many of the landed events lie in a slice."""
        return sum(slice_.start_ms <= at < slice_.end_ms for at in self.events[:landed])

    def count_late(self, name: str, computed: Header | Entry) -> tuple[int, int]:
        """The events of a slice that were landed behind what it was computed from, as far as they were counted.

        All of them, and those that arrived before the slice was over.
        """
        slice_ = slice_at(SUM, round(slice_named_start(name).timestamp() * 1000))
        counted = self.counted.ends.get(0, 0) if self.counted else 0
        behind = range(computed.offsets.get(0, 0), counted)
        missed = [offset for offset in behind if slice_.start_ms <= self.events[offset] < slice_.end_ms]
        in_time_ms = slice_.end_ms + SUM.allowed_lateness_seconds * 1000
        return len(missed), sum(self.arrived.get(offset, self.events[offset]) < in_time_ms for offset in missed)


class FinalModel:
    """`FinalTable` in memory."""

    require_version = FinalTable.require_version

    def __init__(self, world: World, version: int | None = None) -> None:
        self.world = world
        self.seen = len(world.history) - 1 if version is None else version

    def headers(self, days: Collection[str] | None = None) -> dict[str, Header]:
        found = self.world.history[self.seen].items()
        return {name: header for name, (header, _) in found if days is None or name[:8] in days}

    def slices_by_day(self) -> dict[str, int]:
        return Counter(name[:8] for name in self.world.history[self.seen])

    def days_changed_since(self, time_ms: int) -> set[str]:
        return {name[:8] for name, (header, _) in self.world.history[self.seen].items() if header.as_of_ms >= time_ms}

    def rows(self, slice_: str, columns: Sequence[str] | None = None) -> pa.Table:
        self.world.operate("final: read")
        found = window(self.world.history[self.seen].get(slice_))
        return found if columns is None else found.select(columns)

    def has_columns_of_now(self, slice_: str) -> bool:
        return True

    def published_at(self, slice_: str, version: int) -> int | None:
        for at in range(self.seen, 0, -1):
            found, before = self.world.history[at].get(slice_), self.world.history[at - 1].get(slice_)
            if found and found != before and found[0].version == version:
                return at
        return None

    @contextmanager
    def staged(self) -> Iterator[Path]:
        yield self.world.root / "stage"

    def tend(self, check: Callable[[], None], now_ms: int) -> None:
        """Files have no part in the protocol."""

    def publish(self, publications: Sequence[Publication]) -> None:
        world = self.world
        world.operate("final: commit")
        if self.seen != len(world.history) - 1:
            raise OvertakenError("another writer has committed")
        changed = dict(world.history[-1])
        for publication in publications:
            header = publication.header
            now = changed.get(header.slice)
            self.require_version(now[0] if now else None, header)
            content = sum(json.loads(file.read_text())["events"] for file in publication.files)
            changed[header.slice] = (header, content)
        world.history.append(changed)
        self.seen += 1
        judge_commit(world)
        world.operate("final: committed")


class LedgerModel:
    """`Ledger` in memory."""

    def __init__(self, world: World) -> None:
        self.world, self.seen = world, world.commits

    def newest(self, slices: Collection[str] | None = None) -> dict[str, Entry]:
        return {entry.slice: entry for entry in self.world.lines if slices is None or entry.slice in slices}

    def unsettled(self, days: Collection[str], versions: Mapping[str, int]) -> tuple[dict[str, Entry], set[str]]:
        newest = {name: line for name, line in self.newest().items() if name[:8] in days}
        settled = {
            name
            for name, line in newest.items()
            if (line.state, line.late, line.version) == (State.FINAL, 0, versions.get(name))
        }
        return {name: line for name, line in newest.items() if name not in settled}, settled

    def counted(self) -> Counted | None:
        return self.world.counted

    def append(self, entries: Any, *, counted: Counted | None = None) -> None:
        lines = list(entries)
        if not lines:
            return
        world = self.world
        world.operate("ledger: commit")
        if self.seen != world.commits:
            raise OvertakenError("another writer has committed")
        assert len({line.slice for line in lines}) == len(lines), "two lines of one slice in one commit have no order"
        world.lines += lines
        world.counted = counted or world.counted
        world.commits += 1
        self.seen += 1
        world.operate("ledger: committed")


class LandedModel:
    """`Landed` in memory, pinned at what is landed now."""

    def __init__(self, world: World) -> None:
        self.world, self.version = world, world.landed

    # No event of the simulation is old enough to be removed.
    from_ms = 0

    def ends(self, topic: str, topic_id: str) -> dict[int, int]:
        return {0: self.version} if self.version else {}

    def first_ms(self) -> int | None:
        return min(self.world.events[: self.version], default=None)

    def count(self, pipeline: object, slices: Sequence[Slice]) -> dict[str, Count]:
        counts = {slice_.name: self.world.count(slice_, self.version) for slice_ in slices}
        return {name: Count(events=count, window_events=count) for name, count in counts.items() if count}

    def newest_arrival_ms(self) -> int:
        return max(self.world.events[: self.version], default=0)

    def since(self, ends: Mapping[int, int], since_ms: int, before_ms: int) -> pa.Table:
        rows = [
            {"partition": 0, "offset": offset, "time": at, "arrival": self.world.arrived.get(offset, at)}
            for offset, at in enumerate(self.world.events[: self.version])
            if offset >= ends.get(0, 0) and at < before_ms
        ]
        return pa.Table.from_pylist(rows) if rows else pa.table({})


def window(found: tuple[Header, int] | None) -> pa.Table:
    """The one row of a slice, none if nothing fell into it."""
    rows = []
    if found and found[1]:
        start = slice_named_start(found[0].slice)
        total = Decimal(found[1])
        rows = [
            {"window_start": start, "window_end": start, "key": key_of(found[1]), "total": total, "events": found[1]}
        ]
    return pa.Table.from_pylist(rows, schema=columns_of(SUM))


def key_of(events: int) -> str:
    """The key of the one window of a slice."""
    return f"k{events % 2}"


def slice_named_start(name: str) -> Any:
    return slice_named(SUM, name).start


def judge_commit(world: World) -> None:
    """A slice goes from one version to the next, and holds what was landed up to its header's offsets."""
    before, after = world.history[-2:]
    for name, (header, content) in after.items():
        if after[name] == before.get(name):
            continue
        old = before[name][0].version if name in before else 0
        if header.version != old + 1:
            world.defects.append(f"slice {name} went from version {old} to {header.version}")
        if header.verdict.startswith("rolled back"):
            continue
        slice_ = slice_at(SUM, round(slice_named_start(name).timestamp() * 1000))
        if closes_at(SUM, slice_) > world.clock_ms:
            world.defects.append(f"slice {name} was published before it was over")
        landed = header.offsets.get(0, 0)
        if content != world.count(slice_, landed):
            world.defects.append(f"slice {name} holds {content}, its offsets {world.count(slice_, landed)}")
        in_time = sum(slice_.start_ms <= at < slice_.end_ms for at in world.events[: world_boundary(world, name)])
        if content < in_time:
            world.defects.append(f"slice {name} was published without events that came in time")


def world_boundary(world: World, name: str) -> int:
    """Where the topic ended when the slice's boundary was taken."""
    taken = [entry.boundary for entry in world.lines if entry.slice == name and entry.boundary]
    return max((boundary.ends[0] for boundary in taken[:1]), default=0)


@contextmanager
def model_of(world: World) -> Iterator[None]:
    """The product's protocol on the world's tables."""

    def send(_kafka: object, _topic: str, wanted: Any) -> int:
        count = 0
        for key, value in wanted:
            world.operate(SEND)
            world.topic[key] = value
            count += 1
        return count

    def require(_client: object, topics: Sequence[str]) -> dict[str, Any]:
        found = SimpleNamespace(topic_id=TOPIC_ID, earliest={0: 0}, latest={0: len(world.events)})
        return dict.fromkeys(topics, found)

    final = SimpleNamespace(
        open=lambda *_: FinalModel(world), read=lambda _root, _pipeline, version=None: FinalModel(world, version)
    )
    ledger = SimpleNamespace(open=lambda *_: LedgerModel(world), read=lambda *_: LedgerModel(world))
    with pytest.MonkeyPatch.context() as patch:
        world.leases.install(patch)
        for module in (planning, publishing):
            patch.setattr(module, "FinalTable", final)
            patch.setattr(module, "Ledger", ledger)
        landed = SimpleNamespace(at=lambda *_: LandedModel(world) if world.landed else None)
        for module in (planning, plan_inputs, late):
            patch.setattr(module, "Landed", landed)
        patch.setattr(plan_inputs, "require", require)
        # Ingest lands nothing while this process waits for it.
        patch.setattr(planning, "INGEST_PATIENCE_SECONDS", 0.0)
        patch.setattr(publishing, "send", send)
        yield


def run(world: World, name: str, request: Request | None = None, *, ahead_ms: int = 0) -> Published | None:
    """One DAG run: plan, stage, audit, publish. Tasks may be killed; what they leave is in the world.

    ``ahead_ms``: it plans by a clock that is so far ahead of the broker's, as one of an older version may do.
    """
    settings = SimpleNamespace(lake_root=world.root, kafka=None)
    clock = lambda: world.clock_ms + ahead_ms  # noqa: E731
    planning.await_ingest(world.root, None, SUM, name, request, clock)
    planned = planning.make(world.root, None, SUM, name, request, clock)
    if not planned.plan.work and not planned.plan.untold:
        return None
    folder = RunFolder.of(world.root, SUM, name)
    own = Try.begin(folder.path, planned.plan.names)
    staged = {}
    for work in planned.plan.work:
        world.operate("stage: write")
        staged[work.slice] = stage_slice(own, work)
    world.operate("stage: say so")
    own.write_result(staged)
    world.operate("stage: take it")
    folder.take(own.result())
    planning.note(
        world.root, SUM, [planned.plan.entry(w, State.AUDITING, at_ms=world.clock_ms) for w in planned.plan.work]
    )
    world.operate("audit: decide")
    folder.decide(
        {
            work.slice: {"passed": work.slice not in world.bad, "failures": [], "rows": 1, "checksum": str(work.events)}
            for work in planned.plan.work
        }
    )
    blocked = [work for work in planned.plan.work if work.slice in world.bad]
    planning.note(world.root, SUM, [planned.plan.entry(w, State.BLOCKED, at_ms=world.clock_ms) for w in blocked])
    published = publishing.publish(settings, SUM, name, now_ms=world.clock_ms)  # type: ignore[arg-type]
    world.reported += list(published.versions.items())
    return published


def stage_slice(own: Try, work: Work) -> StagedSlice:
    """A file that says how many events its window counts; none for a slice without events."""
    if not work.events:
        return StagedSlice()
    file = own.stage / f"slice={work.slice}" / "rows.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"events": work.events}))
    return StagedSlice(read=work.events, expected=work.events, rows=1, files=(str(file.relative_to(own.run)),))


def judge_end(world: World) -> list[str]:
    """After a run that nobody disturbed: everything due is final or blocked, and all tables say the same."""
    defects, final = list(world.defects), world.history[-1]
    newest = {entry.slice: entry for entry in world.lines}
    for name, (header, content) in final.items():
        line = newest.get(name)
        said_final = line and (line.version, line.state) == (header.version, State.FINAL)
        blocked_since = line and line.state is State.BLOCKED and line.version > header.version
        if not (said_final or blocked_since):
            defects.append(f"slice {name} is at version {header.version}, the ledger says {line}")
        if said_final and line and not header.verdict.startswith("rolled back"):
            defects += judge_late(world, header, line)
        rows = window((header, content)).to_pylist()
        told = {key: topic_says(world, name, key) for key in (key_of(0), key_of(1))}
        wanted = {key_of(content): (header.version, content)} if rows else {}
        if {key: said for key, said in told.items() if said} != wanted:
            defects.append(f"slice {name} is {content} at version {header.version}, its topic says {told}")
    defects += judge_blocked(world, newest) + judge_begun(world, newest)
    landed = world.events[: world.landed]
    if landed:
        at = slice_at(SUM, min(landed)).start_ms
        while closes_at(SUM, slice_at(SUM, at)) <= world.clock_ms:
            slice_ = slice_at(SUM, at)
            line = newest.get(slice_.name)
            if slice_.name not in final and not (line and line.state is State.BLOCKED):
                defects.append(f"slice {slice_.name} is due and not final")
            at += MINUTE_MS
    versions = {(name, header.version) for state in world.history for name, (header, _) in state.items()}
    defects += [f"reported, but not there: {success}" for success in world.reported if success not in versions]
    return defects


def judge_late(world: World, header: Header, line: Entry) -> list[str]:
    """A final slice misses as many events as its line says, and none that had come in time."""
    missed, said = world.count_late(header.slice, header), (line.late, line.in_time)
    defects = [f"slice {header.slice} says {said} events came late and in time, and missed {missed}"]
    forgotten = [f"slice {header.slice} is final without {missed[1]} events that came in time"]
    return (defects if said != missed else []) + (forgotten if missed[1] else [])


def topic_says(world: World, slice_: str, key: str) -> tuple[int, int] | None:
    """Version and events of a window's newest message; none if there is none, or the window is gone."""
    value = world.topic.get(f'["{slice_named_start(slice_):%Y-%m-%dT%H:%M:%S}.000Z","{key}"]'.encode())
    said = json.loads(value) if value else None
    return (said["version"], said["events"]) if said else None


def judge_begun(world: World, newest: Mapping[str, Entry]) -> list[str]:
    """Whatever a plan has begun is done in the end, also if its run has died: it is published, or blocked."""
    final = {name: header.version for name, (header, _) in world.history[-1].items()}
    begun = {(line.slice, line.version): line for line in world.lines if line.state in BEGUN}
    return [
        f"version {version} of slice {name} was begun by run {line.run} ({line.reason}), and forgotten"
        for (name, version), line in begun.items()
        if closes_at(SUM, slice_named(SUM, name)) <= world.clock_ms
        and final.get(name, 0) < version
        and (newest[name].state, newest[name].version) != (State.BLOCKED, version)
    ]


def judge_blocked(world: World, newest: Mapping[str, Entry]) -> list[str]:
    """A blocked slice is tried again when enough events have come since: they are counted, too.

    Until then a person can publish it, so its run has not ended.
    """
    blocked = {name: line for name, line in newest.items() if line.state is State.BLOCKED}
    ended = [name for name, line in blocked.items() if name not in RunFolder.of(world.root, SUM, line.run).left]
    missed = {name: world.count_late(name, line) for name, line in blocked.items()}
    return [f"slice {name} is blocked, and its run has ended: nobody can approve it" for name in ended] + [
        f"blocked slice {name} says {line.late}, {line.in_time} events came late and in time: it misses {missed[name]}"
        for name, line in blocked.items()
        if (line.late, line.in_time) != missed[name]
    ]


def in_turns(world: World, actors: Mapping[str, Sequence[Callable[[], object]]], steps: int) -> list[str]:
    """Let actors run in an order of chance, each paused at every operation; some are killed, some overtaken.

    Who holds the lease may be suspended for many steps: then somebody else takes over, and it goes on behind that.
    """
    told: list[str] = []
    alive = {name: begin(work, told) for name, work in actors.items()}
    suspended: dict[str, int] = {}
    for step in range(steps):
        for name in [name for name, until in suspended.items() if until <= step or suspended.keys() >= alive.keys()]:
            world.leases.wake(alive[name])
            del suspended[name]
        if not alive:
            break
        name = world.chance.choice(sorted(alive.keys() - suspended.keys()))
        happening = world.chance.random()
        if happening < 0.01:
            _kill(world, alive.pop(name))
            continue
        sleepy = 0.3 if world.operations[-1:] == ["final: read"] else 0.04
        if world.chance.random() < sleepy and (sleeper := world.leases.fall_asleep()):
            names = {actor: name for name, actor in alive.items()}
            suspended[names[sleeper]] = step + world.chance.choice((20, 400))
            continue
        # Later nothing happens: news would have a slice done again, and hide what went wrong before.
        if happening < 0.15 and step < 100:
            happen(world)
        _step(world, alive[name])
        if alive[name].dead:
            alive.pop(name)
    for left in alive.values():
        _kill(world, left)
    return told


def _step(world: World, actor: greenlet) -> None:
    """Go on to the next operation. In the middle of a slice's messages an actor may be killed, but does not sleep.

    The product looks at its lease before each slice. Kafka has no fence for who sleeps behind that look.
    """
    while actor.switch() == SEND:
        if world.chance.random() < 0.05:
            return _kill(world, actor)


def begin(works: Sequence[Callable[[], object]], told: list[str]) -> greenlet:
    """An actor that does one work after the other, whatever became of the one before."""

    def main() -> None:
        with suppress(Killed):
            for work in works:
                try:
                    work()
                except (Refusal, Killed) as error:
                    told.append(f"{type(error).__name__}: {error}")
                    if isinstance(error, Killed):
                        raise

    return greenlet(main)


def _kill(world: World, actor: greenlet) -> None:
    world.leases.killing = True
    # One that has not begun has nothing to end.
    if actor:
        actor.throw(Killed())
    world.leases.killing = False
    world.leases.bury(actor)


def happen(world: World) -> None:
    """Time passes, events come, some of them late; ingest lands some."""
    chance = world.chance
    world.clock_ms += chance.choice((0, 1_000, 30_000, MINUTE_MS))
    for _ in range(chance.randrange(4)):
        ago_ms = chance.choice((0, 0, 0, 30_000, 200_000))
        world.arrive(max(BEGIN_MS, world.clock_ms - ago_ms))
    world.landed = chance.randint(world.landed, len(world.events))
