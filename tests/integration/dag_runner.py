"""Runs DAGs as `airflow dags test` does, one for each line of JSON on stdin.

Airflow is slow to start, so it starts only once.

A request names a DAG, its conf and environment. The answer is a line of JSON on the
original stdout; logs go to stderr.
"""

import json
import os
import sys
from typing import Any

answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

from airflow.dag_processing.dagbag import DagBag  # noqa: E402 - it logs to stdout as soon as it is imported
from airflow.listeners.listener import get_listener_manager  # noqa: E402
from airflow.models.dagrun import DagRun  # noqa: E402
from airflow.models.xcom import XComModel  # noqa: E402
from airflow.utils.session import create_session  # noqa: E402


def run(folder: str, dag_id: str, conf: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
    """The state, the note, the tasks and the XComs of one run."""
    os.environ.update(env)
    dag = DagBag(dag_folder=folder).dags[dag_id]
    # Airflow 3.3 cannot test a DAG with a deadline: it uses the deadline's description as its id.
    dag.deadline = None
    run = dag.test(run_conf=conf)
    with create_session() as session:
        stored = session.get(DagRun, run.id)
        # A test run has no session when it ends, so the listener ignores it. A run of the scheduler has one.
        get_listener_manager().hook.on_dag_run_success(dag_run=stored, msg="")
        xcoms = session.scalars(XComModel.get_many(run_id=run.run_id, dag_ids=dag_id)).all()
        return {
            "state": str(stored.state),
            "note": stored.note,
            "tasks": {task.task_id: str(task.state) for task in stored.get_task_instances(session=session)},
            "xcoms": {f"{xcom.task_id}.{xcom.key}": XComModel.deserialize_value(xcom) for xcom in xcoms},
        }


for line in sys.stdin:
    answers.write(json.dumps(run(**json.loads(line))) + "\n")
