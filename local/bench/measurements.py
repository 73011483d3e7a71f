"""The measurements of the batch half of the benchmark: their names, goals, sizes and results."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

RECOMPUTE, HISTORY, PUBLISH, READING = BATCH = ("recompute", "history", "publish", "reading")
RIVALS = ("ours", "DuckDB")
PARTS = ("plan", "recompute", "audit", "publish")
OTHER_HOURS, SAME_HOUR = "other hours", "the same hour"
GOAL_GROWTH = 1.2
GOAL_PUBLISH_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How often a measurement is repeated."""

    warm_ups: int = 2
    rounds: int = 3

    @property
    def runs(self) -> int:
        """How often each measurement runs. The first runs only warm up."""
        return self.warm_ups + self.rounds

    def counts(self, number: int) -> bool:
        """Whether a run, counted from 0, is measured."""
        return number >= self.warm_ups

    def progress(self, number: int) -> str:
        """The progress in words, for people who wait."""
        return f"round {number - self.warm_ups + 1} of {self.rounds}" if self.counts(number) else "warming up"


@dataclass(frozen=True, kw_only=True)
class Sizes(Rounds):
    """The sizes of the measurements."""

    rival_events: tuple[int, ...] = (1_000_000, 10_000_000)
    slice_events: int = 100_000
    hour_events: int = 1_000_000
    multiples: tuple[int, ...] = (1, 10, 100)
    # With a commit every two seconds, as a real stream has, a hundred hours would take too long to make up. In the hour
    # of the measured slice there is a commit every ten seconds.
    hour_batches: int = 30
    own_hour_batches: int = 360
    publish_rows: tuple[int, ...] = (1_000, 100_000, 1_000_000)
    final_slices: int = 1_440
    read_slices: tuple[int, ...] = (1, 100, 1_000)

    @classmethod
    def of(cls, records: int, rounds: int) -> "Sizes":
        """Sizes that fit the number of records that each drain reads."""
        return cls(rival_events=(records, 10 * records), slice_events=records // 10, hour_events=records, rounds=rounds)


@dataclass(frozen=True, kw_only=True)
class Rivalry:
    """The seconds that each side took to make the same windows from the same files, round by round."""

    events: int
    windows: int
    seconds: Mapping[str, Sequence[float]]

    def per_second(self, side: str) -> float:
        """Events per second of the median round."""
        return self.events / median(self.seconds[side])

    @property
    def ratio(self) -> float:
        """Our events per second ÷ DuckDB's."""
        return self.per_second("ours") / self.per_second("DuckDB")


@dataclass(frozen=True, kw_only=True)
class Restated:
    """One slice restated under a history of ``multiple`` times the base; the seconds of each part, round by round."""

    where: str
    multiple: int
    events: int
    files: int
    parts: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})

    @property
    def seconds(self) -> float:
        """The median duration of whole runs."""
        return median(map(sum, zip(*self.parts.values(), strict=True)))


@dataclass(frozen=True, kw_only=True)
class Publish:
    """The publish of a slice of ``rows`` windows: each commit, and the sending of all its messages to the topic."""

    rows: int
    commit_seconds: Sequence[float]
    send_seconds: float


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Queries over current windows, with ``slices`` final slices."""

    slices: int
    windows: int
    files: int
    first_seconds: float
    newest_seconds: Sequence[float]
    all_seconds: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The results of the batch half."""

    rivalries: tuple[Rivalry, ...] = ()
    restated: tuple[Restated, ...] = ()
    publishes: tuple[Publish, ...] = ()
    readings: tuple[Reading, ...] = ()


def seconds_of(do: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.monotonic()
    do()
    return time.monotonic() - began
