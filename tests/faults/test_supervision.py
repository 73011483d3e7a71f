"""Airflow runs a stream, and everything around it is killed: the stream goes on or comes back, and nothing is lost.

One platform of real processes has traffic without a pause; at the end every record is compared with the oracle.
Each fault prints how long it took until it was noticed, and until it was over.
"""

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import psutil
import pytest

from jobs.airflow_api.client import AirflowApi
from jobs.control.epochs import LOOP_FAILURES, Epoch, Health
from jobs.control.folder import Control
from jobs.control.incident import Incident, full_disk_key
from jobs.control.incidents import Incidents
from jobs.pipelines import PIPELINES
from jobs.pipelines.layout import checkpoint_of, dag_id_of
from jobs.streaming.fleet import Fleet
from jobs.traffic import generator as traffic
from local.platform.drivers import is_driver
from local.platform.ports import free_ports
from local.platform.process import kill, marked, session_of
from local.platform.settings import StackSettings
from local.platform.stack import Stack
from tests.judges import checker, oracle
from tests.small_disk import can_mount, fill, small_disk

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

JOB = "rolling_sum"
DAG = dag_id_of(JOB)
BATCH = PIPELINES[JOB].recompute_job
STALL_SECONDS = 30
# The time within which the triggerer alone notices.
DETECT_SECONDS = 15
# The triggerer notices a death within ten seconds of the last heartbeat.
# Then a task must start to report it, and Spark must recover.
RECOVER_SECONDS = 120
# A disk for the lake alone, so that it can be filled.
DISK_MB = 256
RESERVE_MB = 20


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    home, (broker, controller, airflow) = tmp_path_factory.mktemp("supervised"), free_ports(3)
    env = {
        "TIDELINE_HOME": str(home),
        "KAFKA_BOOTSTRAP": f"127.0.0.1:{broker}",
        "KAFKA_CONTROLLER_PORT": str(controller),
        "AIRFLOW_PORT": str(airflow),
        "STREAM_STALL_SECONDS": str(STALL_SECONDS),
        "LAKE_RESERVE_MB": str(RESERVE_MB),
    }
    settings = StackSettings.from_env(env)
    settings = replace(settings, jobs=replace(settings.jobs, jars=StackSettings.from_env().jobs.jars))
    stack = Stack(settings, env={**os.environ, **env})
    with small_disk(home / "lake", DISK_MB) if can_mount() else nullcontext():
        try:
            stack.up()
            yield stack
        finally:
            kill(marked(home))


@pytest.fixture(scope="module")
def api(stack: Stack) -> Iterator[AirflowApi]:
    with stack.airflow.api() as api:
        # The DAGs are read file by file, so one may be known before another.
        until(lambda: {DAG, "provision_topics"} <= api.dags().keys(), 240, "the DAGs are read")
        api.unpause("provision_topics")
        assert api.wait_for_run("provision_topics", api.trigger("provision_topics"), 180) == "success"
        yield api


@pytest.fixture(scope="module", autouse=True)
def _traffic(stack: Stack, api: AirflowApi) -> Iterator[None]:
    """Send a hundred records a second, some of them late, double or broken, even while the broker is down."""
    stop = threading.Event()
    records = traffic.records("numbers", seed=4, count=None, start_ms=None, late=0.02, duplicate=0.02, corrupt=0.02)
    sender = threading.Thread(
        target=traffic.send, args=(stack.settings.jobs.kafka, "numbers", records), kwargs={"rate": 100, "stop": stop}
    )
    sender.start()
    yield
    stop.set()
    sender.join(60)
    assert not sender.is_alive()


@pytest.fixture
def control(stack: Stack, api: AirflowApi) -> Control:
    """The stream runs, and has written a batch in this epoch."""
    fleet(stack, api).start([JOB], by="a test")
    control = Control.of(stack.settings.jobs.lake_root, JOB)
    until(lambda: batches_of(stack, control.newest()) > 0, RECOVER_SECONDS, "a first batch")
    return control


def fleet(stack: Stack, api: AirflowApi) -> Fleet:
    return Fleet(lake_root=stack.settings.jobs.lake_root, api=api)


def notes(stack: Stack) -> list[dict[str, Any]]:
    """The notes in the commits of micro-batches, the oldest first."""
    log = stack.settings.jobs.lake_root / "live" / JOB / "_delta_log"
    entries = [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(log.glob("*.json"))]
    batches = [actions for actions in entries if any("txn" in action for action in actions)]
    infos = [action["commitInfo"] for actions in batches for action in actions if "commitInfo" in action]
    return [json.loads(info["userMetadata"]) for info in infos]


def batches_of(stack: Stack, epoch: int) -> int:
    return sum(note["epoch"] == epoch for note in notes(stack))


def drivers(stack: Stack) -> list[psutil.Process]:
    return [process for process in marked(stack.settings.home) if is_driver(process)]


def newest(control: Control) -> Epoch:
    return control.epoch(control.newest())


def until(condition: Callable[[], object], seconds: float, what: str) -> float:
    """Wait for a condition, and return how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"{what}: not within {seconds} s"
        time.sleep(0.1)
    return time.monotonic() - began


def told(fault: str, detected: float, recovered: float) -> None:
    print(f"| {fault} | {detected:.1f} | {recovered:.1f} |")


def incident(stack: Stack, key: str) -> list[Incident]:
    return [found for found in Incidents.of(stack.settings.jobs.lake_root).all() if found.key == key]


def kill_session(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    session = os.getsid(pid)
    for process in psutil.process_iter():
        if session_of(process) == session:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def test_a_killed_driver_is_restarted(stack: Stack, api: AirflowApi, control: Control) -> None:
    before = control.newest()
    kill_session(newest(control).holder.pid)
    began = time.monotonic()
    detected = until(lambda: control.epoch(before).receipt, 2 * DETECT_SECONDS, "the death is noticed")
    until(lambda: batches_of(stack, before + 1) > 0, RECOVER_SECONDS, "the next driver writes")
    told("driver, kill -9", detected, time.monotonic() - began)
    receipt = control.epoch(before).receipt
    assert not receipt.clean
    assert "died without a receipt" in receipt.cause
    run = api.runs(DAG)[0]["dag_run_id"]
    assert "died without a receipt" in api.task_log(DAG, run, "run", 1), "the failed try says why"


def test_airflows_death_is_nothing_to_a_driver(stack: Stack, api: AirflowApi, control: Control) -> None:
    """Kill the scheduler with its workers, the triggerer, then everything: one driver goes on in the same epoch."""
    before, (driver,) = newest(control), drivers(stack)
    for parts in (("scheduler",), ("triggerer",), ("scheduler", "triggerer", "dag-processor", "api-server")):
        for part in parts:
            kill_session(stack._service(part).process().pid)
        count, began = batches_of(stack, before.number), time.monotonic()
        until(lambda count=count: batches_of(stack, before.number) > count + 2, 60, "the driver goes on")
        stack.up()
        now = datetime.now(UTC)
        until(lambda now=now: api.beats_since("triggerer", now), 60, "the triggerer beats")
        told(f"{', '.join(parts)}, kill -9 (stream never paused)", 0, time.monotonic() - began)
        assert [process.pid for process in drivers(stack)] == [driver.pid]
        assert newest(control).number == before.number
    # Airflow follows the driver again, so its death is noticed.
    kill_session(driver.pid)
    until(lambda: control.epoch(before.number).receipt, RECOVER_SECONDS, "the death is noticed")
    until(lambda: batches_of(stack, before.number + 1) > 0, RECOVER_SECONDS, "the next driver writes")


def test_a_worker_that_dies_while_it_starts_a_driver(stack: Stack, api: AirflowApi, control: Control) -> None:
    """The retry finds the driver that was started, and starts no second one."""
    before = control.newest()
    kill_session(newest(control).holder.pid)
    # The lease is taken first. Until the process is there, too, a retry could find no driver.
    until(lambda: control.newest() > before and newest(control).beat, RECOVER_SECONDS, "a launch")
    began = time.monotonic()
    kill_session(stack._service("scheduler").process().pid)
    stack.up()
    until(lambda: batches_of(stack, before + 1) > 0, RECOVER_SECONDS, "the launched driver writes")
    until(lambda: _task_states(api) == ["deferred"], RECOVER_SECONDS, "Airflow follows it")
    told("worker and scheduler during a launch, kill -9", 0, time.monotonic() - began)
    assert len(drivers(stack)) == 1
    assert control.newest() == before + 1


def test_a_broker_that_is_away(stack: Stack, api: AirflowApi, control: Control) -> None:
    kill_session(stack._service("broker").process().pid)
    began = time.monotonic()
    until(lambda: time.monotonic() - began > 30, 31, "thirty seconds")
    stack.up()
    back = time.monotonic()
    count = len(notes(stack))
    until(lambda: len(notes(stack)) > count + 2, RECOVER_SECONDS, "batches after the outage")
    told("broker, away for 30 s", 0, time.monotonic() - back)


def test_a_stop_from_airflow_is_graceful_and_the_next_start_goes_on(
    stack: Stack, api: AirflowApi, control: Control
) -> None:
    before, (driver,) = control.newest(), drivers(stack)
    run = api.runs(DAG)[0]["dag_run_id"]
    began = time.monotonic()
    # As a person does in the UI.
    api._ask("PATCH", f"/dags/{DAG}/dagRuns/{run}/taskInstances/run", json={"new_state": "failed"})
    assert time.monotonic() - began < 5, "it returns at once"
    asked = until(lambda: control.epoch(before).stop, DETECT_SECONDS, "the driver is asked to stop")
    until(lambda: control.epoch(before).receipt, 60, "the receipt")
    assert psutil.wait_procs([driver], timeout=30)[1] == []
    receipt = control.epoch(before).receipt
    assert (receipt.clean, receipt.cause) == (True, "stopped by Airflow: its task was ended or cleared")
    until(lambda: batches_of(stack, before + 1) > 0, RECOVER_SECONDS, "the next driver writes")
    told("task ended in the UI", asked, time.monotonic() - began)
    starts = next(note for note in notes(stack) if note["epoch"] == before + 1)["topics"]["numbers"]["offsets"]
    assert {int(partition): start for partition, (start, _) in starts.items()} == receipt.offsets["numbers"]


def test_a_running_stream_takes_no_worker(stack: Stack, api: AirflowApi, control: Control) -> None:
    assert _task_states(api) == ["deferred"]
    pool = api._ask("GET", "/pools/default_pool")
    assert (pool["occupied_slots"], pool["deferred_slots"]) == (0, 1)


def test_a_stalled_stream_is_reported_and_left_alone(stack: Stack, api: AirflowApi, control: Control) -> None:
    """The broker is frozen: the driver lives, but can neither read nor write."""
    before, broker, frozen = control.newest(), stack._service("broker").process().pid, time.time()
    kill_session(broker, signal.SIGSTOP)

    def found() -> list[Incident]:
        return [stall for stall in incident(stack, f"stream.{JOB}.stalled") if stall.opened > frozen]

    try:
        detected = until(found, STALL_SECONDS + DETECT_SECONDS, "the incident")
        assert control.health(newest(control)) is Health.STALLED
        assert "runs but makes no step: numbers since" in found()[0].text
    finally:
        kill_session(broker, signal.SIGCONT)
    recovered = until(lambda: found()[0].closed, RECOVER_SECONDS, "the incident closes by itself")
    told(f"broker frozen (stalled after {STALL_SECONDS} s)", detected, recovered)
    assert len(found()) == 1
    assert control.newest() == before, "no restart"


def test_a_crash_loop_backs_off_and_says_why(stack: Stack, api: AirflowApi, control: Control) -> None:
    """The checkpoint is damaged, so each start is refused. After its repair the stream starts at once on request."""
    before = control.newest()
    metadata = stack.settings.jobs.lake_root / checkpoint_of(JOB) / "metadata"
    sound = metadata.read_text()
    metadata.write_text("{}")
    kill_session(newest(control).holder.pid)
    key, began = f"stream.{JOB}.crash-loop", time.monotonic()
    until(lambda: incident(stack, key), 400, "the incident")
    failed = [control.epoch(before + n) for n in range(LOOP_FAILURES)]
    assert all(epoch.receipt and not epoch.receipt.clean for epoch in failed)
    waits = [after.taken - epoch.receipt.time for epoch, after in itertools.pairwise(failed)]
    assert all(wait >= 2.5 * 2**n for n, wait in enumerate(waits)), waits
    until(lambda: api.runs(DAG)[0]["state"] in ("failed", "running"), 60, "the run fails")
    (loop,) = incident(stack, key)
    assert "checkpoint file" in loop.text
    assert "is damaged" in loop.text
    assert len(loop.text) < 1200
    assert "Traceback" not in loop.text
    metadata.write_text(sound)
    mended = time.monotonic()
    fleet(stack, api).restart([JOB], by="a test")
    until(lambda: batches_of(stack, control.newest()) > 0, RECOVER_SECONDS, "the stream is back")
    told("crash loop (until the incident; until back after mending)", mended - began, time.monotonic() - mended)
    assert len(incident(stack, key)) == 1


@pytest.mark.skipif(not can_mount(), reason="only root can mount a disk that is to be filled")
def test_a_full_disk_is_one_incident_and_the_stream_goes_on_when_there_is_room(
    stack: Stack, api: AirflowApi, control: Control
) -> None:
    """Not a byte is left, so heartbeats fail, too. A task of the batch waits as well, and holds no worker.

    A driver may fail in the middle of a write. That counts as one failure, so this test comes after the crash loop.
    """
    began, runs = time.time(), api.runs(DAG)
    api.unpause(BATCH)
    ballast = fill(stack.settings.jobs.lake_root)
    detected = until(lambda: incident(stack, full_disk_key()), DETECT_SECONDS, "the incident")
    filled = time.monotonic()
    until(lambda: _plans(api) == ["deferred"], RECOVER_SECONDS, "the plan of the batch waits")
    until(lambda: time.monotonic() - filled > 30, 31, "thirty seconds")
    assert not incident(stack, full_disk_key())[0].closed
    ballast.unlink()
    back, count = time.monotonic(), len(notes(stack))
    until(lambda: len(notes(stack)) > count + 2, RECOVER_SECONDS, "batches after the shortage")
    told("disk of the lake, full for 30 s", detected, time.monotonic() - back)
    until(lambda: incident(stack, full_disk_key())[0].closed, DETECT_SECONDS, "the incident is over")
    until(lambda: _plans(api) != ["deferred"], RECOVER_SECONDS, "the plan of the batch begins")
    api.pause(BATCH)
    api.end_runs(BATCH, "success", "a test")
    opened = [found.key for found in Incidents.of(stack.settings.jobs.lake_root).all() if found.opened > began]
    assert opened == [full_disk_key()]
    now = [(run["dag_run_id"], run["state"]) for run in api.runs(DAG)]
    assert now == [(run["dag_run_id"], run["state"]) for run in runs], "the same run goes on, and none has failed"
    assert newest(control).receipt is None


def test_nothing_was_lost_or_double(stack: Stack, api: AirflowApi, control: Control) -> None:
    """The stream is drained and stopped for good: for all records up to there, its rows must match the oracle."""
    fleet(stack, api).stop([JOB], by="a test", drain=True)
    # The receipt is written by a process that has yet to end.
    until(lambda: drivers(stack) == [], 60, "the driver is gone")
    assert api.dags()[DAG]["is_paused"]
    assert newest(control).receipt.cause == "drained and stopped by a test"
    assert api.runs(DAG)[0]["state"] == "success"
    reached = newest(control).receipt.offsets["numbers"]
    sent = oracle.read_topic(stack.settings.jobs.kafka.bootstrap, "numbers")
    records = [record for record in sent if record.offset < reached[record.partition]]
    assert len(records) > 5000
    assert checker.live_defects(stack.settings.jobs.lake_root, JOB, records) == []


def _plans(api: AirflowApi) -> list[str]:
    runs = [run["dag_run_id"] for run in api.runs(BATCH)]
    tasks = (task for run in runs for task in api.task_instances(BATCH, run))
    return [task["state"] for task in tasks if task["task_id"] == "plan" and task["state"]]


def _task_states(api: AirflowApi) -> list[str]:
    run = api.runs(DAG)[0]["dag_run_id"]
    return [task["state"] for task in api.task_instances(DAG, run)]
