"""The states of all streams, and an operator's requests to them, without Airflow: the drivers are small processes."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
from rich.console import Console

from jobs.cli import streams
from jobs.control import epochs
from jobs.control import folder as control_module
from jobs.control import lease as lease_module
from jobs.control.epochs import (
    STALE_SECONDS,
    STOP_SECONDS,
    Health,
    Launch,
    Owner,
    Phase,
    QueryProgress,
    Receipt,
    Wait,
)
from jobs.control.folder import Control
from jobs.control.incident import crash_loop_key, full_disk_key, stalled_key
from jobs.control.incidents import Incidents
from jobs.control.lease import LOG_VARIABLE, Lease
from jobs.pipelines import STREAMS
from jobs.refusal import Refusal
from jobs.streaming import fleet as module
from jobs.streaming.fleet import DRAIN_SECONDS, Fleet, StreamState, as_rows, known_jobs, table
from tests.control.made import run_elsewhere
from tests.processes import wait_until

JOB, OTHER = "rolling_sum", "ingest"
# An obedient driver stops on request; before a drained stop it reads three more records.
# A deaf one ignores the request, and a mortal one exits at once without a receipt.
_DRIVER = """
import os, sys, time
from pathlib import Path
from jobs.control import lease as module
from jobs.control.folder import Control
from jobs.control.lease import Lease
from jobs.control.epochs import Phase, QueryProgress, Receipt

lake, job, manner = sys.argv[1:]
module.BEAT_SECONDS = 0.05
lease = Lease.acquire(Control.of(Path(lake), job), {})
waiting = 3

def show():
    progress = QueryProgress(topic="numbers", stepped=time.time(), lag=waiting)
    lease.update_heartbeat(phase=Phase.RUNNING, queries=(progress,))

show()
print(lease.epoch, flush=True)
while lease.stop is None or manner == "deaf":
    time.sleep(0.02)
if manner == "mortal":
    os._exit(1)
while lease.stop.drain and waiting:
    waiting -= 1
    show()
    time.sleep(0.1)
lease.release(Receipt(time=time.time(), clean=True, cause="drained" if lease.stop.drain else "stopped"))
"""
Starter = Callable[..., subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(control_module, "LOOK_ON_SECONDS", 0.1)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.05)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def fleet(tmp_path: Path, told: list[str]) -> Fleet:
    return Fleet(lake_root=tmp_path, api=None, report=told.append)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Starter]:
    """Start drivers in processes of their own; each one runs when it is returned."""
    started: list[subprocess.Popen[str]] = []

    def start(job: str = JOB, manner: str = "obedient") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _DRIVER, str(tmp_path), job, manner]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        epoch = int(process.stdout.readline())
        control = Control.of(tmp_path, job)
        wait_until(lambda: control.health(control.epoch(epoch)) is Health.RUNNING, "its own heartbeat", 10)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@contextmanager
def held(lake: Path, job: str = JOB, *, clean: bool = True, cause: str = "stopped", **shown: Any) -> Iterator[Control]:
    """Hold a lease while the block runs, with a heartbeat that shows these fields."""
    control = Control.of(lake, job)
    lease = Lease.acquire(control, {LOG_VARIABLE: "/logs/driver.log"})
    lease.update_heartbeat(**shown)

    def is_shown() -> bool:
        beat = control.epoch(lease.epoch).beat
        return beat is not None and beat == replace(beat, **shown)

    wait_until(is_shown, "a heartbeat", 10)
    try:
        yield control
    finally:
        lease.release(Receipt(time=time.time(), clean=clean, cause=cause))


def fail(lake: Path, job: str = JOB, cause: str = "no memory") -> Control:
    """Add an epoch that failed."""
    with held(lake, job, clean=False, cause=cause, phase=Phase.RUNNING) as control:
        return control


def state_of(fleet: Fleet, job: str = JOB, **dag: Any) -> StreamState:
    return fleet._state(job, dag or None)


# -- The states of streams --


def test_a_stream_that_was_never_started(fleet: Fleet, tmp_path: Path) -> None:
    state = state_of(fleet)
    assert (state.job, state.state, state.wanted, state.failures, state.cause) == (JOB, "never started", None, 0, "")
    assert (state.epoch, state.since, state.beat_seconds, state.batch, state.lag) == (None,) * 5
    assert (state.rows_per_second, state.ui, state.log) == (None,) * 3


def test_a_stream_that_runs(fleet: Fleet, tmp_path: Path) -> None:
    now = time.time()
    queries = (
        QueryProgress(topic="numbers", stepped=now, batch=7, rows_per_second=100.5, lag=3),
        QueryProgress(topic="lines", stepped=now, batch=4, rows_per_second=10.25, lag=40),
        QueryProgress(topic="clicks", stepped=now),
    )
    with held(tmp_path, phase=Phase.RUNNING, queries=queries, ui="http://here:4040") as control:
        state = state_of(fleet, is_paused=False)
        assert (state.state, state.wanted, state.epoch) == (Health.RUNNING, True, 1)
        assert (state.failures, state.cause) == (0, "")
        assert (state.batch, state.rows_per_second, state.lag) == (7, 110.75, 43)
        assert (state.ui, state.log) == ("http://here:4040", "/logs/driver.log")
        assert state.since == control.epoch(1).taken
        assert state.beat_seconds is not None
        assert 0 <= state.beat_seconds < STALE_SECONDS
    ended = state_of(fleet, is_paused=False)
    assert (ended.state, ended.cause, ended.batch, ended.log) == (Health.STOPPED, "stopped", 7, "/logs/driver.log")
    assert (ended.beat_seconds, ended.rows_per_second, ended.ui) == (None, None, None)
    receipt = control.epoch(1).receipt
    assert receipt
    assert ended.since == receipt.time


def test_a_stream_that_failed_tells_why_and_how_often(fleet: Fleet, tmp_path: Path) -> None:
    for failed in (1, 2, 3):
        fail(tmp_path, cause=f"no memory, {failed}")
        state = state_of(fleet)
        assert (state.state, state.cause) == (Health.FAILED, f"no memory, {failed}")
        assert state.epoch == state.failures == failed


def test_a_stream_whose_driver_was_killed_is_dead(fleet: Fleet, driver: Starter) -> None:
    process = driver()
    assert state_of(fleet).state == Health.RUNNING
    process.kill()
    process.wait()
    state = state_of(fleet)
    assert (state.state, state.epoch, state.beat_seconds, state.ui) == (Health.DEAD, 1, None, None)
    assert state.cause.startswith(
        f"the driver died without a receipt (killed, or out of memory): process {process.pid} "
    )


@pytest.mark.parametrize(
    ("shown", "state"),
    [
        ({"phase": Phase.STARTING}, Health.STARTING),
        ({"phase": Phase.STOPPING}, Health.STOPPING),
        (
            {"phase": Phase.RUNNING, "stall_seconds": 5.0, "queries": (QueryProgress(topic="numbers", stepped=0.0),)},
            Health.STALLED,
        ),
    ],
    ids=["starts", "stops", "is stalled"],
)
def test_a_stream_that_lives_but_does_not_run(
    shown: dict[str, Any], state: Health, fleet: Fleet, tmp_path: Path
) -> None:
    with held(tmp_path, **shown):
        assert state_of(fleet).state == state


def test_a_stream_that_is_launched_is_starting(fleet: Fleet, tmp_path: Path) -> None:
    assert Control.of(tmp_path, JOB).reserve(Owner.this_process(), launched=True) == 1
    state = state_of(fleet)
    assert (state.state, state.epoch, state.log) == (Health.STARTING, 1, None)


def test_pausing_alone_leaves_the_driver_running_and_says_so(fleet: Fleet, tmp_path: Path) -> None:
    with held(tmp_path, phase=Phase.RUNNING):
        paused = state_of(fleet, is_paused=True)
        assert (paused.state, paused.wanted) == (Health.RUNNING, False)
        assert paused.cause == (
            "its DAG is paused: the driver goes on, but Airflow would not restart it; to end it: "
            "tideline streams stop rolling_sum"
        )
        assert state_of(fleet, is_paused=False).cause == ""
        assert state_of(fleet).cause == ""
    ended = state_of(fleet, is_paused=True)
    assert (ended.state, ended.cause) == (Health.STOPPED, "stopped")


@pytest.mark.parametrize(
    ("state", "wanted", "is_well"),
    [
        ("running", True, True),
        ("starting", True, True),
        ("stalled", True, False),
        ("failed", True, False),
        ("dead", True, False),
        ("stopped", True, False),
        ("never started", True, False),
        ("failed", False, True),
        ("running", None, True),
        ("stopped", None, True),
        ("never started", None, True),
        ("stalled", None, False),
        ("failed", None, False),
        ("dead", None, False),
    ],
)
def test_a_stream_is_well_that_runs_or_is_not_wanted(
    state: str, wanted: bool | None, is_well: bool, fleet: Fleet
) -> None:
    """If it is unknown whether a stream is wanted, it is well unless something is wrong."""
    row = {**as_rows([state_of(fleet)])[0], "state": state, "wanted": wanted}
    assert StreamState(**row).is_well is is_well


def test_a_stream_lives_whose_driver_holds_its_lease(fleet: Fleet) -> None:
    known = as_rows([state_of(fleet)])[0]
    alive = {state for state in ("never started", *Health) if StreamState(**{**known, "state": state}).lives}
    assert alive == {"starting", "running", "stalled", "stopping"}


def test_the_status_has_a_row_for_each_stream_in_order(fleet: Fleet, tmp_path: Path) -> None:
    assert [state.job for state in fleet.status()] == list(STREAMS)
    with held(tmp_path, phase=Phase.RUNNING):
        states = fleet.status((OTHER, JOB))
    assert [(state.job, state.state, state.wanted) for state in states] == [
        (OTHER, "never started", None),
        (JOB, "running", None),
    ]


def test_only_open_incidents_of_the_streams_that_are_meant_are_told(fleet: Fleet, tmp_path: Path) -> None:
    assert fleet.incidents() == []
    incidents = Incidents.of(tmp_path)
    incidents.open(crash_loop_key(OTHER), "ingest failed five times")
    incidents.open(stalled_key(JOB), "rolling_sum makes no step")
    incidents.open(stalled_key(f"{JOB}_sliding"), "rolling_sum_sliding makes no step")
    incidents.close(crash_loop_key(OTHER), "it runs")
    assert sorted(fleet.incidents()) == ["rolling_sum makes no step", "rolling_sum_sliding makes no step"]
    assert fleet.incidents([JOB, OTHER]) == ["rolling_sum makes no step"]
    Incidents.of(fleet.lake_root).open(full_disk_key(), "the disk is full")
    assert sorted(fleet.incidents([JOB])) == ["rolling_sum makes no step", "the disk is full"]


def test_the_incidents_of_a_stream_that_is_switched_off_are_over(fleet: Fleet, tmp_path: Path) -> None:
    incidents = Incidents.of(tmp_path)
    for key in (crash_loop_key(JOB), stalled_key(JOB), stalled_key(OTHER), "lag.numbers"):
        incidents.open(key, "opened")
    fleet.stop([JOB], by="an operator")
    assert {incident.key for incident in incidents.all() if not incident.closed} == {stalled_key(OTHER), "lag.numbers"}
    assert {incident.text for incident in incidents.all() if incident.closed} == {"switched off by an operator"}


# -- For people and for programs --


def test_rows_are_plain_json(fleet: Fleet, tmp_path: Path) -> None:
    fail(tmp_path)
    told, nothing = json.loads(json.dumps(as_rows(fleet.status((JOB, OTHER)))))
    assert (told["job"], told["state"], told["epoch"], told["cause"]) == (JOB, "failed", 1, "no memory")
    assert set(told) == set(nothing) == set(StreamState.__dataclass_fields__)
    assert (nothing["state"], nothing["epoch"], nothing["wanted"]) == ("never started", None, None)


def test_the_table_shows_each_stream_with_its_reason(fleet: Fleet) -> None:
    known = {**as_rows([state_of(fleet)])[0], "epoch": 12, "since": 86400.0, "batch": 1234567, "lag": 0}
    rows = [
        {**known, "state": "running", "wanted": True, "rows_per_second": 1234.5},
        {**known, "state": "failed", "wanted": False, "cause": "no memory"},
        as_rows([state_of(fleet, OTHER)])[0],
    ]
    console = Console(width=200, color_system=None)
    with console.capture() as captured:
        console.print(table(StreamState(**row) for row in rows))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in captured.get().splitlines() if "│" in line]
    assert lines == [
        [JOB, "on", "running", "12", "1970-01-02 00:00:00", "1,234,567", "1,234", "0", ""],
        [JOB, "off", "failed", "12", "1970-01-02 00:00:00", "1,234,567", "", "0", "no memory"],
        [OTHER, "?", "never started", "", "", "", "", "", ""],
    ]


def test_what_data_says_cannot_steer_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spark's error may quote a record. It is shown with its brackets, and with its control characters spelled out."""
    monkeypatch.setenv("LAKE_ROOT", str(tmp_path))
    monkeypatch.setattr(streams, "airflow", nullcontext)
    fail(tmp_path, cause="no \x1b[2J [b]key")
    Incidents.of(tmp_path).open(crash_loop_key(JOB), "it failed: \x1b[2J [b]key")
    with pytest.raises(typer.Exit):
        streams.streams_status([JOB])
    with streams._fleet() as shown:
        shown.report("rolling_sum: \x1b[2J [b]key")
    printed = capsys.readouterr()
    assert "no \\x1b[2J [b]key" in printed.out
    assert "incident: it failed: \\x1b[2J [b]key" in printed.out
    assert "rolling_sum: \\x1b[2J [b]key" in printed.err
    assert "\x1b" not in printed.out + printed.err


def test_jobs_are_known_by_name_all_if_none_is_named() -> None:
    assert known_jobs([]) == STREAMS
    assert known_jobs([JOB, OTHER, JOB]) == (JOB, OTHER)
    with pytest.raises(Refusal, match=f"no streaming job is called nope, no: choose from {', '.join(STREAMS)}"):
        known_jobs([JOB, "nope", "no"])


# -- Requests to streams --


def test_a_driver_that_is_stopped_ends_after_its_batch(fleet: Fleet, told: list[str], driver: Starter) -> None:
    process = driver()
    asked = time.time()
    fleet.stop([JOB], by="an operator")
    epoch = Control.of(fleet.lake_root, JOB).epoch(1)
    assert epoch.stop
    assert (epoch.stop.by, epoch.stop.drain, epoch.stop.seconds) == ("an operator", False, STOP_SECONDS)
    assert asked <= epoch.stop.time <= time.time()
    assert told == [f"{JOB}: epoch 1 is asked to stop", f"{JOB}: epoch 1: stopped"]
    assert state_of(fleet).state == Health.STOPPED
    assert process.wait(30) == 0


def test_a_driver_that_is_drained_reads_first_what_waits(fleet: Fleet, told: list[str], driver: Starter) -> None:
    process = driver()
    fleet.stop([JOB], by="an operator", drain=True)
    epoch = Control.of(fleet.lake_root, JOB).epoch(1)
    assert epoch.stop
    assert (epoch.stop.drain, epoch.stop.seconds) == (True, DRAIN_SECONDS)
    assert told == [f"{JOB}: epoch 1 is asked to drain and stop", f"{JOB}: epoch 1: drained"]
    assert process.wait(30) == 0


def test_several_are_asked_before_any_is_awaited(fleet: Fleet, told: list[str], driver: Starter) -> None:
    processes = [driver(JOB), driver(OTHER)]
    fleet.stop([JOB, "word_count", OTHER], by="an operator", seconds=60.0)
    assert told == [
        f"{JOB}: epoch 1 is asked to stop",
        f"{OTHER}: epoch 1 is asked to stop",
        f"{JOB}: epoch 1: stopped",
        f"{OTHER}: epoch 1: stopped",
        "word_count: no driver runs",
    ]
    stops = [Control.of(fleet.lake_root, job).epoch(1).stop for job in (JOB, OTHER)]
    assert stops[0] == stops[1]
    assert stops[0] is not None
    assert stops[0].seconds == 60.0
    assert [process.wait(30) for process in processes] == [0, 0]


def test_where_nothing_runs_nothing_is_asked(fleet: Fleet, told: list[str], tmp_path: Path) -> None:
    failed, stopped = fail(tmp_path), Control.of(tmp_path, OTHER)
    with held(tmp_path, OTHER):
        pass
    before = [control.documents.names() for control in (failed, stopped)]
    fleet.stop([JOB, OTHER, "word_count"], by="an operator")
    assert told == [f"{job}: no driver runs" for job in (JOB, OTHER, "word_count")]
    assert [control.documents.names() for control in (failed, stopped)] == before


def test_a_driver_that_is_not_done_in_time_ends_hard_and_that_is_told(
    fleet: Fleet, told: list[str], driver: Starter
) -> None:
    process = driver(manner="deaf")
    fleet.stop([JOB], by="an operator", seconds=0.3)
    assert told[0] == f"{JOB}: epoch 1 is asked to stop"
    assert re.fullmatch(
        rf"{JOB}: epoch 1: the micro-batch under way did not end within \d+ s "
        "of the stop request by an operator; it will be run again",
        told[1],
    )
    assert process.wait(30) == -signal.SIGKILL
    assert state_of(fleet).state == Health.FAILED


def test_a_driver_that_dies_of_the_request_gets_its_receipt(fleet: Fleet, told: list[str], driver: Starter) -> None:
    process = driver(manner="mortal")
    # Its parent does not wait for it during the request, so it is a zombie, which counts as dead.
    fleet.stop([JOB], by="an operator")
    assert told[1].startswith(f"{JOB}: epoch 1: the driver died without a receipt (killed, or out of memory): process ")
    assert (state_of(fleet).state, state_of(fleet).failures) == (Health.FAILED, 1)
    assert process.wait(30) == 1


@pytest.mark.parametrize(("drain", "waits_seconds"), [(False, 0.3), (True, 0.5)], ids=["stop", "drain"])
def test_patience_runs_out_with_one_that_neither_ends_nor_dies(
    drain: bool, waits_seconds: float, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MARGIN_SECONDS", 0.1)
    monkeypatch.setattr(epochs, "STOP_SECONDS", 0.2)
    control = Control.of(tmp_path, JOB)
    run_elsewhere(control, log="/logs/driver.log")
    began = time.monotonic()
    with pytest.raises(Refusal, match=rf"{JOB}: epoch 1 did not end within \d s: see its log /logs/driver.log"):
        fleet.stop([JOB], by="an operator", drain=drain, seconds=0.2)
    assert waits_seconds <= time.monotonic() - began < 5
    assert state_of(fleet).state == Health.STOPPING


# -- Actions that only Airflow can do --


@pytest.mark.parametrize("action", ["start", "restart"])
def test_nothing_is_started_without_airflow_and_nothing_is_touched(
    action: str, fleet: Fleet, told: list[str], tmp_path: Path
) -> None:
    failed = fail(tmp_path, OTHER)
    with held(tmp_path, phase=Phase.RUNNING) as control:
        with pytest.raises(
            Refusal,
            match="^Airflow does not answer, and only Airflow starts drivers: "
            rf"run `tideline up`, then {action} again$",
        ):
            getattr(fleet, action)([JOB, OTHER], by="an operator")
        assert control.stop_of(1) is None
    assert failed.newest() == 1
    assert state_of(fleet, OTHER).failures == 1
    assert told == []


def test_failures_are_forgotten_once_so_that_it_may_start_at_once(
    fleet: Fleet, told: list[str], tmp_path: Path
) -> None:
    control = fail(tmp_path)
    assert isinstance(control.next_step(), Wait)
    assert fleet._forgive(JOB, "an operator") == control.newest() == 2
    assert control.next_step() == Launch()
    assert told == [f"{JOB}: its earlier failures do not count any more"]
    assert (state_of(fleet).failures, state_of(fleet).state) == (0, Health.STOPPED)
    names = control.documents.names()
    assert fleet._forgive(JOB, "an operator") == 2
    assert control.documents.names() == names
    assert told == [f"{JOB}: its earlier failures do not count any more"]


def test_a_death_that_nobody_has_booked_is_forgotten_too(fleet: Fleet, told: list[str], driver: Starter) -> None:
    process = driver()
    process.kill()
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, "its end", 10)
    fleet._forgive(JOB, "an operator")
    assert told == [f"{JOB}: its earlier failures do not count any more"]
    control = Control.of(fleet.lake_root, JOB)
    assert control.next_step() == Launch()
    receipt = control.epoch(1).receipt
    assert receipt
    assert not receipt.clean


def test_where_nothing_is_to_be_forgotten_nothing_is_written(fleet: Fleet, told: list[str], tmp_path: Path) -> None:
    assert fleet._forgive(JOB, "an operator") == 0
    with held(tmp_path, phase=Phase.RUNNING) as control:
        assert fleet._forgive(JOB, "an operator") == 1
    assert fleet._forgive(JOB, "an operator") == 1
    assert (control.newest(), told) == (1, [])


@pytest.mark.parametrize("failed", [0, 2])
def test_a_start_is_awaited_until_the_driver_speaks(
    failed: int, fleet: Fleet, told: list[str], driver: Starter
) -> None:
    """The document that makes failures forgotten does not count as a driver."""
    for _ in range(failed):
        fail(fleet.lake_root)
    before = fleet._forgive(JOB, "an operator")
    told.clear()
    start = threading.Thread(target=driver)
    start.start()
    try:
        fleet._await_start(JOB, before)
    finally:
        start.join()
    assert told == [f"{JOB}: epoch {before + 1} is running"]


def test_a_start_of_one_that_runs_is_done(fleet: Fleet, told: list[str], tmp_path: Path) -> None:
    with held(tmp_path, phase=Phase.RUNNING):
        fleet._await_start(JOB, 1)
    assert told == [f"{JOB}: epoch 1 is running"]


def test_a_start_that_failed_is_told_with_its_cause(fleet: Fleet, tmp_path: Path) -> None:
    fail(tmp_path, cause="no such topic")
    with pytest.raises(Refusal, match=f"^{JOB}: epoch 1 is failed: no such topic$"):
        fleet._await_start(JOB, 0)


@pytest.mark.parametrize("is_launched", [False, True], ids=["nothing is launched", "it never speaks"])
def test_a_start_that_does_not_come_is_given_up(
    is_launched: bool, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_START_SECONDS", 0.2)
    control = fail(fleet.lake_root)
    before = control.newest()
    if is_launched:
        control.reserve(Owner.this_process(), launched=True)
    with pytest.raises(Refusal, match=f"{JOB}: no driver runs after 0 s: look at stream_{JOB} in Airflow"):
        fleet._await_start(JOB, before)
    Incidents.of(fleet.lake_root).open(full_disk_key(), "the disk is full")
    with pytest.raises(Refusal, match=f"{JOB}: no driver runs after 0 s: the disk is full"):
        fleet._await_start(JOB, before)
