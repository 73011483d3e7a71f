"""A disk fills while it is written: streams wait, a batch job fails cleanly, and all go on when there is room."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from jobs.control.epochs import Health
from jobs.control.folder import Control
from jobs.control.incident import full_disk_key
from jobs.control.incidents import Incidents
from jobs.pipelines import PIPELINES
from jobs.pipelines.slices import CLOCK_SKEW_MS
from jobs.settings import Settings
from tests import batch, processes
from tests.faults.test_streams_crash import landed, numbers
from tests.faults.traffic import steady
from tests.judges import checker, oracle
from tests.small_disk import can_mount, fill, small_disk

pytestmark = [
    pytest.mark.faults,
    pytest.mark.spark,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not can_mount(), reason="only root can mount a disk that is to be filled"),
]

SUM = PIPELINES["rolling_sum"]
COMMANDS = {"ingest": ("ingest",), "rolling_sum": ("live", "rolling_sum")}
DISK_MB, RESERVE_MB, LEFT_BYTES = 192, 40, 8_000_000


@pytest.fixture
def on_small_disk(settings: Settings, tmp_path: Path) -> Iterator[Settings]:
    with small_disk(tmp_path / "disk", DISK_MB) as disk:
        yield replace(settings, lake_root=disk)


@contextmanager
def running(settings: Settings, folder: Path) -> Iterator[dict[str, "subprocess.Popen[bytes]"]]:
    """Run ingest and a live job, each as a process with a log of its own."""
    drivers = {
        job: processes.start(settings, *words, log=folder / f"{job}.log", LAKE_RESERVE_MB=str(RESERVE_MB))
        for job, words in COMMANDS.items()
    }
    try:
        yield drivers
    finally:
        for driver in drivers.values():
            processes.end(driver)


def due(settings: Settings, run: str) -> None:
    """Plan until ingest has landed all records before the boundaries."""
    later = SUM.slice_seconds + SUM.allowed_lateness_seconds + CLOCK_SKEW_MS / 1000

    def planned() -> bool:
        found = batch.plan(settings, SUM, run, later_seconds=later)
        return bool(found.plan.work) and not found.survey.waiting

    processes.wait_until(planned, "slices that are due")


def shown(settings: Settings) -> int:
    return len(checker.read_table(settings.lake_root / "live" / SUM.name).rows)


def test_a_disk_that_fills_loses_and_tears_nothing(
    spark: SparkSession, on_small_disk: Settings, tmp_path: Path
) -> None:
    settings, lake, seeds = on_small_disk, on_small_disk.lake_root, count(101)
    with running(settings, tmp_path) as drivers:
        # The broker has a disk of its own.
        with steady(settings, lambda: numbers(next(seeds), 50)):
            processes.wait_until(lambda: shown(settings) > 1000 and landed(settings) > 1000, "1,000 rows")
            due(settings, "a")
            ballast = fill(lake, leave=LEFT_BYTES)
            for job in COMMANDS:
                log = tmp_path / f"{job}.log"
                processes.wait_until(lambda log=log: "numbers waits" in log.read_text(), f"{job} waits")
            before = landed(settings)
            # Documents find room, but rows do not.
            rest = fill(lake, leave=60_000)
            with pytest.raises(Exception, match="No space left on device"):
                batch.stage(settings, SUM, "a")
            (incident,) = Incidents.of(lake).all()
            assert (incident.key, incident.closed) == (full_disk_key(), False)
            assert landed(settings) == before
            assert {processes.newest_health(settings, job) for job in COMMANDS} == {Health.RUNNING}
            ballast.unlink()
            rest.unlink()
            processes.wait_until(lambda: landed(settings) > before + 1000, "1,000 rows after it")
            batch.stage(settings, SUM, "a")
            batch.audit(settings, SUM, "a")
            assert batch.publish(settings, SUM, "a").versions
        for job, driver in drivers.items():
            assert driver.poll() is None, "the same process goes on"
            driver.send_signal(signal.SIGTERM)
            assert processes.finish(driver, tmp_path / f"{job}.log") == 0
    (incident,) = Incidents.of(lake).all()
    assert incident.closed
    judge(settings)


def judge(settings: Settings) -> None:
    lake = settings.lake_root
    for job in COMMANDS:
        (epoch,) = Control.of(lake, job).history()
        assert epoch.receipt is not None
        assert epoch.receipt.clean
    records = oracle.read_topic(settings.kafka.bootstrap, "numbers")
    reached = Control.of(lake, "rolling_sum").history()[0].receipt.offsets["numbers"]
    read = [record for record in records if record.offset < reached[record.partition]]
    assert len(read) > 2000
    assert checker.live_defects(lake, SUM.name, read) == []
    reached = Control.of(lake, "ingest").history()[0].receipt.offsets["numbers"]
    read = [record for record in records if record.offset < reached[record.partition]]
    assert checker.landed_defects(lake, "numbers", read) == []
    assert checker.final_defects(lake, SUM.name, records, due_ms=batch.planned_ms(settings, SUM, "a")) == []
    documents = [file for file in (lake / "control").rglob("*") if file.is_file() and file.name[0] not in "._"]
    assert len(documents) > 4
    assert all(isinstance(json.loads(file.read_text()), dict) for file in documents)
    assert list((lake / "control").rglob(".*")) == [], "nothing half written is left"
