"""The samples of a soak, and the judgement about them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from statistics import mean, median

from local.soak import disk as soak_disk

_CONFLICT = re.compile(r"another (writer|run) has|in one commit|CommitFailed|Concurrent\w*Exception|DELTA_CONCURRENT")
# At the end, the tide line may be older than at half time by this much.
ALLOWED_SECONDS = 60.0
# The goal for the time from the start of a plan to the end of the publish of its slices.
FINAL_SECONDS = 60.0
# A stream that makes no micro-batch for this long was held up.
STILL_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample: the age of each pipeline's tide line, the progress of its stream, and the platform's resources."""

    seconds: float
    ages: Mapping[str, float]
    final: Mapping[str, int]
    batches: Mapping[str, int]
    lags: Mapping[str, int]
    cores: float
    machine_cores: float
    memory_bytes: int
    # Only every sixth sample has it.
    use: soak_disk.Use | None = None


@dataclass(frozen=True, kw_only=True)
class Faults:
    """The faults of a soak, a sentence each."""

    conflicts: tuple[str, ...] = ()
    failed_batches: tuple[str, ...] = ()
    failed_runs: tuple[str, ...] = ()
    incidents: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Soaked:
    """The results of a soak, with the seconds of each DAG's successful runs."""

    minutes: float
    samples: tuple[Sample, ...]
    faults: Faults
    runs: Mapping[str, Sequence[float]] = field(default_factory=dict)
    # Pipeline -> the seconds from the start of a plan to the end of its publish.
    finals: Mapping[str, Sequence[float]] = field(default_factory=dict)
    disk: soak_disk.Disk | None = None
    kept: Path | None = None

    def at(self, minute: float) -> Sample:
        """The sample that is nearest to a moment."""
        return min(self.samples, key=lambda sample: abs(sample.seconds - minute * 60))

    def cores(self) -> float:
        """The cores that all processes of the platform used, on average."""
        return mean(sample.cores for sample in self.samples)

    def unmet(self) -> list[str]:
        """The goals that were missed and the faults, a sentence each; empty if all is well."""
        half, end = self.at(self.minutes / 2), self.samples[-1]
        broken = [
            f"the tide line of {name} is {end.ages[name]:.0f} s old at minute {self.minutes:g}, and was "
            f"{half.ages[name]:.0f} s old at minute {self.minutes / 2:g}: it may be at most {ALLOWED_SECONDS:g} s older"
            for name in end.ages
            if end.ages[name] > half.ages[name] + ALLOWED_SECONDS
        ]
        broken += [f"no slice of {name} became final" for name, count in end.final.items() if not count]
        broken += [f"{job} made no micro-batch for {still:.0f} s" for job, still in self.still().items()]
        broken += [
            f"slices of {name} take {median(took):.0f} s from plan to publish: more than {FINAL_SECONDS:g} s"
            for name, took in self.finals.items()
            if took and median(took) > FINAL_SECONDS
        ]
        broken += self.disk.unmet() if self.disk else ()
        return [*broken, *chain(*vars(self.faults).values())]

    def still(self) -> dict[str, float]:
        """The streams that made no micro-batch for too long, and for how long."""
        found = {}
        for job in self.samples[0].batches:
            moved = [self.samples[0].seconds]
            moved += [b.seconds for a, b in pairwise(self.samples) if _steps(a, b, job)]
            moved.append(self.samples[-1].seconds)
            longest = max(b - a for a, b in pairwise(moved))
            if longest > STILL_SECONDS:
                found[job] = longest
        return found


def _steps(before: Sample, after: Sample, job: str) -> bool:
    return after.batches.get(job, -1) != before.batches.get(job, -1)


def conflicts(logs: Path) -> Iterator[str]:
    """The lines of drivers' and tasks' logs that report a conflict between writers."""
    for file in sorted(logs.rglob("*.log")):
        with file.open(errors="replace") as lines:
            yield from (f"{file.relative_to(logs)}: {line.strip()[:300]}" for line in lines if _CONFLICT.search(line))
