"""What a task says about its run, shown on the run: the XCom `run_note` becomes the run's note when it ends."""

from typing import TYPE_CHECKING

from airflow.listeners import hookimpl

if TYPE_CHECKING:
    from airflow.models.dagrun import DagRun

RUN_NOTE = "run_note"
RUN_NOTE_LENGTH = 1000


@hookimpl
def on_dag_run_success(dag_run: "DagRun", msg: str) -> None:
    """The run did what its note says."""
    show(dag_run)


@hookimpl
def on_dag_run_failed(dag_run: "DagRun", msg: str) -> None:
    """The run did not, and its note may say why."""
    show(dag_run)


def show(dag_run: "DagRun") -> None:
    """Copy the newest note of the run's tasks; what a person wrote stays. Runs in the scheduler, in its session."""
    from airflow.models.xcom import XComModel
    from sqlalchemy.orm import object_session

    session = object_session(dag_run)
    if session is None or dag_run.note:
        return
    query = XComModel.get_many(run_id=dag_run.run_id, dag_ids=dag_run.dag_id, key=RUN_NOTE, limit=1)
    newest = session.scalars(query).first()
    if newest is not None:
        dag_run.note = str(XComModel.deserialize_value(newest))[:RUN_NOTE_LENGTH]
