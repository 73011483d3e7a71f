"""kill -9 at each fail point, a broker that is killed, partitions that grow: no record is lost or doubled.

Each driver is a real process. One chain of restarts meets F1, F2 and F3 in turn, each at a batch of its own.
"""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from itertools import count, islice
from pathlib import Path

import pytest

from jobs.broker import kafka
from jobs.control.folder import Control
from jobs.settings import Settings
from jobs.traffic.generator import records as traffic
from local.platform.broker import Broker
from tests import processes
from tests.conftest import Produce
from tests.faults.traffic import steady
from tests.judges import checker, oracle
from tests.judges.oracle import Record

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

COMMAND = {"ingest": ("ingest",), "rolling_sum": ("live", "rolling_sum")}


def numbers(seed: int, count: int) -> list[Record]:
    made = traffic("numbers", seed=seed, count=count, start_ms=None, late=0.02, duplicate=0.02, corrupt=0.02)
    return [Record(partition=-1, arrival_ms=0, key=r.key or b"k", value=r.value) for r in made]


def defects(settings: Settings, job: str, records: list[Record]) -> list[str]:
    if job == "ingest":
        return checker.landed_defects(settings.lake_root, "numbers", records)
    return checker.live_defects(settings.lake_root, job, records)


def batches_done(settings: Settings, job: str) -> int:
    table = "events/numbers" if job == "ingest" else f"live/{job}"
    return len(checker.read_table(settings.lake_root / table).notes)


@pytest.mark.parametrize("job", COMMAND)
def test_killed_at_every_fail_point(job: str, settings: Settings, produce: Produce, tmp_path: Path) -> None:
    produce("numbers", numbers(1, 9000))
    log = tmp_path / "driver.log"
    for batch, point in ((1, "F1"), (2, "F2"), (3, "F3")):
        hit = tmp_path / point
        driver = processes.start(
            settings,
            *COMMAND[job],
            "--until-caught-up",
            log=log,
            STREAM_MAX_OFFSETS="1500",
            TIDELINE_FAILPOINT=f"{point}:{batch}:{hit}",
        )
        assert processes.finish(driver, log) == -signal.SIGKILL
        assert hit.read_text().startswith(f"{point} batch {batch}")
        assert batches_done(settings, job) == batch + (point == "F3")
    produce("numbers", numbers(2, 3000))
    driver = processes.start(settings, *COMMAND[job], "--until-caught-up", log=log, STREAM_MAX_OFFSETS="1500")
    assert processes.finish(driver, log) == 0, log.read_text()[-4000:]
    records = oracle.read_topic(settings.kafka.bootstrap, "numbers")
    assert len(records) >= 12_000
    assert batches_done(settings, job) >= 8
    assert defects(settings, job, records) == []
    if job != "ingest":
        judge_output_topic(settings, job)


def test_killed_while_small_files_are_merged(settings: Settings, produce: Produce, tmp_path: Path) -> None:
    """F8: the merged file is written, but its commit is not. Version 60 of the table is batch 59."""
    produce("numbers", numbers(1, 3000))
    hit, log = tmp_path / "F8", tmp_path / "driver.log"
    small = {"STREAM_MAX_OFFSETS": "45", "TIDELINE_FAILPOINT": f"F8:59:{hit}"}
    driver = processes.start(settings, "ingest", "--until-caught-up", log=log, **small)
    assert processes.finish(driver, log, 400) == -signal.SIGKILL
    assert hit.read_text().startswith("F8 batch 59")
    assert batches_done(settings, "ingest") == 60
    driver = processes.start(settings, "ingest", "--until-caught-up", log=log)
    assert processes.finish(driver, log) == 0, log.read_text()[-4000:]
    records = oracle.read_topic(settings.kafka.bootstrap, "numbers")
    assert len(records) > 2900
    assert defects(settings, "ingest", records) == []


def judge_output_topic(settings: Settings, job: str) -> None:
    """The newest message of each key has the values of the newest row, even where a batch was sent twice."""
    table = checker.read_table(settings.lake_root / "live" / job)
    newest = {
        (record.key or b"").decode(): json.loads(record.value or b"", parse_float=Decimal)
        for record in oracle.read_topic(settings.kafka.bootstrap, "sums")
    }
    windows = checker.current_windows(job, table.rows)
    assert len(newest) == len(windows)
    shown = {(message["window_start"], message["key"]): message for message in newest.values()}
    for row in windows.values():
        message = shown[row["window_start"].strftime("%Y-%m-%dT%H:%M:%S.000Z"), row["key"]]
        assert (message["total"], message["events"]) == (row["total"], row["events"])


def landed(settings: Settings) -> int:
    return len(checker.read_table(settings.lake_root / "events" / "numbers").rows)


def test_broker_restart_and_partition_growth_in_mid_run(settings: Settings, broker: Broker, tmp_path: Path) -> None:
    log, seeds = tmp_path / "driver.log", count(101)
    driver = processes.start(settings, "ingest", log=log, INGEST_TRIGGER_MS="500")
    try:
        # The producer sends again any record that the broker does not take at once.
        with steady(settings, lambda: numbers(next(seeds), 500), metadata_max_age_ms=1000):
            processes.wait_until(lambda: landed(settings) > 1000, f"the first records\n{log}")
            broker.kill()
            time_of_death = time.monotonic()
            broker.start()
            before = landed(settings)
            processes.wait_until(lambda: landed(settings) > before + 1000, "records after the broker's restart")
            recovered = time.monotonic() - time_of_death
            with kafka.admin(settings.kafka) as client:
                client.create_partitions({"numbers": 5})
            processes.wait_until(lambda: has_partition(settings, 4), "records of the new partitions")
        wanted = oracle.read_topic(settings.kafka.bootstrap, "numbers")
        processes.wait_until(lambda: landed(settings) >= len(wanted), "all records landed")
        assert driver.poll() is None, log.read_text()[-4000:]
        driver.send_signal(signal.SIGTERM)
        assert processes.finish(driver, log) == 0, log.read_text()[-4000:]
    finally:
        processes.end(driver)
    assert recovered < 120
    assert len(wanted) > 2000
    assert defects(settings, "ingest", wanted) == []


def has_partition(settings: Settings, partition: int) -> bool:
    rows = checker.read_table(settings.lake_root / "events" / "numbers").rows
    return any(row["partition"] == partition for row in islice(reversed(rows), 20_000))


@contextmanager
def beating(settings: Settings, job: str) -> Iterator[None]:
    """Write heartbeats on behalf of a driver that cannot, as if it had stopped a moment ago."""
    control = Control.of(settings.lake_root, job)
    epoch = control.newest_epoch()
    assert epoch
    assert epoch.beat
    with processes.repeated(lambda: control.beat(epoch.number, replace(epoch.beat, time=time.time())), 0.2):
        yield


def test_a_paused_zombie_beside_its_successor(settings: Settings, produce: Produce, tmp_path: Path) -> None:
    """A driver is suspended past its lease, and a successor goes on. When resumed, it commits nothing and ends."""
    zombie_log, log = tmp_path / "zombie.log", tmp_path / "successor.log"
    produce("numbers", numbers(1, 3000))
    zombie = processes.start(settings, "live", "rolling_sum", log=zombie_log)
    successor = None
    try:
        processes.wait_until(lambda: batches_done(settings, "rolling_sum") > 0, "the first batch")
        processes.signal_group(zombie, signal.SIGSTOP)
        produce("numbers", numbers(2, 3000))
        # The second driver may start late on a slow machine, and would then rightly take over.
        with beating(settings, "rolling_sum"):
            refused = processes.start(settings, "live", "rolling_sum", log=log)
            assert processes.finish(refused, log) == 1
        assert "already running" in log.read_text()
        processes.wait_until(lambda: processes.lease_is_stale(settings, "rolling_sum"), "a stale lease", 30)
        successor = processes.start(settings, "live", "rolling_sum", log=log)
        count = batches_done(settings, "rolling_sum")
        processes.wait_until(lambda: batches_done(settings, "rolling_sum") > count, f"the successor's batch {log}")
        processes.signal_group(zombie, signal.SIGCONT)
        produce("numbers", numbers(3, 3000))
        assert processes.finish(zombie, zombie_log) == 1
        assert "has lost its lease" in zombie_log.read_text() or "another writer" in zombie_log.read_text()
        successor.send_signal(signal.SIGTERM)
        assert processes.finish(successor, log) == 0
    finally:
        for driver in (zombie, successor):
            if driver:
                processes.end(driver)
    last = processes.start(settings, "live", "rolling_sum", "--until-caught-up", log=log)
    assert processes.finish(last, log) == 0, log.read_text()[-4000:]
    records = oracle.read_topic(settings.kafka.bootstrap, "numbers")
    assert len(records) >= 9000
    assert defects(settings, "rolling_sum", records) == []
