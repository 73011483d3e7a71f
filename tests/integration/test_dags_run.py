"""The DAGs run, on an Airflow of their own and a real broker."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs import pipelines
from jobs.broker.kafka import admin, describe
from jobs.control.epochs import LOOP_FAILURES, Owner, Receipt
from jobs.control.folder import Control
from jobs.control.incidents import Incidents
from jobs.settings import PROJECT, KafkaSettings

pytestmark = pytest.mark.integration

PASSWORD = "seen-by-the-driver-only"
Run = Callable[..., dict[str, Any]]


def provision(run: Run) -> dict[str, Any]:
    return run("provision_topics")


def test_topics_are_planned_then_applied_and_the_run_says_so(run: Run, kafka: KafkaSettings) -> None:
    wanted = {topic.name for topic in pipelines.topics()}
    first = provision(run)
    assert first["tasks"] == {"plan": "success", "apply": "success"}
    assert {row["topic"]: row["action"] for row in first["xcoms"]["plan.plan"]} == dict.fromkeys(wanted, "create")
    assert "│ numbers            │ create │" in first["log"]
    assert first["note"].startswith(f"Plan: {len(wanted)} create")
    assert "| numbers | create |" in first["note"]
    assert set(describe(kafka, wanted)) == wanted
    assert provision(run)["note"].startswith(f"Plan: {len(wanted)} keep")


def test_a_refused_plan_fails_the_run_before_anything_is_applied(run: Run, kafka: KafkaSettings) -> None:
    provision(run)
    with admin(kafka) as client:
        client.create_partitions({"lines": 5})
        client.delete_topics(["clicks"])
    refused = provision(run)
    assert refused["tasks"] == {"plan": "failed", "apply": "upstream_failed"}
    assert "| lines | refuse | partitions 5 → 3 would delete records" in refused["note"]
    assert not describe(kafka, ["clicks"])
    with admin(kafka) as client:
        client.delete_topics(["lines"])
    assert provision(run)["state"] == "success"


def test_traffic_reaches_the_topics_that_were_chosen(run: Run, kafka: KafkaSettings) -> None:
    provision(run)
    before = describe(kafka, ["numbers", "clicks", "orders"])
    conf = {"sources": ["numbers", "clicks"], "rate": 500, "seconds": 2, "late": 0, "duplicate": 0, "corrupt": 0}
    done = run("generate_demo_traffic", conf)
    assert done["tasks"] == {"generate": "success"}, done["log"][-5000:]
    after = describe(kafka, ["numbers", "clicks", "orders"])
    sent = {name: sum(after[name].latest.values()) - sum(before[name].latest.values()) for name in after}
    assert sent == {"numbers": 1000, "clicks": 1000, "orders": 0}


@pytest.mark.spark
def test_a_stream_gets_kafka_as_environment_and_spark_as_configuration(run: Run, tmp_path: Path) -> None:
    job, seen = tmp_path / "job.py", tmp_path / "seen.json"
    job.write_text(_PROBE)
    login = {"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN"}
    secured = {"conn_type": "tideline_kafka", "host": "b:1", "login": "u", "password": PASSWORD, "extra": login}
    done = run(
        "probe",
        AIRFLOW_CONN_TIDELINE_KAFKA=json.dumps(secured),
        PROBE=str(job),
        PROBE_SEEN=str(seen),
        LAKE_ROOT=str(tmp_path / "lake"),
        SPARK_DRIVER_MEMORY="600m",
        PATH="/usr/bin:/bin",
    )
    assert done["state"] == "success", done["log"][-5000:]
    driver = json.loads(seen.read_text())
    assert driver["arguments"] == ["live", "word_count"]
    assert KafkaSettings.from_env(driver["environment"]) == KafkaSettings(
        bootstrap="b:1", security_protocol="SASL_SSL", sasl_mechanism="PLAIN", username="u", password=PASSWORD
    )
    assert driver["python"] == sys.executable
    assert driver["environment"]["SPARK_MASTER"] == "local[1]"
    assert driver["session"] == driver["launched"], "a process session of its own"
    assert not [name for name in driver["environment"] if "AIRFLOW" in name]
    java = " ".join(driver["launcher"])
    assert "-Xmx600m" in java
    assert "delta-spark" in java
    assert PASSWORD not in java
    assert PASSWORD not in done["log"]
    ended = done["xcoms"]["run.return_value"]
    assert (ended["epoch"], ended["clean"], ended["cause"]) == (1, True, "seen")
    links = {name.removeprefix("run._link_"): at for name, at in done["xcoms"].items() if "_link_" in name}
    assert set(links) == {"StreamLink", "DriverLogLink", "SparkUiLink"}


@pytest.mark.spark
def test_a_driver_that_refuses_fails_the_task_with_its_sentence(run: Run, tmp_path: Path) -> None:
    job, lake = tmp_path / "job.py", tmp_path / "lake"
    job.write_text("print('tideline: the reason and the way out'); exit(1)")
    done = run("probe", PROBE=str(job), LAKE_ROOT=str(lake))
    assert done["state"] == "failed"
    assert "the driver did not start: " in done["log"]
    assert "the last line of its log: tideline: the reason and the way out" in done["log"]
    assert [incident.key for incident in Incidents.of(lake).all()] == []


@pytest.mark.spark
def test_a_crash_loop_fails_at_once_and_opens_one_incident(run: Run, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    control = Control.of(lake, "word_count")
    for _ in range(LOOP_FAILURES):
        failed = Receipt(time=0.0, clean=False, cause="the disk is full")
        control.end(control.reserve(Owner.this_process()), failed)
    job = tmp_path / "job.py"
    job.write_text("exit(1)")
    for _ in range(2):
        done = run("probe", PROBE=str(job), LAKE_ROOT=str(lake), PROBE_RETRIES="3")
        assert done["state"] == "failed", done["log"][-3000:]
        # Long ago, so that the next start need not wait.
        newest = f"receipt-{control.newest():010d}"
        control.documents.replace(newest, {**(control.documents.read(newest) or {}), "time": 0.0})
    way_out = "remove the cause, then run `tideline streams restart word_count`"
    assert f"It has failed 7 times in a row: {way_out}" in done["log"]
    (incident,) = Incidents.of(lake).all()
    assert (incident.key, incident.closed) == ("stream.word_count.crash-loop", False)
    assert incident.text.startswith("stream word_count fails again and again: the driver did not start: ")
    assert incident.text.endswith(f"; {way_out}")


_PROBE = f"""
import json, os, pathlib, sys, time
sys.path.insert(0, {str(PROJECT)!r})
from jobs.control.folder import Control
from jobs.control.lease import Lease
from jobs.control.epochs import Receipt
from jobs.settings import Settings
lease = Lease.acquire(Control.of(Settings.from_env().lake_root, "word_count"))
launcher = pathlib.Path(f"/proc/{{os.getppid()}}/cmdline").read_bytes().decode().split(chr(0))
seen = dict(arguments=sys.argv[1:], environment=dict(os.environ), python=sys.executable, launcher=launcher)
seen |= dict(session=os.getsid(0), launched=os.getppid())
pathlib.Path(os.environ["PROBE_SEEN"]).write_text(json.dumps(seen))
lease.release(Receipt(time=time.time(), clean=True, cause="seen"))
"""
