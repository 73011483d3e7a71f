"""`tideline bench`: our jobs against plain Spark ones, how fresh the live windows are, the batch half, and a year.

Each workload gets its own broker, empty and on free ports. Two warm sessions, ours and the plain one, then drain
the same new records in turns. So any other work on the machine slows down both.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from subprocess import PIPE

import duckdb
import psutil
from deltalake import DeltaTable

from jobs.pipelines import INGEST, PIPELINES, SOURCES
from jobs.refusal import Refusal
from jobs.settings import KafkaSettings, Settings
from jobs.traffic import generator as traffic
from local.bench import batch as bench_batch
from local.bench import scale as bench_scale
from local.bench.freshness import FRESHNESS, Freshness, freshness_of
from local.bench.measurements import BATCH, Batch, Rounds, Sizes
from local.bench.place import end_driver, place_of
from local.bench.scale import PARTITIONS, WORKERS, WORKLOAD, Scaled
from local.bench.year import run as bench_year
from local.bench.year.run import DAYS, YEAR, Year
from local.steps import Tell

SCALE = "scale"
RACES = (INGEST, "rolling_sum", "word_count")
EVERYTHING = (*RACES, FRESHNESS, SCALE, *BATCH)
# A year takes longer than all of them together, so it is measured only on request.
CHOICES = (*EVERYTHING, YEAR)
# With fewer records, the start of a query would take most of the measured time.
WHOLE_RECORDS = 1_000_000
GOAL_RATIO = 0.9
GOAL_P95_SECONDS = 2.0
SIDES = ("ours", "plain")
_READS = {INGEST: ("numbers", "lines"), "rolling_sum": ("numbers",), "word_count": ("lines",)}
_WARM_UP_SHARE = 0.2


@dataclass(frozen=True, kw_only=True)
class Race:
    """One workload: the seconds of each measured drain of ``records`` records, per side."""

    workload: str
    records: int
    seconds: dict[str, list[float]]

    def per_second(self, side: str) -> float:
        """Throughput of the median drain."""
        return self.records / median(self.seconds[side])

    @property
    def ratio(self) -> float:
        """Our throughput ÷ that of the plain jobs."""
        return self.per_second("ours") / self.per_second("plain")


@dataclass(frozen=True, kw_only=True)
class Results:
    """The results of a run of the benchmark, and the machine's load before and after it."""

    races: tuple[Race, ...]
    freshness: Freshness | None
    load_before: float
    load_after: float
    batch: Batch | None = None
    scaled: tuple[Scaled, ...] = ()
    year: Year | None = None


def run(
    settings: Settings, *, records: int, rounds: int, only: tuple[str, ...], report: Tell, days: int = DAYS
) -> Results:
    """Measure. All files are in temporary folders, which are removed afterwards."""
    unknown = sorted(set(only) - set(CHOICES))
    if unknown:
        raise Refusal(f"there is no measurement {', '.join(unknown)}: choose from {', '.join(CHOICES)}")
    drains = _Drains(records=records, rounds=rounds, report=report)
    # Python evaluates the arguments in this order.
    return Results(
        load_before=os.getloadavg()[0],
        races=tuple(_race(settings, name, drains) for name in RACES if name in only),
        freshness=freshness_of(settings, report) if FRESHNESS in only else None,
        scaled=_scale(settings, drains) if SCALE in only else (),
        # This comes after the races, since it starts Spark in this process.
        batch=_batch(settings, Sizes.of(records, rounds), only, report) if set(BATCH) & set(only) else None,
        year=_year(settings, rounds, days, report) if YEAR in only else None,
        load_after=os.getloadavg()[0],
    )


def _batch(settings: Settings, sizes: Sizes, only: Sequence[str], report: Tell) -> Batch:
    with place_of(settings, "batch") as (placed, _env, _home):
        return bench_batch.run(placed, sizes, only, report)


def _year(settings: Settings, rounds: int, days: int, report: Tell) -> Year:
    with place_of(settings, YEAR) as (placed, _env, _home):
        return bench_year.run(placed, report, days=days, rounds=rounds)


@dataclass(frozen=True, kw_only=True)
class _Drains(Rounds):
    """Drains of new records, round by round. Those that only warm up are smaller."""

    records: int
    report: Tell

    @property
    def warm_up_records(self) -> int:
        """The records of a source that a side reads in a round that only warms up."""
        return max(int(self.records * _WARM_UP_SHARE), 1_000)

    @property
    def all_records(self) -> int:
        """The records of a source that a side reads in all rounds."""
        return self.warm_ups * self.warm_up_records + self.rounds * self.records

    def seconds(
        self, title: str, workload: str, workers: dict[str, Callable[[], float]], kafka: KafkaSettings
    ) -> dict[str, list[float]]:
        """Send new records and let each side drain them. Return the seconds of each side in the measured rounds."""
        # The newest event happened a minute ago, so no side drops an event because it is ahead of its arrival.
        from_ms = int(time.time() * 1000) - self.all_records - 60_000
        streams = {name: traffic.records(name, seed=from_ms, count=None, start_ms=from_ms) for name in _READS[workload]}
        sides = list(workers)
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(self.runs):
            count = self.records if self.counts(number) else self.warm_up_records
            for name, stream in streams.items():
                traffic.send(kafka, name, islice(stream, count))
            # The sides take turns in going first, since the first drain meets a broker that still writes to disk.
            for side in sides if number % 2 == 0 else reversed(sides):
                self.report(f"{title}: {side} drains {count:,} records, {self.progress(number)}")
                took = workers[side]()
                seconds[side] += [took] if self.counts(number) else []
        return seconds


def _scale(settings: Settings, drains: _Drains) -> tuple[Scaled, ...]:
    return tuple(_scaled(settings, workers, partitions, drains) for partitions in PARTITIONS for workers in WORKERS)


def _scaled(settings: Settings, workers: int, partitions: int, drains: _Drains) -> Scaled:
    title = (
        f"scale: {workers} worker{'s' if workers > 1 else ''}, {partitions} partition{'s' if partitions > 1 else ''}"
    )
    with (
        place_of(settings, SCALE, {SOURCES["numbers"].name: partitions}) as (placed, env, home),
        bench_scale.cluster(settings, workers, home) as spark,
        _worker("ours", WORKLOAD, {**env, **spark, "SPARK_SHUFFLE_PARTITIONS": "2"}, home) as worker,
    ):
        seconds = drains.seconds(title, WORKLOAD, {"ours": worker}, placed.kafka)["ours"]
    return Scaled(workers=workers, partitions=partitions, records=drains.records, seconds=seconds)


def _race(settings: Settings, workload: str, drains: _Drains) -> Race:
    with place_of(settings, workload) as (placed, env, home), ExitStack() as stack:
        workers = {side: stack.enter_context(_worker(side, workload, env, home)) for side in SIDES}
        seconds = drains.seconds(workload, workload, workers, placed.kafka)
        _check_counts(workload, home, drains.all_records)
    return Race(workload=workload, records=drains.records * len(_READS[workload]), seconds=seconds)


@contextmanager
def _worker(side: str, workload: str, env: dict[str, str], home: Path) -> Iterator[Callable[[], float]]:
    """Run the process of one side. Yield a function that lets it drain, and returns the seconds."""
    log = home / f"{side}.log"
    command = [sys.executable, "-m", "local.bench.worker", side, workload, str(home / side)]
    with log.open("w") as output:
        process = psutil.Popen(command, env=env, stdin=PIPE, stdout=PIPE, stderr=output, text=True)

    def drain() -> float:
        with suppress(BrokenPipeError):
            process.stdin.write("\n")
            process.stdin.flush()
        for line in process.stdout:
            if line.startswith("seconds="):
                return float(line.removeprefix("seconds="))
        raise Refusal(f"a side of the race ended:\n{log.read_text()[-3000:]}")

    try:
        yield drain
    finally:
        end_driver(process)


_COUNTS = {
    "rolling_sum": "SELECT sum(n) FROM (SELECT max(events) n FROM rows GROUP BY window_start, key)",
    "word_count": "SELECT sum(n) FROM (SELECT max(occurrences) n FROM rows GROUP BY window_start, word)",
    INGEST: "SELECT count(*) FROM rows",
}


def _check_counts(workload: str, home: Path, total: int) -> None:
    """A race counts only if both sides did all of the work."""
    if workload == INGEST:
        tables = {side: [home / side / name for name in _READS[INGEST]] for side in SIDES}
        tables["ours"] = [home / "lake" / SOURCES[name].events_table for name in _READS[INGEST]]
        expected = total * len(_READS[INGEST])
    else:
        tables = {"ours": [home / "lake" / PIPELINES[workload].live_table], "plain": [home / "plain" / "table"]}
        expected = total if workload == "rolling_sum" else _counted(workload, tables["plain"])
    counted = {side: _counted(workload, paths) for side, paths in tables.items()}
    if set(counted.values()) != {expected}:
        raise Refusal(f"{workload}: the sides did not do the same work: counted={counted}, expected={expected}")


def _counted(workload: str, paths: list[Path]) -> int:
    total = 0
    for path in paths:
        with duckdb.connect() as database:
            database.register("rows", DeltaTable(path).to_pyarrow_dataset())
            (counted,) = database.sql(_COUNTS[workload]).fetchall()[0]
            total += int(counted or 0)
    return total
