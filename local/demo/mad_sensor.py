"""`tideline demo --break`: a sensor sends impossible readings, its slice is blocked, and an alert is sent."""

import json
import time
from datetime import UTC, datetime

from kafka import KafkaProducer
from rich.console import Console

from jobs.broker.kafka import client_options
from jobs.control.incident import Incident, blocked_key
from jobs.control.incidents import Incidents
from jobs.pipelines import PIPELINES
from jobs.pipelines.slices import Slice, slice_at
from jobs.query.lake import Lake
from jobs.refusal import Refusal
from jobs.settings import KafkaSettings
from local.demo.run import FINAL
from local.platform.stack import Stack
from local.steps import Tell, step

_RECORDS = 20
_READING = 999_999_999_999
_SECONDS = 900
_TOLD_SECONDS = 20


def run(stack: Stack, console: Console) -> None:
    """Send readings that no sensor can make, and wait until their slice is blocked. The platform must run."""
    lake, pipeline = Lake(stack.settings.jobs.lake_root), PIPELINES[FINAL]
    with stack.airflow.api() as api:
        if (api.dags(pipeline.recompute_job).get(pipeline.recompute_job) or {"is_paused": True})["is_paused"]:
            raise Refusal(f"the DAG {pipeline.recompute_job} is missing or paused: run `tideline demo` first")
    with step(console, f"{_RECORDS} readings of {_READING:,} from one sensor"):
        slice_ = _send(stack.settings.jobs.kafka)
    with step(console, f"Audit of slice {slice_.name}", "two to four minutes") as tell:
        incident = _wait(stack, lake, slice_, tell)
    console.print("\n[bold red]Blocked.[/bold red] Its live rows stay, and other slices become final.")
    console.print(incident.text, highlight=False)
    _show(stack, console, lake, slice_, incident)


def _send(kafka: KafkaSettings) -> Slice:
    """Send all readings in one window, so in one slice."""
    now_ms = round(time.time() * 1000)
    with KafkaProducer(**client_options(kafka)) as producer:
        for number in range(_RECORDS):
            value = {"id": -number, "ts": now_ms, "value": _READING}
            producer.send("numbers", json.dumps(value).encode(), key=b"broken-sensor")
        producer.flush()
    return slice_at(PIPELINES[FINAL], now_ms)


def _wait(stack: Stack, lake: Lake, slice_: Slice, tell: Tell) -> Incident:
    """Wait until the audit has blocked the slice."""
    deadline, key = time.monotonic() + _SECONDS, blocked_key(FINAL, slice_.name)
    while time.monotonic() < deadline:
        for incident in Incidents.of(stack.settings.jobs.lake_root).still_open(key):
            return incident
        rows = lake.query(f"SELECT state FROM slices_{FINAL} WHERE slice = '{slice_.name}'").to_pylist()
        ends = f"the slice ends in {max(0, round((slice_.end - datetime.now(UTC)).total_seconds()))} s"
        tell(rows[0]["state"] if rows else f"{ends}, and is over a minute later")
        time.sleep(1)
    raise Refusal(
        f"slice {slice_.name} was not blocked within {_SECONDS} s: see the runs of {PIPELINES[FINAL].recompute_job}"
    )


def _is_told(stack: Stack, incident: Incident) -> bool:
    """Whether the alert was sent. It is sent after the task that opened the incident has ended."""
    deadline = time.monotonic() + _TOLD_SECONDS
    while time.monotonic() < deadline:
        if any(now.told for now in Incidents.of(stack.settings.jobs.lake_root).still_open(incident.key)):
            return True
        time.sleep(1)
    return False


def _show(stack: Stack, console: Console, lake: Lake, slice_: Slice, incident: Incident) -> None:
    sql = f"SELECT docs FROM ledger_{FINAL} WHERE slice = '{slice_.name}' AND state = 'blocked'"
    docs = lake.query(sql).to_pylist()[0]["docs"]
    anyway = f"{stack.settings.airflow_url}/dags/publish_blocked"
    told = "sent" if _is_told(stack, incident) else "not sent: no channel is set up, or none answers (docs/alerts.md)"
    for name, value in (
        ("Alert", f"{incident.key}, {told}"),
        ("Incidents", 'tideline query "select * from incidents"'),
        ("Data Docs", incident.link or ""),
        ("File", str(stack.settings.jobs.lake_root / docs)),
        ("Publish it anyway", f"{anyway} (pipeline {FINAL}, slice {slice_.name})"),
    ):
        console.print(f"[bold]{name}[/bold]  {value}", soft_wrap=True, highlight=False)
