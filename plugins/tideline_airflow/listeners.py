"""Shows a task's summary on its run: when the run ends, the XCom `run_note` becomes the run's note."""

from typing import TYPE_CHECKING

from airflow.listeners import hookimpl

if TYPE_CHECKING:
    from airflow.models.dagrun import DagRun

RUN_NOTE = "run_note"
RUN_NOTE_LENGTH = 1000


@hookimpl
def on_dag_run_success(dag_run: "DagRun", msg: str) -> None:
    """Copy the note of a run that succeeded."""
    show(dag_run)


@hookimpl
def on_dag_run_failed(dag_run: "DagRun", msg: str) -> None:
    """Copy the note of a run that failed; it may give the reason."""
    show(dag_run)


def show(dag_run: "DagRun") -> None:
    """Copy the newest note of the run's tasks, unless the run has a note, such as a person's.

    It runs in the scheduler, in the scheduler's session.
    """
    from airflow.models.xcom import XComModel
    from sqlalchemy.orm import object_session

    session = object_session(dag_run)
    if session is None or dag_run.note:
        return
    query = XComModel.get_many(run_id=dag_run.run_id, dag_ids=dag_run.dag_id, key=RUN_NOTE, limit=1)
    newest = session.scalars(query).first()
    if newest is not None:
        dag_run.note = str(XComModel.deserialize_value(newest))[:RUN_NOTE_LENGTH]
