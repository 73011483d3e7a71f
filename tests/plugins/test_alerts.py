"""Alerts leave through a real SMTP server and a real HTTP server: once per incident, and once when it is over."""

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException

from jobs.control import incidents as incidents_module
from jobs.control.epochs import Beat, Owner, Phase, QueryProgress, Receipt
from jobs.control.folder import Control
from jobs.control.incident import blocked_key, crash_loop_key, failed_run_key, missed_deadline_key, stalled_key
from jobs.control.incidents import Incidents
from jobs.refusal import Refusal
from jobs.settings import PROJECT
from local.platform.ports import free_port
from tests import processes
from tests.plugins.alert_channels import PASSWORD, Hooks, Mailbox, mail_to, posts_to
from tideline_airflow.notifiers import delivery
from tideline_airflow.notifiers.delivery import deliver
from tideline_airflow.notifiers.incident import Event, IncidentNotifier, _sentence
from tideline_airflow.scheduling import defaults
from tideline_airflow.triggers import streaming
from tideline_airflow.triggers.streaming import StreamTrigger

# This warning comes from the plugins of Apprise, since Apprise imports all of them.
pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")

KEY = blocked_key("rolling_sum", "20260101T000000Z")
TEXT = "rolling_sum, slice 20260101T000000Z: total is never null: 3 of 100 <values> are null"
LINK = "http://127.0.0.1:8080/quality/run?a=1&b=2"
MAIL, HOOK = "AIRFLOW_CONN_TIDELINE_SMTP", "AIRFLOW_CONN_TIDELINE_APPRISE"
Run = Callable[..., str]


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    with Mailbox() as mailbox:
        yield mailbox


@pytest.fixture
def hooks() -> Iterator[Hooks]:
    with Hooks() as hooks:
        yield hooks


@pytest.fixture(autouse=True)
def nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (MAIL, HOOK):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def incidents(tmp_path: Path) -> Incidents:
    return Incidents.of(tmp_path)


@pytest.fixture
def connected(mailbox: Mailbox, hooks: Hooks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAIL, mail_to(mailbox.port))
    monkeypatch.setenv(HOOK, posts_to(hooks.port))


# -- Delivery --


@pytest.mark.usefixtures("connected")
def test_one_message_per_incident_and_one_on_recovery(
    incidents: Incidents, mailbox: Mailbox, hooks: Hooks, tmp_path: Path
) -> None:
    for _ in range(2):
        incidents.open(KEY, TEXT, link=LINK)
        deliver(tmp_path)
    assert mailbox.subjects == hooks.titles == [f"[tideline] opened: {KEY}"]
    for _ in range(2):
        incidents.close(KEY, "run 7 published it")
        deliver(tmp_path)
    assert mailbox.subjects == hooks.titles == [f"[tideline] opened: {KEY}", f"[tideline] recovered: {KEY}"]
    assert [one.told for one in incidents.all()] == [True]


@pytest.mark.usefixtures("connected")
def test_it_says_what_it_is_since_when_how_long_and_where(
    incidents: Incidents, mailbox: Mailbox, hooks: Hooks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = type("Clock", (), {"now": 0.0, "time": staticmethod(lambda: clock.now)})
    monkeypatch.setattr(incidents_module, "time", clock)
    incidents.open(KEY, TEXT, link=LINK)
    deliver(tmp_path)
    clock.now = 3661.0
    incidents.close(KEY, "run 7 published it")
    deliver(tmp_path)
    opened, recovered = (said["message"] for said in hooks.said)
    assert opened == f"{TEXT}\nSince 1970-01-01 00:00:00 UTC.\n{LINK}"
    assert recovered == (
        f"run 7 published it\nThe problem was: {TEXT}\nIt began at 1970-01-01 00:00:00 UTC and lasted 1:01:01.\n{LINK}"
    )
    assert [said["type"] for said in hooks.said] == ["failure", "success"]
    assert mailbox.recipients == [["night@example.org", "day@example.org"]] * 2
    assert mailbox.messages[0]["From"] == "tideline@example.org"
    assert "3 of 100 &lt;values&gt; are null<br>\nSince 1970-01-01" in mailbox.body(0)
    assert '<a href="http://127.0.0.1:8080/quality/run?a=1&amp;b=2">' in mailbox.body(0)


@pytest.mark.usefixtures("connected")
def test_what_is_over_before_it_could_be_told_is_one_message(
    incidents: Incidents, mailbox: Mailbox, tmp_path: Path
) -> None:
    incidents.open(KEY, TEXT)
    incidents.close(KEY, "run 7 published it")
    deliver(tmp_path)
    assert mailbox.subjects == [f"[tideline] recovered: {KEY}"]
    assert "The problem was: rolling_sum, slice" in mailbox.body(0)


def test_recipients_may_be_a_list(
    incidents: Incidents, mailbox: Mailbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MAIL, mail_to(mailbox.port, to=["a@example.org", "b@example.org"]))
    incidents.open(KEY, TEXT)
    deliver(tmp_path)
    assert mailbox.recipients == [["a@example.org", "b@example.org"]]


def test_a_dead_channel_is_tried_again_and_the_other_is_not_asked_twice(
    incidents: Incidents,
    hooks: Hooks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = free_port()
    monkeypatch.setenv(MAIL, mail_to(port))
    monkeypatch.setenv(HOOK, posts_to(hooks.port))
    incidents.open(KEY, TEXT)
    for _ in range(3):
        deliver(tmp_path)
    assert hooks.titles == [f"[tideline] opened: {KEY}"]
    assert [one.told for one in incidents.all()] == [False]
    assert f"smtp could not send {KEY}, the next delivery tries again: ConnectionRefusedError" in caplog.text
    with Mailbox(port) as mailbox:
        for _ in range(2):
            deliver(tmp_path)
    assert mailbox.subjects == hooks.titles == [f"[tideline] opened: {KEY}"]
    assert [one.told for one in incidents.all()] == [True]


def test_of_two_services_of_apprise_the_one_that_lives_is_told_once(
    incidents: Incidents, hooks: Hooks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Hooks() as other:
        other.status = 500
        monkeypatch.setenv(HOOK, posts_to(other.port, hooks.port))
        incidents.open(KEY, TEXT)
        for _ in range(2):
            deliver(tmp_path)
        assert (len(other.said), len(hooks.said)) == (2, 1)
        other.status = 200
        for _ in range(2):
            deliver(tmp_path)
        assert (len(other.said), len(hooks.said)) == (3, 1)


def test_a_dead_channel_is_asked_once_in_a_delivery(
    incidents: Incidents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(MAIL, mail_to(free_port()))
    for number in range(5):
        incidents.open(f"key-{number}", TEXT)
    deliver(tmp_path)
    assert caplog.text.count("smtp could not send") == 1
    assert len(incidents.unsent()) == 5


def test_failures_of_one_key_are_told_in_order_once_the_channel_is_back(
    incidents: Incidents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv(MAIL, mail_to(port))
    for act in (incidents.open, incidents.close, incidents.open):
        act(KEY, TEXT)
        deliver(tmp_path)
    with Mailbox(port) as mailbox:
        deliver(tmp_path)
    assert mailbox.subjects == [f"[tideline] recovered: {KEY}", f"[tideline] opened: {KEY}"]


@pytest.mark.parametrize(
    ("name", "connection", "sentence"),
    [
        (MAIL, mail_to(1, to=""), "connection 'tideline_smtp' has no recipient: set `to` in its extra"),
        (
            HOOK,
            json.dumps({"conn_type": "apprise", "extra": {"config": [{"path": f"nonsense://{PASSWORD}"}]}}),
            "entry 1 in the config of connection 'tideline_apprise' is no address that Apprise knows",
        ),
        (HOOK, json.dumps({"conn_type": "apprise"}), "entry 1 in the config of connection 'tideline_apprise' is no"),
    ],
    ids=["no recipient", "no address", "no config"],
)
def test_a_connection_that_is_not_complete_says_what_is_missing(
    name: str,
    connection: str,
    sentence: str,
    incidents: Incidents,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(name, connection)
    incidents.open(KEY, TEXT)
    deliver(tmp_path)
    assert sentence in caplog.text
    assert PASSWORD not in caplog.text
    assert len(incidents.unsent()) == 1


def test_no_password_is_logged(
    incidents: Incidents,
    mailbox: Mailbox,
    hooks: Hooks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO)
    wrong = "a-wrong-secret"
    monkeypatch.setenv(MAIL, mail_to(mailbox.port, password=wrong))
    hooks.status = 403
    monkeypatch.setenv(HOOK, posts_to(hooks.port, free_port()))
    incidents.open(KEY, TEXT)
    deliver(tmp_path)
    assert "SMTPAuthenticationError" in caplog.text
    assert "JSON of connection 'tideline_apprise' rejected the message: check its address" in caplog.text
    everything = caplog.text + "".join(capfd.readouterr())
    assert PASSWORD not in everything
    assert wrong not in everything
    documents = "".join(path.read_text() + path.name for path in tmp_path.rglob("*") if path.is_file())
    assert PASSWORD not in documents


def test_without_a_connection_nobody_is_told_and_none_of_it_later(
    incidents: Incidents, mailbox: Mailbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    incidents.open(KEY, TEXT)
    deliver(tmp_path)
    assert len(incidents.unsent()) == 1, "a lookup that failed would look the same"
    monkeypatch.setattr(delivery, "NOBODY_SECONDS", 0.0)
    deliver(tmp_path)
    assert [one.told for one in incidents.all()] == [True]
    monkeypatch.setenv(MAIL, mail_to(mailbox.port))
    deliver(tmp_path)
    assert mailbox.subjects == []


def test_a_lake_that_cannot_be_read_fails_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "control").write_text("in the way")
    deliver(tmp_path)
    assert "messages about incidents could not be sent, the next delivery tries again: " in caplog.text


def _deliver(folder: str, start: Barrier, results: "Queue[int]") -> None:
    for _ in range(10):
        start.wait(60)
        deliver(Path(folder))
        results.put(0)


@pytest.mark.usefixtures("connected")
def test_two_that_deliver_at_once_send_each_message_once(
    incidents: Incidents, mailbox: Mailbox, hooks: Hooks, tmp_path: Path
) -> None:
    keys = [f"key.{number}" for number in range(12)]
    for key in keys:
        incidents.open(key, TEXT)
    processes.race(_deliver, tmp_path, racers=2, answers=20)
    assert sorted(mailbox.subjects) == sorted(hooks.titles) == sorted(f"[tideline] opened: {key}" for key in keys)
    assert incidents.unsent() == []


@pytest.mark.usefixtures("connected")
def test_a_message_whose_sender_died_leaves_later(
    incidents: Incidents, mailbox: Mailbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    incidents.open(KEY, TEXT)
    assert incidents.claim(incidents.unsent()[0], "smtp")
    deliver(tmp_path)
    assert mailbox.subjects == [], "it may be sending"
    monkeypatch.setattr(incidents_module, "CLAIM_SECONDS", 0.0)
    deliver(tmp_path)
    assert mailbox.subjects == [f"[tideline] opened: {KEY}"]


# -- From the triggerer --


def test_a_stalled_stream_is_told_while_it_is_followed(
    mailbox: Mailbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MAIL, mail_to(mailbox.port))
    monkeypatch.setattr(streaming, "POLL_SECONDS", 0.02)
    control = Control.of(tmp_path, "rolling_sum")
    epoch = control.reserve(Owner.this_process())

    def step(*, stuck: bool) -> None:
        query = QueryProgress(topic="numbers", stepped=0.0 if stuck else time.time(), batch=7)
        beat = Beat(time=time.time(), owner=Owner.this_process(), phase=Phase.RUNNING, queries=(query,))
        control.beat(epoch, replace(beat, stall_seconds=5.0))

    async def follow() -> None:
        trigger = StreamTrigger(lake_root=str(tmp_path), job="rolling_sum", epoch=epoch)
        firing = asyncio.ensure_future(anext(trigger.run()))
        for stuck, told in ((True, "opened"), (False, "recovered")):
            with processes.repeated(partial(step, stuck=stuck), 0.1):
                await asyncio.to_thread(processes.wait_until, lambda told=told: told in str(mailbox.subjects), told)
        control.end(epoch, Receipt(time=time.time(), clean=True, cause="stopped"))
        await asyncio.wait_for(firing, 60)

    asyncio.run(follow())
    assert mailbox.subjects == [f"[tideline] {what}: {stalled_key('rolling_sum')}" for what in ("opened", "recovered")]
    assert "/tideline/streams/stream_rolling_sum" in mailbox.body(0)


# -- The notifier --


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("no memory"), "ValueError: no memory"),
        (Refusal("the topic is gone: create it"), "the topic is gone: create it"),
        (AirflowFailException("the slice is blocked"), "the slice is blocked"),
        (KeyError(), "KeyError"),
        (None, "its process ended without an error message: see the log of the task"),
        (ValueError("x" * 5000), "ValueError: " + "x" * (1000 - len("ValueError: "))),
    ],
    ids=["an error", "a refusal", "a failure", "without words", "killed", "long"],
)
def test_an_error_is_a_sentence(error: Exception | None, words: str) -> None:
    assert _sentence(error) == words


def happens(lake: Path, event: Event, monkeypatch: pytest.MonkeyPatch, reason: str) -> dict[str, str]:
    """The open incidents after a run of a DAG ended; the context has no task, as Airflow's has none in this case."""
    monkeypatch.setenv("LAKE_ROOT", str(lake))
    IncidentNotifier(event)({"dag": DAG("recompute_sums", schedule=None), "run_id": "run 1", "reason": reason})
    return {one.key: one.text for one in Incidents.of(lake).all() if not one.closed}


def test_a_run_that_fails_without_a_task_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = happens(tmp_path, Event.RUN_FAILED, monkeypatch, "timed_out")
    assert told == {failed_run_key("recompute_sums"): "recompute_sums failed: run run 1: timed out"}
    (incident,) = Incidents.of(tmp_path).all()
    assert str(incident.link).endswith("/dags/recompute_sums/runs/run%201")


def test_a_success_ends_what_was_wrong_with_its_dag_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    incidents = Incidents.of(tmp_path)
    for key in (
        failed_run_key("recompute_sums"),
        missed_deadline_key("recompute_sums"),
        failed_run_key("other"),
        crash_loop_key("x"),
    ):
        incidents.open(key, TEXT)
    assert set(happens(tmp_path, Event.RUN_SUCCEEDED, monkeypatch, "success")) == {
        failed_run_key("other"),
        crash_loop_key("x"),
    }


def missed(lake: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> list[tuple[str, str]]:
    run = {"dag_id": "recompute_sums", "dag_run_id": "run 1", "queued_at": "12:00", "state": state}
    context: Any = {"dag_run": run, "deadline": {"deadline_time": "13:00"}}
    monkeypatch.setenv("LAKE_ROOT", str(lake))
    callback = defaults.deadline(60).callback
    assert callback.path == f"{IncidentNotifier.__module__}.{IncidentNotifier.__qualname__}"

    async def as_the_triggerer_does() -> None:
        await IncidentNotifier(**json.loads(json.dumps(callback.kwargs)), context=context)

    asyncio.run(as_the_triggerer_does())
    return [(one.key, one.text) for one in Incidents.of(lake).all() if not one.closed]


def test_a_missed_deadline_names_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert defaults.deadline(60).interval == timedelta(hours=1)
    assert missed(tmp_path, monkeypatch, "running") == [
        (
            missed_deadline_key("recompute_sums"),
            "recompute_sums is late: run run 1, queued at 12:00, should have ended by 13:00 and is still running",
        )
    ]


def test_a_run_that_failed_in_time_has_missed_no_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert missed(tmp_path, monkeypatch, "failed") == []


# -- Through Airflow --

_TRIAL = f"""
from pathlib import Path
from airflow.sdk import DAG, BaseOperator
from airflow.sdk.exceptions import AirflowFailException
from jobs.control.incidents import Incidents
from jobs.settings import Settings
from tideline_airflow.scheduling.defaults import ALERTS, DEFAULT_ARGS
from tideline_airflow.notifiers.incident import AlreadyTold

class Blocked(AlreadyTold, AirflowFailException):
    pass

class Trial(BaseOperator):
    def execute(self, context):
        trouble = context["dag_run"].conf.get(self.task_id)
        if trouble == "blocked":
            Incidents.of(Settings.from_env().lake_root).open({KEY!r}, {TEXT!r}, link={LINK!r})
            raise Blocked("the slice is blocked")
        if trouble:
            raise ValueError(trouble)

with DAG("trial", schedule=None, default_args={{**DEFAULT_ARGS, "retries": 0}}, **ALERTS):
    Trial(task_id="one") >> Trial(task_id="two")

# A task that is killed has no callback of its own either.
with DAG("silent", schedule=None, default_args={{"owner": "tideline"}}, **ALERTS):
    Trial(task_id="one")
"""


@pytest.fixture
def airflow(tmp_path: Path) -> Iterator[Run]:
    """Runs the trial DAG in an Airflow of its own."""
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags" / "trial.py").write_text(_TRIAL)
    env = {
        **os.environ,
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "LAKE_ROOT": str(tmp_path / "lake"),
    }
    with (tmp_path / "log").open("wb") as sink:
        command = [sys.executable, "-m", "airflow", "db", "migrate"]
        subprocess.run(command, env=env, stderr=sink, stdout=sink, check=True)
        command = [sys.executable, str(PROJECT / "tests" / "integration" / "dag_runner.py")]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": sink, "text": True}
        with subprocess.Popen(command, env=env, **pipes) as process:
            assert process.stdin
            assert process.stdout

            def run(dag_id: str = "trial", **conf: str) -> str:
                request = {"folder": str(tmp_path / "dags"), "dag_id": dag_id, "conf": conf, "env": {}}
                print(json.dumps(request), file=process.stdin, flush=True)
                answer = process.stdout.readline()
                assert answer, (tmp_path / "log").read_text()[-5000:]
                return str(json.loads(answer)["state"])

            yield run
            process.stdin.close()


@pytest.mark.integration
@pytest.mark.usefixtures("connected")
def test_a_failing_dag_is_one_message_and_its_success_another(
    airflow: Run, mailbox: Mailbox, hooks: Hooks, tmp_path: Path
) -> None:
    assert [airflow(one="the disk is full"), airflow(two="it is full"), airflow(), airflow()] == [
        *["failed"] * 2,
        *["success"] * 2,
    ]
    assert (
        mailbox.subjects == hooks.titles == [f"[tideline] {what}: dag.trial.failed" for what in ("opened", "recovered")]
    )
    opened, recovered = (said["message"] for said in hooks.said)
    assert re.search(r"^trial failed: task one of run \S+: ValueError: the disk is full\n", opened)
    assert re.search(r"/dags/trial/runs/\S+/tasks/one\?try_number=1$", opened)
    assert re.search(r"^run \S+ of trial succeeded\nThe problem was: trial failed: task one of run ", recovered)

    assert airflow(one="blocked") == "failed"
    assert mailbox.subjects[2:] == [f"[tideline] opened: {KEY}"], "what is told already is told once"
    assert hooks.said[2]["message"].endswith(LINK)

    assert airflow("silent", one="killed") == "failed"
    assert mailbox.subjects[3:] == ["[tideline] opened: dag.silent.failed"]
    assert "task one of run" in hooks.said[3]["message"]
    assert "its process ended without an error message" in hooks.said[3]["message"]
    log = (tmp_path / "log").read_text()
    assert PASSWORD not in log
    assert "Callback failed" not in log
