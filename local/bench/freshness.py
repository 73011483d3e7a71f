"""How long an event takes to be seen in a live window, while the stream runs."""

import random
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from statistics import quantiles

from kafka import KafkaProducer

from jobs.broker.kafka import client_options
from jobs.query.lake import Lake
from jobs.refusal import Refusal
from jobs.settings import KafkaSettings, Settings
from jobs.traffic import generator as traffic
from local.bench.place import end_driver, place_of
from local.platform.process import Service
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
        command = (sys.executable, "-m", "jobs", "live", "rolling_sum")
        driver = Service(name="live", home=home, command=command, env=env)
        stop = threading.Event()
        stream = traffic.records("numbers", seed=1, count=None, start_ms=None)
        load = threading.Thread(
            target=traffic.send, args=(kafka, "numbers", stream), kwargs={"rate": _FRESH_RATE, "stop": stop}
        )
        try:
            driver.start()
            load.start()
            report("freshness: waiting for the first windows")
            driver.wait_ready(lambda: _shows_windows(lake), _PATIENCE_SECONDS)
            report(f"freshness: warming up for {_FRESH_WARM_UP_SECONDS} s")
            _probe(kafka, lake, driver, _FRESH_WARM_UP_SECONDS)
            report(f"freshness: {_FRESH_RATE:,} records/s for {seconds} s")
            return _probe(kafka, lake, driver, seconds)
        finally:
            stop.set()
            if load.ident:
                load.join()
            if process := driver.process():
                end_driver(process)


def _shows_windows(lake: Lake) -> bool:
    with suppress(Refusal):
        return bool(lake.query("SELECT key FROM rolling_sum LIMIT 1").num_rows)
    return False


def _probe(kafka: KafkaSettings, lake: Lake, driver: Service, seconds: int) -> Freshness:
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
    while driver.process() and (not done.is_set() or len(seen) < len(sent)) and time.time() < deadline:
        found, now = lake.query(sql)["key"].to_pylist(), time.time()
        seen.update({key: now for key in found if key not in seen})
        time.sleep(_POLL_SECONDS)
    sender.join()
    if not driver.process():
        raise Refusal(f"the stream ended while it was measured:\n{driver.log.read_text()[-3000:]}")
    waits = [seen[key] - sent[key] for key in seen]
    cuts = quantiles(waits, n=100)
    return Freshness(
        samples=len(waits), p50_seconds=cuts[49], p95_seconds=cuts[94], p99_seconds=cuts[98], lost=len(sent) - len(seen)
    )
