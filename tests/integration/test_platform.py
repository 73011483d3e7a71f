"""The whole platform, for real, on ports and in a folder of its own."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace

import httpx
import psutil
import pytest
from kafka import KafkaProducer

from jobs.airflow_api import dag_runs
from jobs.lake.final import FinalTable
from jobs.lake.ledger import Ledger
from jobs.pipelines import PIPELINES, STREAMS
from jobs.pipelines.slices import slice_at
from jobs.refusal import Refusal
from jobs.streaming import ingest
from local.platform.ports import free_ports, is_free
from local.platform.process import kill, marked, session_of
from local.platform.settings import StackSettings
from local.platform.stack import Stack
from tests import batch, processes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SUM = PIPELINES["rolling_sum"]
# More than the value of a series may be.
BROKEN = 5_000_000_000
USED = {"provision_topics", "control_streams", "reset_stream", "publish_blocked", "rollback_slice", SUM.recompute_job}
PARTS = ("broker", "api-server", "dag-processor", "triggerer", "scheduler")
# The limit of "idle, the whole platform stays under 3 GB".
MEMORY_LIMIT_BYTES = 3_000_000_000


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    home, (broker, controller, airflow) = tmp_path_factory.mktemp("platform"), free_ports(3)
    settings = StackSettings.from_env(
        {
            "TIDELINE_HOME": str(home),
            "KAFKA_BOOTSTRAP": f"127.0.0.1:{broker}",
            "KAFKA_CONTROLLER_PORT": str(controller),
            "AIRFLOW_PORT": str(airflow),
        }
    )
    settings = replace(settings, jobs=replace(settings.jobs, jars=StackSettings.from_env().jobs.jars))
    stack = Stack(settings)
    try:
        stack.up()
        yield stack
    finally:
        kill(marked(home))


def _pids(stack: Stack) -> dict[str, int | None]:
    return {part.name: part.pid for part in stack.status() if part.name in PARTS}


def test_every_part_is_healthy_and_small(stack):
    states = {part.name: part for part in stack.status()}
    assert {name: states[name].state for name in PARTS} == dict.fromkeys(PARTS, "healthy")
    assert 300_000_000 < sum(part.memory_bytes for part in states.values()) < MEMORY_LIMIT_BYTES


def test_only_loopback_is_bound(stack):
    listening = []
    for process in marked(stack.settings.home):
        with suppress(psutil.Error):
            connections = process.net_connections("tcp")
            listening += [at.laddr.ip for at in connections if at.status == psutil.CONN_LISTEN]
    assert len(listening) >= len(stack.settings.ports())
    assert set(listening) <= {"127.0.0.1", "::ffff:127.0.0.1"}


def test_secrets_are_for_their_owner_only(stack):
    for name in ("secrets.json", "passwords.json"):
        assert stack.airflow.folder.joinpath(name).stat().st_mode & 0o777 == 0o600


def test_the_dags_are_read_and_a_task_reaches_kafka(stack):
    with stack.airflow.api() as api:
        # Airflow reads file by file, so some DAGs may be there before others.
        processes.wait_until(lambda: api.dags().keys() >= USED, "the DAGs are read", 240)
        assert api.import_errors() == []
        api.unpause("provision_topics")
        run_id = api.trigger("provision_topics")
        assert api.wait_for_run("provision_topics", run_id, 120) == "success"
        assert "numbers" in api.task_log("provision_topics", run_id, "apply")


def test_streams_are_shown_and_a_reset_is_planned(stack):
    """Neither starts or changes anything: both forms do so only on request."""
    with stack.airflow.api() as api:
        run_id = api.trigger("control_streams")
        assert api.wait_for_run("control_streams", run_id, 120) == "success"
        log = api.task_log("control_streams", run_id, "control")
        assert all(f"│ {job} " in log for job in STREAMS)
        assert log.count("never started") == len(STREAMS)
        run_id = api.trigger("reset_stream", {"job": "word_count", "to": "latest"})
        assert api.wait_for_run("reset_stream", run_id, 120) == "success"
        assert "Nothing is changed: this was a dry run." in api.task_log("reset_stream", run_id, "reset")
        assert api.runs("reset_stream")[0]["note"].startswith("Nothing is changed")
        run_id = api.trigger("reset_stream", {"job": "word_count", "to": "landed", "apply": True})
        assert api.wait_for_run("reset_stream", run_id, 120) == "failed"
        assert "nothing of topic 'lines' is landed" in api.task_log("reset_stream", run_id, "reset")
    assert not (stack.settings.jobs.lake_root / "live").exists()


def test_a_streams_page_is_for_those_who_may_see_the_dag(stack):
    page = f"{stack.settings.airflow_url}/tideline/streams/stream_word_count"
    assert httpx.get(page, timeout=30).status_code == httpx.codes.UNAUTHORIZED
    assert httpx.get(f"{page}/log", timeout=30).status_code == httpx.codes.UNAUTHORIZED
    with stack.airflow.api() as api:
        api.dags()
        allowed = {"Authorization": api._http.headers["Authorization"]}
    shown = httpx.get(page, headers=allowed, timeout=30)
    assert shown.status_code == httpx.codes.OK
    assert "It was never started." in shown.text
    assert httpx.get(f"{page}/log", headers=allowed, timeout=30).status_code == httpx.codes.NOT_FOUND
    unknown = httpx.get(page.replace("word_count", "nothing"), headers=allowed, timeout=30)
    assert "DAG stream_nothing runs no stream" in unknown.text


def test_a_person_publishes_what_is_blocked_and_a_backfill_restates_its_slice_alone(stack, spark):
    jobs = replace(stack.settings.jobs, spark_master="local[2]", shuffle_partitions=2)
    bad, good = (slice_at(SUM, round(time.time() * 1000) - minutes * 60_000) for minutes in (8, 7))
    with KafkaProducer(bootstrap_servers=jobs.kafka.bootstrap) as producer:
        for slice_, value in ((bad, BROKEN), (good, 7)):
            for number in range(20):
                text = b'{"id":%d,"ts":%d,"value":%d}' % (number, slice_.start_ms + number, value)
                producer.send("numbers", text, key=b"k")
    ingest.run(jobs, until_caught_up=True)
    batch.whole(jobs, SUM, "first")
    with stack.airflow.api() as api:
        approve(stack, api, bad)
        assert versions(jobs.lake_root)[bad.name] == 1
        line = Ledger.read(jobs.lake_root, SUM).newest([bad.name])[bad.name]
        assert line.state == "final"
        assert line.reason.startswith(f"blocked, approved by {stack.settings.airflow_user}: a recalibration")
        backfill(api, good)
        after = versions(jobs.lake_root)
        assert {name for name, version in after.items() if version > 1} == {good.name}
        follow_by_command(api, good)


def approve(stack, api, slice_):
    run_id = api.trigger("publish_blocked", {"pipeline": SUM.name, "slice": slice_.name})
    run = f"/dags/publish_blocked/dagRuns/{run_id}"
    # Airflow 3.3.2 asks again if the answer comes before its scheduler has seen that the asking process ended.
    asking = f"TaskInstanceKey(dag_id='publish_blocked', task_id='approve', run_id='{run_id}'"
    seen = f"Received executor event with state success for task instance {asking}"

    def waits():
        (asks,) = (t for t in api.task_instances("publish_blocked", run_id) if t["task_id"] == "approve")
        return asks["state"] == "awaiting_input" and seen in stack.airflow.services()["scheduler"].log.read_text()

    processes.wait_until(waits, "the approval is asked for")
    decision = {"chosen_options": ["Approve"], "params_input": {"reason": "a recalibration"}}
    api._ask("PATCH", f"{run}/taskInstances/approve/-1/hitlDetails", json=decision)
    assert api.wait_for_run("publish_blocked", run_id, 120) == "success"
    events = api._ask("GET", "/assets/events", params={"source_dag_id": "publish_blocked"})["asset_events"]
    assert [event["partition_key"] for event in events] == [slice_.start.strftime("%Y-%m-%dT%H:%M:%S")]


def backfill(api, slice_):
    """As `airflow backfill create` and the UI do it."""
    asked = {
        "dag_id": SUM.recompute_job,
        "from_date": slice_.start.isoformat(),
        "to_date": slice_.start.isoformat(),
        "reprocess_behavior": "completed",
        "max_active_runs": 1,
    }
    api.unpause(SUM.recompute_job)
    try:
        made = api._ask("POST", "/backfills", json=asked)
        processes.wait_until(
            lambda: api._ask("GET", f"/backfills/{made['id']}")["completed_at"] is not None, "the backfill is over", 300
        )
    finally:
        api.pause(SUM.recompute_job)


def follow_by_command(api, slice_):
    """As `tideline plan`, `restate` and `rollback` do it."""
    said = []
    with pytest.raises(Refusal, match=f"the DAG {SUM.recompute_job} is paused, so it starts no run"):
        dag_runs.run(api, SUM.recompute_job, {"dry_run": True}, said.append, 120)
    api.unpause(SUM.recompute_job)
    try:
        run_id = dag_runs.run(api, SUM.recompute_job, {"dry_run": True}, said.append, 300)
    finally:
        api.pause(SUM.recompute_job)
    assert api.xcom(SUM.recompute_job, run_id, "plan")["dry_run"] is True
    # A state in between may be over before the test sees it.
    assert said[0] in ("queued", "running", "plan")
    conf = {"pipeline": SUM.name, "slice": slice_.name, "to_version": 1, "apply": True}
    with pytest.raises(Refusal, match="rollback_slice failed: roll_back: a roll-back needs a reason"):
        dag_runs.run(api, "rollback_slice", conf, said.append, 120)


def versions(lake_root):
    return {name: header.version for name, header in FinalTable.read(lake_root, SUM).headers().items()}


def test_a_wrong_password_is_refused(stack):
    api = stack.airflow.api()
    api.password = "wrong"
    with api, pytest.raises(Refusal, match="refused the login of 'admin'"):
        api.dags()


def test_a_second_up_leaves_everything_as_it_was(stack):
    before = _pids(stack)
    stack.up()
    assert _pids(stack) == before


def test_up_replaces_what_was_killed_and_keeps_the_rest(stack):
    before = _pids(stack)
    # A killed process exists until it has given back its memory.
    kill([psutil.Process(before[name]) for name in ("scheduler", "broker")])
    stale = {"pid": os.getpid(), "started": 0.0}
    (stack.settings.home / "run" / "triggerer.pid").write_text(json.dumps(stale))
    assert {part.name: part.good for part in stack.status()}["scheduler"] is False
    stack.up()
    after = _pids(stack)
    assert all(part.good for part in stack.status())
    assert {name for name in PARTS if before[name] != after[name]} == {"scheduler", "broker", "triggerer"}
    leaders = {session_of(process) for process in marked(stack.settings.home)} - {None}
    assert leaders == set(after.values()), "the triggerer that the stale pid file hid is gone"


_DRIVER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("finished its batch")))
print("running", flush=True)
time.sleep(600)
"""


def _detached(stack: Stack, *command: str) -> subprocess.Popen[str]:
    env = {**os.environ, "TIDELINE_STACK": str(stack.settings.home)}
    return subprocess.Popen(
        [sys.executable, *command], env=env, start_new_session=True, stdout=subprocess.PIPE, text=True
    )


def test_down_asks_drivers_first_and_leaves_nothing_behind(stack, tmp_path):
    script = tmp_path / "jobs" / "__main__.py"
    script.parent.mkdir()
    script.write_text(_DRIVER)
    with _detached(stack, str(script)) as driver, _detached(stack, "-c", "import time; time.sleep(600)") as orphan:
        assert driver.stdout.readline() == "running\n"
        assert stack.down() == 1, "the orphan, which does not know how to stop"
        assert driver.stdout.read() == "finished its batch\n"
        # A process that has ended is a zombie until its parent waits for it.
        assert driver.wait(30) == 0
        assert not psutil.pid_exists(orphan.pid)
    assert marked(stack.settings.home) == []
    assert all(is_free(port) for port in stack.settings.ports().values())
    assert {part.state for part in stack.status()} == {"stopped", "none"}
    assert stack.down() == 0


def test_a_taken_port_is_refused_before_anything_starts(stack):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", stack.settings.airflow_port))
        taken.listen()
        with pytest.raises(Refusal, match=rf"port {stack.settings.airflow_port} is taken by process {os.getpid()}"):
            stack.up()
    assert marked(stack.settings.home) == []
    deleted = {folder.name for folder in stack.clean()}
    assert {"broker", "airflow", "logs", "run"} <= deleted
