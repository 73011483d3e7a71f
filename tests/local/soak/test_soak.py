"""The results that a soak computes from its samples; `make soak` runs the soak itself."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from local.soak import report as soak_report
from local.soak.disk import Disk
from local.soak.run import CpuMeter, _settings
from local.soak.samples import Faults, Sample, Soaked, conflicts

# A process measures its time in nanoseconds, the system in hundredths of a second: it is busy for a little longer.
_BUSY = "import time; end = time.process_time() + 0.55\nwhile time.process_time() < end: pass"
_PARENT = f"""
import subprocess, sys
for line in sys.stdin:
    subprocess.run([sys.executable, '-c', {_BUSY!r}], check=True)
    print('done', flush=True)
"""


def sample(minute: float, age: float, batch: int | None = None, final: int = 1) -> Sample:
    return Sample(
        seconds=minute * 60,
        ages={"rolling_sum": age},
        final={"rolling_sum": final},
        batches={"rolling_sum": round(minute * 60) if batch is None else batch},
        lags={"rolling_sum": 7},
        cores=1.5,
        machine_cores=1.8,
        memory_bytes=5_000_000_000,
    )


def soaked(
    *samples: Sample,
    faults: Faults | None = None,
    finals: tuple[float, ...] = (30.0, 59.0, 80.0),
    disk: Disk | None = None,
) -> Soaked:
    return Soaked(
        minutes=2,
        samples=samples,
        faults=faults or Faults(),
        runs={"recompute_rolling_sum": [20.0, 30.0]},
        finals={"rolling_sum": finals},
        disk=disk,
    )


@pytest.mark.parametrize(("end", "is_met"), [(160.0, True), (161.0, False)])
def test_the_end_is_compared_with_half_time(end, is_met):
    found = soaked(sample(0.5, 900), sample(1, 100), sample(1.5, 900), sample(2, end))
    assert (found.unmet() == []) is is_met
    said = "\n".join(soak_report.verdict(found))
    assert ("met: every tide line keeps up" in said) is is_met
    assert ("MISSED: the tide line of rolling_sum is 161 s old at minute 2" in said) is not is_met


def test_a_stream_that_stands_still_is_held_up():
    moving = [sample(at / 2, 100) for at in range(1, 5)]
    assert soaked(*moving).unmet() == []
    still = [sample(at / 2, 100, batch=5 if at < 4 else 6) for at in range(1, 5)]
    assert soaked(*still).unmet() == ["rolling_sum made no micro-batch for 90 s"]


@pytest.mark.parametrize("kind", ["conflicts", "failed_batches", "failed_runs", "incidents"])
def test_a_fault_is_none_too_many(kind):
    found = soaked(sample(1, 100), sample(2, 100), faults=Faults(**{kind: ("rolling_sum: it was overtaken",)}))
    assert found.unmet() == ["rolling_sum: it was overtaken"]


def test_nothing_final_is_not_keeping_up():
    assert soaked(sample(1, 100, final=0), sample(2, 100, final=0)).unmet() == ["no slice of rolling_sum became final"]


def test_slices_that_take_too_long_to_publish_are_told():
    assert soaked(sample(1, 100), sample(2, 100), finals=(60.0, 60.0, 90.0)).unmet() == []
    assert soaked(sample(1, 100), sample(2, 100), finals=(30.0, 61.0, 90.0)).unmet() == [
        "slices of rolling_sum take 61 s from plan to publish: more than 60 s"
    ]


def test_failed_runs_and_incidents_are_told():
    found = soaked(sample(1, 100), sample(2, 100), faults=Faults(failed_runs=("account_x: run",), incidents=("a: b",)))
    said = "\n".join(soak_report.verdict(found))
    assert "failed runs: 1\n  account_x: run" in said
    assert "incidents: 1\n  a: b" in said
    assert "CPU: 1.50 cores on average" in said
    assert "5,000 MB" in said


def test_the_tables_show_every_minute():
    lines, runs, minutes = soak_report.tables(soaked(sample(0.5, 80), sample(1, 90), sample(2, 100)))
    assert (lines.row_count, runs.row_count, minutes.row_count) == (1, 2, 2)


def test_lines_about_other_writers_are_found(tmp_path: Path):
    logs = tmp_path / "tasks" / "drivers" / "ingest"
    logs.mkdir(parents=True)
    (logs / "1.log").write_text("INFO merged 3 files\nERROR another writer has committed to events: this one ends\n")
    (tmp_path / "scheduler.log").write_text("all is well\n")
    (found,) = conflicts(tmp_path)
    assert found == "tasks/drivers/ingest/1.log: ERROR another writer has committed to events: this one ends"


def test_the_cpu_of_children_counts_once_after_their_end():
    meter = CpuMeter()
    command = [sys.executable, "-c", _PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        family = [psutil.Process(parent.pid)]
        parent.stdin.write("\n")
        parent.stdin.flush()
        deadline = time.monotonic() + 30
        while len(family) < 2:
            assert time.monotonic() < deadline
            family = [psutil.Process(parent.pid), *psutil.Process(parent.pid).children()]
        living = meter.seconds_since(family)
        assert parent.stdout.readline() == "done\n"
        ended = meter.seconds_since([psutil.Process(parent.pid)])
        assert 0.5 <= living + ended < 1.0
        assert meter.seconds_since([psutil.Process(parent.pid)]) < 0.2
        parent.stdin.close()


def test_a_soak_takes_nothing_of_a_users_platform(tmp_path, monkeypatch):
    monkeypatch.setenv("LAKE_ROOT", "/somewhere/else")
    monkeypatch.setenv("KAFKA_BOOTSTRAP", "broker.example:9092")
    monkeypatch.setenv("KAFKA_PASSWORD", "secret")
    monkeypatch.setenv("SPARK_DRIVER_MEMORY", "2g")
    settings = _settings(tmp_path)
    assert settings.jobs.lake_root == tmp_path / "lake"
    assert settings.home == tmp_path
    assert settings.jobs.kafka.password is None
    assert settings.jobs.driver_memory == "2g"
    assert len(set(settings.ports().values())) == 3
