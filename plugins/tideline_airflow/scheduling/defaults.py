"""Default arguments, pools and alerts that all DAGs share."""

import os
from datetime import timedelta
from typing import Any

from airflow.sdk.definitions.callback import AsyncCallback
from airflow.sdk.definitions.deadline import DeadlineAlert, DeadlineReference

from tideline_airflow.first_come import FirstCome
from tideline_airflow.notifiers.incident import Event, IncidentNotifier

OWNER = "tideline"
TAG = "tideline"


def _in_pool(name: str | None) -> dict[str, Any]:
    return {"pool": name or "default_pool", "weight_rule": FirstCome()}


# Batch Spark jobs take their slots from these pools, in turn. The embedded platform sizes the pools by the machine.
# Accounts have a pool of their own. So they do not hold up publishes. And publishes, which may come each minute, do not
# keep accounts waiting without end.
IN_RECOMPUTE_POOL = _in_pool(os.environ.get("TIDELINE_RECOMPUTE_POOL"))
IN_ACCOUNT_POOL = _in_pool(os.environ.get("TIDELINE_ACCOUNT_POOL"))
# No alert while a task is tried again: only its last failure counts.
ON_FAILURE: dict[str, Any] = {"on_failure_callback": IncidentNotifier(Event.TASK_FAILED)}
DEFAULT_ARGS: dict[str, Any] = {
    "owner": OWNER,
    "retries": 2,
    "retry_delay": timedelta(seconds=10),
    "retry_exponential_backoff": 2.0,
    "max_retry_delay": timedelta(minutes=5),
    **ON_FAILURE,
}
# For the DAG itself: the DAG processor calls these at the end of a run. A success closes the DAG's incidents.
ALERTS: dict[str, Any] = {
    "on_success_callback": IncidentNotifier(Event.RUN_SUCCEEDED),
    "on_failure_callback": IncidentNotifier(Event.RUN_FAILED),
}
# The arguments of every DAG but those of streams.
DAG_ARGS: dict[str, Any] = {"default_args": DEFAULT_ARGS, **ALERTS}


def scheduled(*, deadline_minutes: float) -> dict[str, Any]:
    """`DAG_ARGS`, and for a schedule: one run at a time, no runs for the past, an incident if a run takes too long."""
    return {**DAG_ARGS, "catchup": False, "max_active_runs": 1, "deadline": deadline(deadline_minutes)}


def deadline(minutes: float) -> DeadlineAlert:
    """Open an incident if a run is not over that many minutes after it was queued; the run goes on."""
    return DeadlineAlert(
        reference=DeadlineReference.DAGRUN_QUEUED_AT,
        interval=timedelta(minutes=minutes),
        callback=AsyncCallback(IncidentNotifier, kwargs={"event": Event.DEADLINE_MISSED.value}),
        name=f"over {minutes:g} minutes after it was queued",
    )
