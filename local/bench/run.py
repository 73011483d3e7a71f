"""`tideline bench`: our jobs against plain Spark ones, how fresh the live windows are, the batch half, and a year.

Each workload gets its own broker, empty and on free ports. Two warm sessions, ours and the plain one, then drain
the same new records in turns. So any other work on the machine slows down both.
"""

import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Self

import duckdb
import psutil
from deltalake import DeltaTable
from kafka import KafkaProducer

from jobs import pipelines
from jobs.broker import topics
from jobs.broker.kafka import admin, client_options
from jobs.pipelines import INGEST, PIPELINES, SOURCES
from jobs.pipelines.source import Topic
from jobs.query.lake import Lake
from jobs.refusal import Refusal
from jobs.settings import KafkaSettings, Settings
from jobs.traffic import generator as traffic
from local.bench import batch as bench_batch
from local.bench import scale as bench_scale
from local.bench.batch import BATCH, Batch, Sizes
from local.bench.scale import PARTITIONS, WORKERS, WORKLOAD, Scaled
from local.bench.year import run as bench_year
from local.bench.year.run import DAYS, YEAR, Year
from local.platform.broker import Broker

FRESHNESS = "freshness"
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
_FRESH_RATE = 1_000
_FRESH_WARM_UP_SECONDS = 30
_PROBES_PER_SECOND = 4
# More frequent queries would take the core that the stream needs.
_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 900

Report = Callable[[str], object]


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
class Freshness:
    """The time from producing an event to seeing it in a query."""

    samples: int
    p50_seconds: float
    p95_seconds: float
    p99_seconds: float
    lost: int


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
    settings: Settings, *, records: int, rounds: int, only: tuple[str, ...], report: Report, days: int = DAYS
) -> Results:
    """Measure. All files are in temporary folders, which are removed afterwards."""
    unknown = sorted(set(only) - set(CHOICES))
    if unknown:
        raise Refusal(f"nothing to measure is called {', '.join(unknown)}: choose from {', '.join(CHOICES)}")
    load_before = os.getloadavg()[0]
    races = tuple(_race(settings, name, records, rounds, report) for name in RACES if name in only)
    freshness = _freshness(settings, report) if FRESHNESS in only else None
    scaled = _scale(settings, records, rounds, report) if SCALE in only else ()
    # This comes after the races, since it starts Spark in this process.
    batch = _batch(settings, Sizes.of(records, rounds), only, report) if set(BATCH) & set(only) else None
    year = _year(settings, rounds, days, report) if YEAR in only else None
    load_after = os.getloadavg()[0]
    return Results(
        races=races,
        freshness=freshness,
        batch=batch,
        scaled=scaled,
        year=year,
        load_before=load_before,
        load_after=load_after,
    )


def _batch(settings: Settings, sizes: Sizes, only: Sequence[str], report: Report) -> Batch:
    with _place(settings, "batch") as (kafka, _env, home):
        return bench_batch.run(replace(settings, kafka=kafka, lake_root=home / "lake"), sizes, only, report)


def _year(settings: Settings, rounds: int, days: int, report: Report) -> Year:
    with _place(settings, YEAR) as (kafka, _env, home):
        placed = replace(settings, kafka=kafka, lake_root=home / "lake")
        return bench_year.run(placed, report, days=days, rounds=rounds)


def _scale(settings: Settings, records: int, rounds: int, report: Report) -> tuple[Scaled, ...]:
    return tuple(
        _drain_scaled(settings, workers, partitions, records, rounds, report)
        for partitions in PARTITIONS
        for workers in WORKERS
    )


def _drain_scaled(
    settings: Settings, workers: int, partitions: int, records: int, rounds: int, report: Report
) -> Scaled:
    said = f"scale: {workers} worker{'s' if workers > 1 else ''}, {partitions} partition{'s' if partitions > 1 else ''}"
    warm_up = max(int(records * _WARM_UP_SHARE), 1_000)
    total = _WARM_UPS * warm_up + rounds * records
    feed = _Feed(sources=_READS[WORKLOAD], start_ms=int(time.time() * 1000) - total - 60_000)
    seconds = []
    with (
        _place(settings, SCALE, {SOURCES["numbers"].name: partitions}) as (kafka, env, home),
        bench_scale.cluster(settings, workers, home) as spark,
        _Worker("ours", WORKLOAD, {**env, **spark, "SPARK_SHUFFLE_PARTITIONS": "2"}, home) as worker,
    ):
        for number in range(_WARM_UPS):
            report(f"{said}: warming up, {number + 1} of {_WARM_UPS}")
            feed.send(kafka, warm_up)
            worker.drain()
        for number in range(rounds):
            feed.send(kafka, records)
            report(f"{said}: {records:,} records, {number + 1} of {rounds}")
            seconds.append(worker.drain())
    return Scaled(workers=workers, partitions=partitions, records=records, seconds=seconds)


@contextmanager
def _place(
    settings: Settings, name: str, partitions: Mapping[str, int] | None = None
) -> Iterator[tuple[KafkaSettings, dict[str, str], Path]]:
    """A new broker with all topics, the environment of processes that use it and a folder, for one measurement."""
    asked = partitions or {}
    with tempfile.TemporaryDirectory(prefix=f"tideline-bench-{name}-") as folder:
        home = Path(folder)
        with Broker(home=home, jars=settings.jars / "broker") as broker:
            kafka = KafkaSettings(bootstrap=broker.bootstrap)
            # The user's settings of Kafka are left out, so that both sides of a race have the same.
            unset = {key: value for key, value in os.environ.items() if not key.startswith("KAFKA_")}
            env = {**unset, **kafka.as_env(), "LAKE_ROOT": str(home / "lake"), "TIDELINE_JARS": str(settings.jars)}
            with admin(kafka) as client:
                wanted = (*pipelines.topics(), *_plain_outputs())
                sized = [replace(topic, partitions=asked.get(topic.name, topic.partitions)) for topic in wanted]
                topics.apply(client, topics.survey(client, sized))
            yield kafka, env, home


def _plain_outputs() -> list[Topic]:
    outputs = [pipeline.topic for pipeline in PIPELINES.values()]
    return [
        Topic(name=f"plain_{topic.name}", partitions=topic.partitions, configs=topic.configs, moves_keys=True)
        for topic in outputs
    ]


def _race(settings: Settings, workload: str, records: int, rounds: int, report: Report) -> Race:
    warm_up = max(int(records * _WARM_UP_SHARE), 1_000)
    total = _WARM_UPS * warm_up + rounds * records
    # The newest event happened a minute ago, so no side drops an event because it is ahead of its arrival.
    feed = _Feed(sources=_READS[workload], start_ms=int(time.time() * 1000) - total - 60_000)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    with _place(settings, workload) as (kafka, env, home), ExitStack() as stack:
        workers = {side: stack.enter_context(_Worker(side, workload, env, home)) for side in SIDES}
        for number in range(_WARM_UPS):
            report(f"{workload}: warming up, {number + 1} of {_WARM_UPS}")
            feed.send(kafka, warm_up)
            for worker in workers.values():
                worker.drain()
        for number in range(rounds):
            feed.send(kafka, records)
            # The sides take turns in going first, since the first drain meets a broker that still writes to disk.
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                report(f"{workload}: {side} drains {records:,} records, {number + 1} of {rounds}")
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
        _end(self._process)


def _end(process: "subprocess.Popen[str]") -> None:
    """End a process and the JVM below it."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    process.terminate()
    _gone, left = psutil.wait_procs(family, timeout=30)
    for member in left:
        member.kill()
    process.wait(60)


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
        raise Refusal(f"the sides of {workload} did not do the same work: {counted}, expected {expected}")


def _counted(workload: str, paths: list[Path]) -> int:
    total = 0
    for path in paths:
        with duckdb.connect() as database:
            database.register("rows", DeltaTable(path).to_pyarrow_dataset())
            (counted,) = database.sql(_COUNTS[workload]).fetchall()[0]
            total += int(counted or 0)
    return total


def _freshness(settings: Settings, report: Report, seconds: int = 60) -> Freshness:
    with _place(settings, FRESHNESS) as (kafka, env, home):
        lake = Lake(home / "lake")
        log = home / "live.log"
        with log.open("w") as output:
            command = [sys.executable, "-m", "jobs", "live", "rolling_sum"]
            driver = subprocess.Popen(command, env=env, stdout=output, stderr=output, text=True)
        stop = threading.Event()
        stream = traffic.records("numbers", seed=1, count=None, start_ms=None)
        load = threading.Thread(
            target=traffic.send, args=(kafka, "numbers", stream), kwargs={"rate": _FRESH_RATE, "stop": stop}
        )
        load.start()
        try:
            report("freshness: waiting for the first windows")
            _await_windows(lake, driver, log)
            report(f"freshness: warming up for {_FRESH_WARM_UP_SECONDS} s")
            _probe(kafka, lake, driver, log, _FRESH_WARM_UP_SECONDS)
            report(f"freshness: {_FRESH_RATE:,} records/s for {seconds} s")
            return _probe(kafka, lake, driver, log, seconds)
        finally:
            stop.set()
            load.join()
            _end(driver)


def _await_windows(lake: Lake, driver: "subprocess.Popen[str]", log: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline and driver.poll() is None:
        try:
            if lake.query("SELECT key FROM rolling_sum LIMIT 1").num_rows:
                return
        except Refusal:
            pass
        time.sleep(0.5)
    raise Refusal(f"rolling_sum shows no windows:\n{log.read_text()[-3000:]}")


def _probe(kafka: KafkaSettings, lake: Lake, driver: "subprocess.Popen[str]", log: Path, seconds: int) -> Freshness:
    """Send events of unique series at random moments, and look for each of them until a query returns it."""
    sent: dict[str, float] = {}
    seen: dict[str, float] = {}
    done = threading.Event()
    name, began = f"probe-{time.time_ns()}-", time.time()

    def send() -> None:
        with KafkaProducer(**client_options(kafka)) as producer:
            for number in range(seconds * _PROBES_PER_SECOND):
                time.sleep(random.uniform(0, 2 / _PROBES_PER_SECOND))
                key, now = f"{name}{number}", time.time()
                sent[key] = now
                producer.send("numbers", f'{{"id": 0, "ts": {int(now * 1000)}, "value": 1}}'.encode(), key.encode())
        done.set()

    sender = threading.Thread(target=send)
    sender.start()
    recent = f"window_start >= to_timestamp({began - 1})"
    sql = f"SELECT DISTINCT key FROM rolling_sum WHERE {recent} AND starts_with(key, '{name}')"
    deadline = began + seconds * 2 + 60
    while driver.poll() is None and (not done.is_set() or len(seen) < len(sent)) and time.time() < deadline:
        found, now = lake.query(sql)["key"].to_pylist(), time.time()
        seen.update({key: now for key in found if key not in seen})
        time.sleep(_POLL_SECONDS)
    sender.join()
    if driver.poll() is not None:
        raise Refusal(f"the stream ended while it was measured:\n{log.read_text()[-3000:]}")
    waits = [seen[key] - sent[key] for key in seen]
    cuts = quantiles(waits, n=100)
    return Freshness(
        samples=len(waits), p50_seconds=cuts[49], p95_seconds=cuts[94], p99_seconds=cuts[98], lost=len(sent) - len(seen)
    )
