"""What all DAGs have in common."""

import os
from datetime import timedelta
from typing import Any

from airflow.sdk.definitions.callback import AsyncCallback
from airflow.sdk.definitions.deadline import DeadlineAlert, DeadlineReference

from tideline_airflow.first_come import FirstCome
from tideline_airflow.notifiers.incident import Event, IncidentNotifier

OWNER = "tideline"
TAG = "tideline"
# Where Spark jobs of the batch take their slots, in turn; the embedded platform has pools as large as the machine. An
# account has its own: it holds up no publish, and publishes, which may come each minute, do not hold it up for ever.
IN_RECOMPUTE_POOL: dict[str, Any] = {
    "pool": os.environ.get("TIDELINE_RECOMPUTE_POOL") or "default_pool",
    "weight_rule": FirstCome(),
}
IN_ACCOUNT_POOL: dict[str, Any] = {
    "pool": os.environ.get("TIDELINE_ACCOUNT_POOL") or "default_pool",
    "weight_rule": FirstCome(),
}
# A task that is tried again tells nothing: only its last failure counts.
ON_FAILURE: dict[str, Any] = {"on_failure_callback": IncidentNotifier(Event.TASK_FAILED)}
DEFAULT_ARGS: dict[str, Any] = {
    "owner": OWNER,
    "retries": 2,
    "retry_delay": timedelta(seconds=10),
    "retry_exponential_backoff": 2.0,
    "max_retry_delay": timedelta(minutes=5),
    **ON_FAILURE,
}
# For the DAG itself: its runs, which the DAG processor tells of. A success is the recovery.
ALERTS: dict[str, Any] = {
    "on_success_callback": IncidentNotifier(Event.RUN_SUCCEEDED),
    "on_failure_callback": IncidentNotifier(Event.RUN_FAILED),
}


def deadline(minutes: float) -> DeadlineAlert:
    """An incident if a run is not over so long after it was queued; the run goes on."""
    return DeadlineAlert(
        reference=DeadlineReference.DAGRUN_QUEUED_AT,
        interval=timedelta(minutes=minutes),
        callback=AsyncCallback(IncidentNotifier, kwargs={"event": Event.DEADLINE_MISSED.value}),
        name=f"over {minutes:g} minutes after it was queued",
    )
