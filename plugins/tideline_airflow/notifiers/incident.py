"""The notifier: it opens incidents for failed tasks, failed runs and missed deadlines, and sends all due messages.

A DAG file must parse quickly, so the modules for this are imported only when an event happens.
"""

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import BaseNotifier, Context

from tideline_airflow.links import page

if TYPE_CHECKING:
    from jobs.control.incidents import Incidents

_TASK_FAILED = "task_failure"
_OVER = ("success", "failed")
_TEXT_LENGTH = 1000


class AlreadyTold(Exception):
    """The second base class of an error whose incident is open already. The notifier opens no other incident for it."""


class Event(StrEnum):
    """The events that call the notifier."""

    TASK_FAILED = "task failed"
    RUN_FAILED = "run failed"
    RUN_SUCCEEDED = "run succeeded"
    DEADLINE_MISSED = "deadline missed"


class IncidentNotifier(BaseNotifier):
    """Opens or closes the incident for an event of a DAG, then sends all messages that are due."""

    def __init__(self, event: str, context: Context | None = None) -> None:
        """Airflow passes the context only where it awaits the notifier."""
        super().__init__(context)
        self.event = Event(event)

    def notify(self, context: Context) -> None:
        """Called in the process of the task, or in the DAG processor."""
        from jobs.control.incidents import Incidents
        from jobs.control.room import Room
        from jobs.settings import Settings
        from tideline_airflow.notifiers.delivery import deliver

        lake_root = Settings.from_env().lake_root
        try:
            # On a full disk, all failures and delays have one cause, and that cause has an incident of its own.
            known = self.event is not Event.RUN_SUCCEEDED and Room.of(lake_root).is_short()
            self._keep(Incidents.of(lake_root), dict(context), known=known)
        finally:
            deliver(lake_root)

    async def async_notify(self, context: Context) -> None:
        """Called in the triggerer. A thread does the work, because the triggerer's loop serves other triggers too."""
        await asyncio.to_thread(self.notify, context)

    def render_template_fields(self, context: Context, jinja_env: Any = None) -> None:
        """Do nothing: there are no such fields, and a DAG from Airflow's database has no template environment."""

    def _keep(self, incidents: "Incidents", context: dict[str, Any], *, known: bool) -> None:
        """Open or close incidents. ``known``: another incident covers the cause, so failures and delays open none."""
        match self.event:
            case Event.TASK_FAILED:
                _task_failed(incidents, context, known=known)
            case Event.RUN_SUCCEEDED:
                _run_succeeded(incidents, context)
            case Event.RUN_FAILED if not known:
                _run_failed(incidents, context)
            case Event.DEADLINE_MISSED if not known:
                _deadline_missed(incidents, context)


def _task_failed(incidents: "Incidents", context: dict[str, Any], *, known: bool) -> None:
    from jobs.control.incident import failed_run_key

    task, error = context["ti"], context.get("exception")
    if not known and not isinstance(error, AlreadyTold):
        text = f"{task.dag_id} failed: task {task.task_id} of run {task.run_id}: {_sentence(error)}"
        incidents.open(failed_run_key(task.dag_id), text, link=task.log_url)
    incidents.note_failure(task.dag_id, task.run_id)


def _run_failed(incidents: "Incidents", context: dict[str, Any]) -> None:
    """Open an incident that no task has opened: the task was killed, so no callback ran, or the run took too long."""
    from jobs.control.incident import failed_run_key

    dag_id, run_id, task = context["dag"].dag_id, str(context["run_id"]), context.get("ti")
    reason = str(context.get("reason"))
    if reason != _TASK_FAILED or task is None:
        text = f"{dag_id} failed: run {run_id}: {reason.replace('_', ' ')}"
        incidents.open(failed_run_key(dag_id), text, link=_run_page(dag_id, run_id))
    elif not incidents.knows_failure(dag_id, run_id):
        text = f"{dag_id} failed: task {task.task_id} of run {run_id}: {_sentence(None)}"
        incidents.open(failed_run_key(dag_id), text, link=task.log_url)


def _run_succeeded(incidents: "Incidents", context: dict[str, Any]) -> None:
    from jobs.control.incident import failed_run_key, missed_deadline_key

    dag_id = context["dag"].dag_id
    for key in (failed_run_key(dag_id), missed_deadline_key(dag_id)):
        incidents.close(key, f"run {context['run_id']} of {dag_id} succeeded")


def _deadline_missed(incidents: "Incidents", context: dict[str, Any]) -> None:
    """Airflow passes the run in the form of its API, and the deadline."""
    from jobs.control.incident import missed_deadline_key

    run, deadline = context["dag_run"], context["deadline"]
    dag_id, run_id = run["dag_id"], run["dag_run_id"]
    if run["state"] in _OVER:
        # Airflow drops the deadline of a run that succeeded; a run that failed has an incident already.
        return
    text = (
        f"{dag_id} is late: run {run_id}, queued at {run['queued_at']}, should have ended by "
        f"{deadline['deadline_time']} and is still {run['state']}"
    )
    incidents.open(missed_deadline_key(dag_id), text, link=_run_page(dag_id, run_id))


def _run_page(dag_id: str, run_id: str) -> str:
    return page(f"/dags/{dag_id}/runs/{quote(run_id)}")


def _sentence(error: object) -> str:
    """The text of an error, with Airflow's secrets masked; with its type if the text is not written for users."""
    from airflow.sdk.exceptions import AirflowException
    from airflow.sdk.log import redact  # type: ignore[attr-defined]

    from jobs.refusal import Refusal

    if error is None:
        return "its process ended without an error message: see the log of the task"
    words = str(error).strip()
    meant = bool(words) and isinstance(error, Refusal | AirflowException | str)
    told = words if meant else f"{type(error).__name__}: {words}".rstrip(": ")
    return str(redact(told))[:_TEXT_LENGTH]
