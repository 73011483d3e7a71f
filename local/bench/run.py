"""`tideline bench`: our jobs against plain Spark ones, how fresh the live windows are, the batch half, and a year.

Each workload gets its own broker, empty and on free ports. Two warm sessions, ours and the plain one, then drain
the same new records in turns. So any other work on the machine slows down both.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Self

import duckdb
from deltalake import DeltaTable

from jobs.pipelines import INGEST, PIPELINES, SOURCES
from jobs.refusal import Refusal
from jobs.settings import KafkaSettings, Settings
from jobs.traffic import generator as traffic
from local.bench import batch as bench_batch
from local.bench import scale as bench_scale
from local.bench.freshness import FRESHNESS, Freshness, freshness_of
from local.bench.measured import BATCH, Batch, Sizes
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
_WARM_UPS = 2
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
    # Python evaluates the arguments in this order.
    return Results(
        load_before=os.getloadavg()[0],
        races=tuple(_race(settings, name, records, rounds, report) for name in RACES if name in only),
        freshness=freshness_of(settings, report) if FRESHNESS in only else None,
        scaled=_scale(settings, records, rounds, report) if SCALE in only else (),
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


def _scale(settings: Settings, records: int, rounds: int, report: Tell) -> tuple[Scaled, ...]:
    return tuple(
        _drain_scaled(settings, workers, partitions, records, rounds, report)
        for partitions in PARTITIONS
        for workers in WORKERS
    )


def _drain_scaled(settings: Settings, workers: int, partitions: int, records: int, rounds: int, report: Tell) -> Scaled:
    title = (
        f"scale: {workers} worker{'s' if workers > 1 else ''}, {partitions} partition{'s' if partitions > 1 else ''}"
    )
    warm_up = max(int(records * _WARM_UP_SHARE), 1_000)
    total = _WARM_UPS * warm_up + rounds * records
    feed = _Feed(sources=_READS[WORKLOAD], start_ms=int(time.time() * 1000) - total - 60_000)
    seconds = []
    with (
        place_of(settings, SCALE, {SOURCES["numbers"].name: partitions}) as (placed, env, home),
        bench_scale.cluster(settings, workers, home) as spark,
        _Worker("ours", WORKLOAD, {**env, **spark, "SPARK_SHUFFLE_PARTITIONS": "2"}, home) as worker,
    ):
        for number in range(_WARM_UPS):
            report(f"{title}: warming up, {number + 1} of {_WARM_UPS}")
            feed.send(placed.kafka, warm_up)
            worker.drain()
        for number in range(rounds):
            feed.send(placed.kafka, records)
            report(f"{title}: {records:,} records, round {number + 1} of {rounds}")
            seconds.append(worker.drain())
    return Scaled(workers=workers, partitions=partitions, records=records, seconds=seconds)


def _race(settings: Settings, workload: str, records: int, rounds: int, report: Tell) -> Race:
    warm_up = max(int(records * _WARM_UP_SHARE), 1_000)
    total = _WARM_UPS * warm_up + rounds * records
    # The newest event happened a minute ago, so no side drops an event because it is ahead of its arrival.
    feed = _Feed(sources=_READS[workload], start_ms=int(time.time() * 1000) - total - 60_000)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    with place_of(settings, workload) as (placed, env, home), ExitStack() as stack:
        workers = {side: stack.enter_context(_Worker(side, workload, env, home)) for side in SIDES}
        for number in range(_WARM_UPS):
            report(f"{workload}: warming up, {number + 1} of {_WARM_UPS}")
            feed.send(placed.kafka, warm_up)
            for worker in workers.values():
                worker.drain()
        for number in range(rounds):
            feed.send(placed.kafka, records)
            # The sides take turns in going first, since the first drain meets a broker that still writes to disk.
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                report(f"{workload}: {side} drains {records:,} records, round {number + 1} of {rounds}")
                seconds[side].append(workers[side].drain())
        _check_counts(workload, home, total)
    return Race(workload=workload, records=records * len(_READS[workload]), seconds=seconds)


@dataclass
class _Feed:
    """Sends records. Their event times continue after the last ones, one per millisecond."""

    sources: tuple[str, ...]
    start_ms: int

    def send(self, kafka: KafkaSettings, count: int) -> None:
        for source in self.sources:
            stream = traffic.records(source, seed=self.start_ms, count=count, start_ms=self.start_ms)
            traffic.send(kafka, source, stream)
        self.start_ms += count


class _Worker:
    """The process of one side."""

    def __init__(self, side: str, workload: str, env: dict[str, str], home: Path) -> None:
        self._log = home / f"{side}.log"
        self._command = [sys.executable, "-m", "local.bench.worker", side, workload, str(home / side)]
        self._env = env

    def __enter__(self) -> Self:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        return self

    def drain(self) -> float:
        """Let the process drain, and return its seconds."""
        orders, answers = self._process.stdin, self._process.stdout
        if orders is None or answers is None:
            raise RuntimeError("the pipes to a side are missing")
        with suppress(BrokenPipeError):
            orders.write("\n")
            orders.flush()
        for line in answers:
            if line.startswith("seconds="):
                return float(line.removeprefix("seconds="))
        raise Refusal(f"a side of the race ended:\n{self._log.read_text()[-3000:]}")

    def __exit__(self, *_: object) -> None:
        end_driver(self._process)


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
