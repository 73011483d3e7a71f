"""Start and follow a DAG run for a command that changes state, and report a failure in the words of its tasks."""

from collections.abc import Callable, Mapping
from typing import Any

from jobs.airflow_api.client import AirflowApi
from jobs.refusal import Refusal

_FAILED = "Task failed with exception: "


def run(
    api: AirflowApi, dag_id: str, conf: Mapping[str, Any], report: Callable[[str], None], deadline_seconds: float
) -> str:
    """Start a run, wait for its end and return its id. A failed run raises a `Refusal` with its tasks' sentences."""
    _require_running(api, dag_id)
    run_id, line = api.trigger(dag_id, conf), ""

    def report_change(state: str) -> None:
        nonlocal line
        if line != (line := _progress(api, dag_id, run_id, state)):
            report(line)

    if api.wait_for_run(dag_id, run_id, deadline_seconds, report_change) == "failed":
        raise Refusal(f"{dag_id} failed: {failure(api, dag_id, run_id)}")
    return run_id


def failure(api: AirflowApi, dag_id: str, run_id: str) -> str:
    """Why a run failed, in the words of its tasks."""
    failed = [task for task in api.task_instances(dag_id, run_id) if task["state"] == "failed"]
    reasons = []
    for task in failed:
        log = api.task_log(dag_id, run_id, task["task_id"], task["try_number"])
        lines = [line.removeprefix(_FAILED) for line in log.splitlines() if line.startswith(_FAILED)]
        reasons.append(f"{task['task_id']}: {lines[-1].partition(': ')[2] if lines else 'see its log'}")
    return "; ".join(reasons) or f"see run {run_id} on {api.pages}"


def _require_running(api: AirflowApi, dag_id: str) -> None:
    dag = api.dags(dag_id).get(dag_id)
    if dag is None:
        why = api.import_errors() or "if Airflow has just started, wait until it has read its DAG files"
        raise Refusal(f"Airflow does not know the DAG {dag_id}: {why}")
    if dag["is_paused"]:
        raise Refusal(f"the DAG {dag_id} is paused, so it starts no run: unpause it on {api.pages}/dags/{dag_id}")


def _progress(api: AirflowApi, dag_id: str, run_id: str, state: str) -> str:
    """The tasks of a run that are running now, or else its state, which is `queued` while another run is under way."""
    if state == "queued":
        return "queued"
    under_way = [task["task_id"] for task in api.task_instances(dag_id, run_id) if task["state"] == "running"]
    return ", ".join(under_way) or state
