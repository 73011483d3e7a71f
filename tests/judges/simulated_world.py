"""The world of a simulation: everything that outlives an actor."""

import random
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from greenlet import getcurrent, greenlet

from jobs.lake.ledger import LateCountPosition
from jobs.lake.slices import Header, LedgerLine
from jobs.pipelines import PIPELINES
from jobs.pipelines.slices import Slice, over_at, slice_at, slice_named
from tests.judges.simulated_broker import Broker, Record, within
from tests.leases import Leases

SUM = PIPELINES["rolling_sum"]
MINUTE_MS = 60_000
# Three minutes before midnight, so that there are slices of two days.
BEGIN_MS = 1_800_057_600_000 - 3 * MINUTE_MS
SEND = "topic: send"
# By slice: the header with its version, and the number of events that its window counts.
Final = dict[str, tuple[Header, int]]


class Killed(BaseException):
    """The `kill -9` of an actor."""


@dataclass
class World:
    """Tables, topics, clock and leases."""

    root: Path
    chance: random.Random
    clock_ms: int = BEGIN_MS
    broker: Broker = field(default_factory=Broker)
    # Whether the topic is re-created now and then, and whether plans are made by a clock that is ahead.
    re_creates: bool = False
    plans_ahead: bool = False
    history: list[Final] = field(default_factory=lambda: [{}])
    lines: list[LedgerLine] = field(default_factory=list)
    commits: int = 0
    counted: LateCountPosition | None = None
    # For each topic the first and the last count of late events.
    counts: dict[str, tuple[LateCountPosition, LateCountPosition]] = field(default_factory=dict)
    # Slices and versions with ledger lines that were written when the topic was no longer the planned one.
    told_since: set[tuple[str, int]] = field(default_factory=set)
    topic: dict[bytes, bytes | None] = field(default_factory=dict)
    leases: Leases = field(init=False)
    # By actor: how far the clock of its machine is ahead of the broker's clock.
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
        """Mark a moment before or after an operation. Here an actor may be killed, or paused without end."""
        self.operations.append(name)
        parent = getcurrent().parent
        if parent is not None:
            parent.switch(name)

    def arrive(self, *times: int) -> None:
        """Append events of these times now."""
        for time in times:
            self.broker.append(self.chance.choice(sorted(self.broker.logs)), time, self.clock_ms)

    def count(self, counted: LateCountPosition | None) -> None:
        """Remember how far late events are counted."""
        if counted is not None:
            self.counted = counted
            first, _ = self.counts.get(counted.topic_id, (counted, counted))
            self.counts[counted.topic_id] = first, counted

    def note_told(self, lines: list[LedgerLine]) -> None:
        """Remember the slices and versions of ledger lines that were written after the topic was re-created."""
        topic_id = self.counted.topic_id if self.counted else None
        self.told_since |= {
            (line.slice, line.version) for line in lines if line.boundary and line.boundary.topic_id != topic_id
        }


def in_slice(records: list[Record], name: str) -> list[Record]:
    """The records that happened in a slice."""
    slice_ = slice_named(SUM, name)
    return within(records, slice_.start_ms, slice_.end_ms)


def came_in_time(record: Record, name: str) -> bool:
    """Whether a record arrived within the allowed lateness of a slice, by the stamp of its broker."""
    return record.arrival < slice_named(SUM, name).end_ms + SUM.allowed_lateness_seconds * 1000


def is_over(world: World, name: str) -> bool:
    """Whether a slice is over by the broker's clock."""
    return over_at(SUM, slice_named(SUM, name)) <= world.clock_ms


def slice_of(time_ms: int) -> Slice:
    """The slice of a moment."""
    return slice_at(SUM, time_ms)


def key_of(events: int) -> str:
    """The key of the one window of a slice."""
    return f"k{events % 2}"


def start_of(name: str) -> Any:
    """The begin of a slice."""
    return slice_named(SUM, name).start
