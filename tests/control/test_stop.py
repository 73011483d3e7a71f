"""Stop requests, and the end of patience with a driver that does not obey."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from jobs.control import epochs
from jobs.control import lease as lease_module
from jobs.control.epochs import (
    Beat,
    Health,
    Owner,
    Phase,
    Stop,
)
from jobs.control.folder import Control
from jobs.control.lease import Lease
from tests.control.made import JOB, ended, held, newest_health, write_lease
from tests.control.test_heartbeat import Full
from tests.processes import repeated, wait_until

# -- Stop requests, and the end of patience --


def test_a_stop_request_is_seen_and_the_later_one_counts(control: Control, quick: None) -> None:
    with held(control) as lease:
        assert lease.stop is None
        first = Stop(time=time.time(), by="an operator", drain=True, seconds=99.0)
        control.ask_to_stop(1, first)
        wait_until(lambda: lease.stop == first, "the request", 10)
        assert newest_health(control) is Health.STOPPING
        second = Stop(time=time.time(), by="somebody in a hurry")
        control.ask_to_stop(1, second)
        wait_until(lambda: lease.stop == second, "the later request", 10)
        lease.check()


def test_a_request_to_another_epoch_is_not_obeyed(control: Control, quick: None) -> None:
    with held(control):
        control.ask_to_stop(1, Stop(time=time.time(), by="an operator"))
    with held(control) as lease:
        seen = control.epoch(2).last_sign
        wait_until(lambda: control.epoch(2).last_sign > seen, "a look at what is asked", 10)
        assert lease.stop is None


# The request, its age by this clock, and whether the driver is ended at once.
STOPS: dict[str, tuple[Stop, float, bool]] = {
    "asked just now": (Stop(time=0, by="x"), 0, False),
    "asked long ago, or by a clock that is behind": (Stop(time=0, by="x"), 3600, False),
    "in a hurry": (Stop(time=0, by="x", seconds=0.2), 0, True),
    "in a hurry, by a clock that is ahead": (Stop(time=0, by="x", seconds=0.2), -3600, True),
    "in a hurry, by a clock that is behind": (Stop(time=0, by="x", seconds=0.2), 3600, True),
    "a drain stops first, and then has the time of a stop": (Stop(time=0, by="x", drain=True, seconds=0.2), 0, False),
}


@pytest.mark.parametrize(("stop", "age", "dies"), STOPS.values(), ids=STOPS)
def test_one_that_does_not_stop_in_time_is_ended(
    stop: Stop, age: float, dies: bool, control: Control, quick: None
) -> None:
    died = threading.Event()
    lease, asked = acquire(control, died), time.monotonic()
    control.ask_to_stop(1, replace(stop, time=time.time() - age))
    wait_until(lambda: lease.stop is not None, "the request", 10)
    if dies:
        assert died.wait(10)
        assert time.monotonic() - asked >= 0.2
        cause = hard_end(control)
        assert cause.startswith("the micro-batch under way did not end within ")
        assert cause.endswith(" s of the stop request by x; it will be run again")
    else:
        assert not died.wait(0.5)
        assert control.epoch(1).receipt is None
    lease.release(ended())


def test_a_drain_that_does_not_stop_in_time_is_ended(
    control: Control, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs, "STOP_SECONDS", 0.2)
    died = threading.Event()
    lease, asked = acquire(control, died), time.monotonic()
    control.ask_to_stop(1, Stop(time=time.time(), by="x", drain=True, seconds=0.2))
    assert died.wait(10)
    assert time.monotonic() - asked >= 0.4
    assert "of the stop request by x; it will be run again" in hard_end(control)
    lease.release(ended())


def test_a_later_request_has_a_patience_of_its_own(control: Control, quick: None) -> None:
    """A driver that drains for an hour and is then asked to stop may still end its micro-batch."""
    died = threading.Event()
    lease, asked = acquire(control, died), time.monotonic()
    control.ask_to_stop(1, Stop(time=time.time(), by="an operator", drain=True, seconds=3600))
    wait_until(lambda: lease.stop is not None, "the request", 10)
    assert not died.wait(0.6)
    control.ask_to_stop(1, Stop(time=time.time(), by="somebody in a hurry", seconds=0.5))
    assert died.wait(10)
    assert time.monotonic() - asked >= 1.1
    assert "of the stop request by somebody in a hurry" in hard_end(control)
    lease.release(ended())


def acquire(control: Control, died: threading.Event, phase: Phase = Phase.RUNNING) -> Lease:
    """A lease that sets an event instead of killing the process."""
    epoch = control.reserve(Owner.this_process())
    lease = Lease(control, epoch, Beat(time=time.time(), owner=Owner.this_process(), phase=phase), died.set)
    lease._beating.start()
    return lease


def hard_end(control: Control) -> str:
    """The cause in the receipt of a driver that was killed."""
    receipt = control.epoch(1).receipt
    assert receipt
    assert not receipt.clean
    return receipt.cause


def test_one_that_hangs_while_it_starts_is_ended(
    control: Control, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "START_SECONDS", 0.3)
    died = threading.Event()
    began, lease = time.monotonic(), acquire(control, died, Phase.STARTING)
    assert died.wait(10)
    assert time.monotonic() - began >= 0.3
    assert re.fullmatch(r"no query had begun \d+ s after the start", hard_end(control))
    lease.release(ended())


def test_one_that_hangs_while_it_stops_is_ended(control: Control, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds however long it ran before, and however often it reports that it stops."""
    monkeypatch.setattr(lease_module, "START_SECONDS", 0.1)
    monkeypatch.setattr(lease_module, "STOP_SECONDS", 0.2)
    monkeypatch.setattr(lease_module, "GRACE_SECONDS", 0.2)
    died = threading.Event()
    lease = acquire(control, died)
    assert not died.wait(0.6)
    began = time.monotonic()
    lease.update_heartbeat(phase=Phase.STOPPING)
    with repeated(lambda: lease.update_heartbeat(phase=Phase.STOPPING, ui="http://here:4040")):
        assert died.wait(10)
    assert time.monotonic() - began >= 0.4
    assert re.fullmatch(r"the driver hung for \d+ s while it stopped", hard_end(control))
    lease.release(ended())


def test_one_that_was_overtaken_is_ended_after_its_grace(
    control: Control, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    died = threading.Event()
    lease = acquire(control, died)
    write_lease(control, 2)
    wait_until(lambda: lease.is_lost, "the look for a newer epoch", 10)
    assert not died.wait(10 * lease_module.BEAT_SECONDS)
    monkeypatch.setattr(lease_module, "GRACE_SECONDS", 0.1)
    assert died.wait(10)
    assert control.epoch(2).receipt is None
    lease.release(ended())


def test_one_that_is_past_its_deadline_is_ended_also_where_nothing_can_be_written(quick: None) -> None:
    full = Full(1, "receipt")
    control, died = Control(full, JOB), threading.Event()
    lease = acquire(control, died)
    full.armed.set()
    control.ask_to_stop(1, Stop(time=time.time(), by="an operator", seconds=0.1))
    assert died.wait(10)
    lease.release(ended())


_STUCK = """
import signal, subprocess, sys
from pathlib import Path
from jobs.control import lease as lease_module
from jobs.control.folder import Control
from jobs.control.lease import Lease
lease_module.BEAT_SECONDS = 0.05
lease = Lease.acquire(Control.of(Path(sys.argv[1]), "rolling_sum"))
jvm = subprocess.Popen([sys.argv[2], "600"])
print(jvm.pid, flush=True)
signal.pause()
"""


def test_a_hard_end_takes_the_jvm_along(shared: Control, tmp_path: Path) -> None:
    """Only the name of the process matters: here `sleep` runs under the name java."""
    java = tmp_path / "java"
    shutil.copy(shutil.which("sleep") or "", java)
    driver = subprocess.Popen(
        [sys.executable, "-c", _STUCK, str(tmp_path), str(java)], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    jvm = psutil.Process(int(driver.stdout.readline()))
    try:
        shared.ask_to_stop(1, Stop(time=time.time(), by="an operator", seconds=0.5))
        assert driver.wait(30) == -signal.SIGKILL
        wait_until(lambda: not jvm.is_running() or jvm.status() == psutil.STATUS_ZOMBIE, "the JVM's end", 10)
    finally:
        if jvm.is_running():
            jvm.kill()
        driver.kill()
        driver.communicate()
    receipt = shared.epoch(1).receipt
    assert receipt
    assert "did not end within" in receipt.cause
    assert newest_health(shared) is Health.FAILED
    with held(shared) as lease:
        assert lease.epoch == 2


@pytest.mark.parametrize(("environment", "ended_by"), [({"PYSPARK_GATEWAY_PORT": "1"}, -signal.SIGKILL), ({}, 7)])
def test_a_hard_end_takes_a_parent_along_only_under_spark_submit(
    environment: dict[str, str], ended_by: int, tmp_path: Path
) -> None:
    """Only the name of the process matters: here `sh` runs under the name java."""
    java = tmp_path / "java"
    shutil.copy(shutil.which("sh") or "", java)
    end = "from jobs.control.lease import end_this_process; end_this_process()"
    done = subprocess.run(
        [java, "-c", '"$0" -c "$1"; exit 7', sys.executable, end],
        env={name: value for name, value in os.environ.items() if name != "PYSPARK_GATEWAY_PORT"} | environment,
        timeout=60,
    )
    assert done.returncode == ended_by
