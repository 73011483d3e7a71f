"""How long an event takes to be seen in a live window, while the stream runs."""

import random
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

from kafka import KafkaProducer

from jobs.broker.kafka import client_options
from jobs.query.lake import Lake
from jobs.refusal import Refusal
from jobs.settings import KafkaSettings, Settings
from jobs.traffic import generator as traffic
from local.bench.place import end_driver, place_of
from local.steps import Tell

FRESHNESS = "freshness"
_FRESH_RATE = 1_000
_FRESH_WARM_UP_SECONDS = 30
_PROBES_PER_SECOND = 4
# More frequent queries would take the core that the stream needs.
_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 900


@dataclass(frozen=True, kw_only=True)
class Freshness:
    """The time from producing an event to seeing it in a query."""

    samples: int
    p50_seconds: float
    p95_seconds: float
    p99_seconds: float
    lost: int


def freshness_of(settings: Settings, report: Tell, seconds: int = 60) -> Freshness:
    """Send records at a steady rate to a running stream, and look how soon each probe is seen."""
    with place_of(settings, FRESHNESS) as (placed, env, home):
        kafka, lake = placed.kafka, Lake(placed.lake_root)
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
            end_driver(driver)


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
