"""kill -9 at F4 to F8 while streams append: a reader sees the old or the new version of a slice, and nothing else."""

import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from jobs.control.folder import Control
from jobs.lake.final import FinalTable
from jobs.lake.ledger import Ledger
from jobs.lake.live import Live, PruneRequest
from jobs.lake.slices import State
from jobs.pipelines import PIPELINES
from jobs.pipelines.slices import CLOCK_SKEW_MS, Slice, slice_at, slice_named
from jobs.query.lake import Lake
from jobs.settings import Settings
from tests import batch, processes
from tests.conftest import Produce
from tests.faults.traffic import steady
from tests.judges import checker, oracle
from tests.judges.oracle import Record

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.timeout(1800)]

SUM = PIPELINES["rolling_sum"]
_DIGESTS = """
SELECT strftime(time_bucket(INTERVAL '1 minute', window_start), '%Y%m%dT%H%M%SZ') AS slice, finality, version,
  count(*) AS rows, bit_xor(md5_number(concat_ws('|', window_start, key, total, mean, events))) AS digest
FROM rolling_sum GROUP BY ALL
"""


@dataclass
class Reader:
    """Looks every 50 ms, and keeps the defects that it finds."""

    lake: Lake
    defects: list[str] = field(default_factory=list)
    looks: int = 0
    seen: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    version: dict[str, int] = field(default_factory=dict)

    def look(self) -> None:
        at_once: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for row in self.lake.query(_DIGESTS).to_pylist():
            slice_, version = row["slice"], row["version"]
            at_once[slice_].append((row["finality"], version))
            if version:
                digest = (row["rows"], row["digest"])
                if self.seen.setdefault((slice_, version), digest) != digest:
                    self.defects.append(f"slice {slice_} version {version} has changed: {digest}")
            if version < self.version.get(slice_, 0):
                self.defects.append(f"slice {slice_} went back to {version}")
            self.version[slice_] = version
        self.defects += [f"mixed: slice {slice_} is {states}" for slice_, states in at_once.items() if len(states) > 1]
        self.defects += [f"gone: slice {slice_}" for slice_ in set(self.version) - set(at_once)]
        self.looks += 1


@contextmanager
def watched(settings: Settings) -> Iterator[Reader]:
    """Run a reader in the background."""
    reader, stop = Reader(Lake(settings.lake_root)), threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        while not stop.wait(0.05):
            try:
                reader.look()
            except BaseException as error:
                failed.append(error)
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield reader
    finally:
        stop.set()
        thread.join()
    assert not failed, failed[0]


def number(identity: int, ago_ms: int) -> Record:
    at = int(time.time() * 1000) - ago_ms
    value = b'{"id":%d,"ts":%d,"value":%d.5}' % (identity, at, identity % 1000)
    return Record(partition=-1, arrival_ms=0, key=b"k%d" % (identity % 20), value=value)


def more(identities: Iterator[int]) -> Iterator[Record]:
    """Fifty numbers, one of them late for a slice that is final by then."""
    return (number(identity, ago_ms=120_000 if identity % 50 == 0 else 0) for identity in islice(identities, 50))


def slices(settings: Settings) -> list[Slice]:
    final = FinalTable.read(settings.lake_root, SUM)
    return [slice_named(SUM, name) for name in (final.headers() if final else {})]


def dies(settings: Settings, step: str, run: str, point: str, folder: Path) -> None:
    """Run one step of a run as a process of its own, which is killed at the fail point."""
    hit, log = folder / point, folder / f"{point}.log"
    code = f"""
from jobs.pipelines import PIPELINES
from jobs.settings import Settings
from tests import batch
batch.{step}(Settings.from_env(), PIPELINES["rolling_sum"], {run!r})
"""
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=processes.environment(settings, TIDELINE_FAILPOINT=f"{point}:0:{hit}"),
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    assert processes.finish(process, log, 300) == -signal.SIGKILL, log.read_text()[-3000:]
    assert hit.read_text().startswith(point)


def test_killed_at_every_fail_point_beside_running_streams(
    spark: SparkSession, settings: Settings, produce: Produce, tmp_path: Path
) -> None:
    logs = {name: tmp_path / f"{name}.log" for name in ("ingest", "rolling_sum")}
    # Numbers of the last minutes, so that slices are over at once.
    produce("numbers", [number(identity, ago_ms=identity * 50) for identity in range(3000)])
    drivers = [
        processes.start(settings, "ingest", log=logs["ingest"], INGEST_TRIGGER_MS="500"),
        processes.start(settings, "live", "rolling_sum", log=logs["rolling_sum"]),
    ]
    try:
        with steady(settings, partial(more, count(10_001))):
            processes.wait_until(lambda: rows(settings) > 1000, "1,000 live events", 300)
            with watched(settings) as reader:
                processes.wait_until(lambda: reader.looks > 0, "a first look")
                due_ms = kill_and_heal(settings, tmp_path)
                drivers[1] = dies_while_pruning(settings, drivers[1], logs["rolling_sum"], tmp_path / "F8")
                looks = reader.looks
                processes.wait_until(lambda: reader.looks > looks + 1, "a last look")
                landed = rows(settings)
                processes.wait_until(lambda: rows(settings) > landed + 1000, "1,000 events after it")
        assert reader.defects == []
        assert reader.looks > 100
        for driver, log in zip(drivers, logs.values(), strict=True):
            assert driver.poll() is None, log.read_text()[-3000:]
            driver.send_signal(signal.SIGTERM)
            assert processes.finish(driver, log) == 0
            assert "another writer" not in log.read_text()
    finally:
        for driver in drivers:
            processes.end(driver)
    judge(settings, due_ms)


def kill_and_heal(settings: Settings, folder: Path) -> int:
    """Each run is killed once; the next run, or the same one again, finishes its work.

    Returns:
        the moment of the last plan that looked at all slices: those that were over by then are final.
    """
    due(settings, "a")
    dies(settings, "stage", "a", "F4", folder)
    assert slices(settings) == []
    # Run a was never ended, so its slices are due again.
    due(settings, "b")
    due_ms = batch.planned_ms(settings, SUM, "b")
    batch.stage(settings, SUM, "b")
    dies(settings, "audit", "b", "F5", folder)
    assert slices(settings) == []
    dies(settings, "publish", "b", "F6", folder)
    published = slices(settings)
    assert published
    assert not told(settings), "the ledger does not know of it yet"
    due(settings, "c", slices=published)
    batch.stage(settings, SUM, "c")
    batch.audit(settings, SUM, "c")
    dies(settings, "publish", "c", "F7", folder)
    assert told(settings) == {slice_.name: 2 for slice_ in published}
    # Airflow does the same with a task if it has not seen its end.
    assert batch.publish(settings, SUM, "c").versions == {slice_.name: 2 for slice_ in published}
    due(settings, "d", slices=published)
    batch.stage(settings, SUM, "d")
    batch.audit(settings, SUM, "d")
    assert batch.publish(settings, SUM, "d").versions == {slice_.name: 3 for slice_ in published}
    return due_ms


def dies_while_pruning(
    settings: Settings, driver: subprocess.Popen[bytes], log: Path, hit: Path
) -> subprocess.Popen[bytes]:
    """F8 comes before the live rows of a final slice are removed. The next driver does it; readers see no change."""
    driver.send_signal(signal.SIGTERM)
    assert processes.finish(driver, log) == 0
    oldest = min(slices(settings), key=lambda slice_: slice_.start_ms)
    assert oldest.name in Live.at(settings.lake_root, SUM).slices()
    asked = PruneRequest(before=slice_at(SUM, oldest.end_ms).name, slices=(oldest.name,))
    asked.write(Control.of(settings.lake_root, SUM.name).documents)
    # Rows are removed after every sixtieth commit.
    fast, patience = {"STREAM_TRIGGER_MS": "200"}, 600
    driver = processes.start(settings, "live", "rolling_sum", log=log, TIDELINE_FAILPOINT=f"F8::{hit}", **fast)
    assert processes.finish(driver, log, patience) == -signal.SIGKILL
    assert hit.read_text().startswith("F8")
    assert oldest.name in Live.at(settings.lake_root, SUM).slices()
    driver = processes.start(settings, "live", "rolling_sum", log=log, **fast)
    gone = lambda: oldest.name not in Live.at(settings.lake_root, SUM).slices()  # noqa: E731
    processes.wait_until(gone, "the live rows of a final slice are gone", patience)
    return driver


def due(settings: Settings, run: str, slices: Sequence[Slice] = ()) -> None:
    """Plan until ingest has landed all records before the boundaries, without waiting for late events."""
    later = SUM.allowed_lateness_seconds + CLOCK_SKEW_MS / 1000

    def planned() -> bool:
        found = batch.plan(settings, SUM, run, slices=slices, reason="a test", later_seconds=later)
        return bool(found.plan.work) and not found.survey.waiting

    processes.wait_until(planned, "slices that are due")


def rows(settings: Settings) -> int:
    """The number of events that are live or final."""
    try:
        (row,) = Lake(settings.lake_root).query("SELECT sum(events) AS events FROM rolling_sum").to_pylist()
    except Exception:
        return 0
    return int(row["events"] or 0)


def told(settings: Settings) -> dict[str, int]:
    """The slices that are final by the ledger, each with its version."""
    ledger = Ledger.read(settings.lake_root, SUM)
    entries = ledger.newest_of(ledger.days()) if ledger else {}
    return {name: entry.version for name, entry in entries.items() if entry.state is State.FINAL}


def judge(settings: Settings, due_ms: int) -> None:
    records = oracle.read_topic(settings.kafka.bootstrap, "numbers")
    assert len(records) > 2000
    assert checker.final_defects(settings.lake_root, "rolling_sum", records, due_ms=due_ms) == []
    final = FinalTable.read(settings.lake_root, SUM)
    assert final is not None
    headers = final.headers()
    assert told(settings) == {name: header.version for name, header in headers.items()}
    newest = {record.key: record.value for record in oracle.read_topic(settings.kafka.bootstrap, "sums.final")}
    assert len([value for value in newest.values() if value]) == sum(header.rows for header in headers.values())
