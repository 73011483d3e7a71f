"""The one notifier: it makes incidents of failed tasks and runs and of missed deadlines, and has all incidents told.

A DAG file is to parse quickly, so whatever is needed to do so is imported when it happens.
"""

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import BaseNotifier, Context, conf

if TYPE_CHECKING:
    from jobs.control.incidents import Incidents

_TASK_FAILED = "task_failure"
_OVER = ("success", "failed")
_TEXT_LENGTH = 1000


class AlreadyTold(Exception):
    """Raised, beside its own kind, by code that has opened an incident itself: the failure opens no other."""


class Event(StrEnum):
    """What a notifier is called for."""

    TASK_FAILED = "task failed"
    RUN_FAILED = "run failed"
    RUN_SUCCEEDED = "run succeeded"
    DEADLINE_MISSED = "deadline missed"


class IncidentNotifier(BaseNotifier):
    """Opens or closes the incident that an event of a DAG means, then sends whatever has yet to be said."""

    def __init__(self, event: str, context: Context | None = None) -> None:
        """The context is given where Airflow awaits it."""
        super().__init__(context)
        self.event = Event(event)

    def notify(self, context: Context) -> None:
        """In the process of the task, or in the DAG processor."""
        from jobs.control.incidents import Incidents
        from jobs.control.room import Room
        from jobs.settings import Settings
        from tideline_airflow.notifiers.delivery import deliver

        lake_root = Settings.from_env().lake_root
        try:
            # All that fails or is late on a full disk has one cause, which is one incident.
            known = self.event is not Event.RUN_SUCCEEDED and Room.of(lake_root).is_short()
            self._keep(Incidents.of(lake_root), dict(context), known=known)
        finally:
            deliver(lake_root)

    async def async_notify(self, context: Context) -> None:
        """In the triggerer, whose loop serves others too."""
        await asyncio.to_thread(self.notify, context)

    def render_template_fields(self, context: Context, jinja_env: Any = None) -> None:
        """There is none; and a DAG that comes from Airflow's database has no templates to ask for."""

    def _keep(self, incidents: "Incidents", context: dict[str, Any], *, known: bool) -> None:
        """``known``: another incident tells the cause."""
        match self.event:
            case Event.TASK_FAILED:
                _task_failed(incidents, context, known=known)
            case Event.RUN_SUCCEEDED:
                _run_succeeded(incidents, context)
            case Event.RUN_FAILED if not known:
                _run_failed(incidents, context)
            case Event.DEADLINE_MISSED if not known:
                _deadline_missed(incidents, context)


def page(path: str) -> str:
    """The address of a page of Airflow's."""
    return f"{conf.get('api', 'base_url', fallback='').rstrip('/')}/{path.lstrip('/')}"


def _task_failed(incidents: "Incidents", context: dict[str, Any], *, known: bool) -> None:
    from jobs.control.incident import failed_run

    task, error = context["ti"], context.get("exception")
    if not known and not isinstance(error, AlreadyTold):
        text = f"{task.dag_id} failed: task {task.task_id} of run {task.run_id}: {_sentence(error)}"
        incidents.open(failed_run(task.dag_id), text, link=task.log_url)
    incidents.note_failure(task.dag_id, task.run_id)


def _run_failed(incidents: "Incidents", context: dict[str, Any]) -> None:
    """What no task has said: one was killed, which calls nothing back, or the run took too long."""
    from jobs.control.incident import failed_run

    dag_id, run_id, task = context["dag"].dag_id, _run_id(context), context.get("ti")
    reason = str(context.get("reason"))
    if reason != _TASK_FAILED or task is None:
        text = f"{dag_id} failed: run {run_id}: {reason.replace('_', ' ')}"
        incidents.open(failed_run(dag_id), text, link=_run_page(dag_id, run_id))
    elif not incidents.knows_failure(dag_id, run_id):
        text = f"{dag_id} failed: task {task.task_id} of run {run_id}: {_sentence(None)}"
        incidents.open(failed_run(dag_id), text, link=task.log_url)


def _run_succeeded(incidents: "Incidents", context: dict[str, Any]) -> None:
    from jobs.control.incident import failed_run, missed_deadline

    dag_id = context["dag"].dag_id
    for key in (failed_run(dag_id), missed_deadline(dag_id)):
        incidents.close(key, f"run {_run_id(context)} of {dag_id} succeeded")


def _deadline_missed(incidents: "Incidents", context: dict[str, Any]) -> None:
    """Airflow tells the run as its API would, and the deadline."""
    from jobs.control.incident import missed_deadline

    run, deadline = context["dag_run"], context["deadline"]
    dag_id, run_id = run["dag_id"], run["dag_run_id"]
    if run["state"] in _OVER:
        # Airflow forgets the deadline of a run that succeeded; one that failed has an incident already.
        return
    text = (
        f"{dag_id} is late: run {run_id}, queued at {run['queued_at']}, was to be over by "
        f"{deadline['deadline_time']} and is {run['state']}"
    )
    incidents.open(missed_deadline(dag_id), text, link=_run_page(dag_id, run_id))


def _run_id(context: dict[str, Any]) -> str:
    return str(context["run_id"])


def _run_page(dag_id: str, run_id: str) -> str:
    return page(f"dags/{dag_id}/runs/{quote(run_id)}")


def _sentence(error: object) -> str:
    """What an error says, without secrets that Airflow knows; its kind, where its text is not meant for the user."""
    from airflow.sdk.exceptions import AirflowException
    from airflow.sdk.log import redact  # type: ignore[attr-defined]

    from jobs.refusal import Refusal

    if error is None:
        return "its process ended without a word; the log may say more"
    words = str(error).strip()
    meant = bool(words) and isinstance(error, Refusal | AirflowException | str)
    told = words if meant else f"{type(error).__name__}: {words}".rstrip(": ")
    return str(redact(told))[:_TEXT_LENGTH]
