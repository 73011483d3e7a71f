"""The world of a simulation: everything that outlives an actor."""

import random
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from greenlet import getcurrent, greenlet

from jobs.lake.ledger import Counted
from jobs.lake.slices import Entry, Header
from jobs.pipelines import PIPELINES
from jobs.pipelines.slices import Slice, closes_at, slice_at, slice_named
from tests.judges.simulated_broker import Broker, Record, within
from tests.leases import Leases

SUM = PIPELINES["rolling_sum"]
MINUTE_MS = 60_000
# Three minutes before midnight: slices of two days.
BEGIN_MS = 1_800_057_600_000 - 3 * MINUTE_MS
SEND = "topic: send"
# A slice's version and how many events its window counts.
Final = dict[str, tuple[Header, int]]


class Killed(BaseException):
    """What `kill -9` is to an actor."""


@dataclass
class World:
    """Tables, topics, clock and leases."""

    root: Path
    chance: random.Random
    clock_ms: int = BEGIN_MS
    broker: Broker = field(default_factory=Broker)
    # Whether its topic is re-created now and then, and whether plans are made by a clock that is ahead.
    re_creates: bool = False
    plans_ahead: bool = False
    history: list[Final] = field(default_factory=lambda: [{}])
    lines: list[Entry] = field(default_factory=list)
    commits: int = 0
    counted: Counted | None = None
    # Of each topic the first and the last count of late events.
    counts: dict[str, tuple[Counted, Counted]] = field(default_factory=dict)
    # Slices and versions of which a run has told something when the topic was another one than it had planned with.
    told_since: set[tuple[str, int]] = field(default_factory=set)
    topic: dict[bytes, bytes | None] = field(default_factory=dict)
    leases: Leases = field(init=False)
    # By actor: how far the clock of its machine is ahead of the broker's.
    machines: dict[greenlet, int] = field(default_factory=dict)
    bad: Collection[str] = field(default_factory=set)
    reported: list[tuple[str, int]] = field(default_factory=list)
    defects: list[str] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.leases = Leases(lambda name: self.operate(name))

    @property
    def off_ms(self) -> int:
        """How far the clock of this actor's machine is ahead."""
        return self.machines.get(getcurrent(), 0)

    def operate(self, name: str) -> None:
        """A moment before or after an operation: here an actor may be paused for ever, or killed."""
        self.operations.append(name)
        parent = getcurrent().parent
        if parent is not None:
            parent.switch(name)

    def arrive(self, *times: int) -> None:
        """Events of these times come now."""
        for time in times:
            self.broker.append(self.chance.choice(sorted(self.broker.logs)), time, self.clock_ms)

    def count(self, counted: Counted | None) -> None:
        """Remember how far late events are counted."""
        if counted is not None:
            self.counted = counted
            first, _ = self.counts.get(counted.topic_id, (counted, counted))
            self.counts[counted.topic_id] = first, counted

    def note_told(self, lines: list[Entry]) -> None:
        """Remember which runs have told something after the topic was re-created."""
        topic_id = self.counted.topic_id if self.counted else None
        self.told_since |= {
            (line.slice, line.version) for line in lines if line.boundary and line.boundary.topic_id != topic_id
        }


def in_slice(records: list[Record], name: str) -> list[Record]:
    """The records whose events happened in a slice."""
    slice_ = slice_named(SUM, name)
    return within(records, slice_.start_ms, slice_.end_ms)


def came_in_time(record: Record, name: str) -> bool:
    """Whether a record arrived before a slice was over, by the stamp of its broker."""
    return record.arrival < slice_named(SUM, name).end_ms + SUM.allowed_lateness_seconds * 1000


def is_over(world: World, name: str) -> bool:
    """Whether a slice is over by the broker's clock."""
    return closes_at(SUM, slice_named(SUM, name)) <= world.clock_ms


def slice_of(time_ms: int) -> Slice:
    """The slice in which a moment lies."""
    return slice_at(SUM, time_ms)


def key_of(events: int) -> str:
    """The key of the one window of a slice."""
    return f"k{events % 2}"


def start_of(name: str) -> Any:
    """When a slice begins."""
    return slice_named(SUM, name).start
