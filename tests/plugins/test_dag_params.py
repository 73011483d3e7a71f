"""A text that a person types into a form reaches the operator unchanged: it becomes no number, no list and no null."""

from copy import copy
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import DAG

from jobs.pipelines import PIPELINES
from jobs.settings import PROJECT
from tideline_airflow.scheduling.asked_slices import asked

TEXTS = ["2026", "None", "[1]", '{"a":1}', "True", "007", "1_000", "{{ 1 + 1 }}", "'quoted'"]
SLICE = "20260131T120000Z"


@cache
def dag_of(dag_id: str) -> DAG:
    """The DAG of the file with its name."""
    bag = DagBag(dag_folder=str(PROJECT / "dags" / f"{dag_id}.py"))
    assert bag.import_errors == {}
    return bag.dags[dag_id]


def rendered(dag_id: str, task_id: str, conf: dict[str, Any], *, by: str = "ada", **more: Any) -> Any:
    """A task as it is when it is executed."""
    dag = dag_of(dag_id)
    # As in Airflow: the next rendering begins with the templates again.
    task, params = copy(dag.get_task(task_id)), {**dag.params.dump(), **conf}
    run = SimpleNamespace(conf=conf, triggering_user_name=by)
    task.render_template_fields({"params": params, "dag_run": run, "dag": dag, "task": task, **more})
    return task


@pytest.mark.parametrize("text", [*TEXTS, " 007 "])
def test_a_reason_to_roll_back_stays_text(text: str) -> None:
    conf = {"slice": SLICE, "to_version": 2, "reason": text, "apply": True}
    task = rendered("rollback_slice", "roll_back", conf)
    assert (task.reason, task.slice, task.to_version, task.apply) == (text, SLICE, 2, True)
    assert task.pipeline == next(iter(PIPELINES))


@pytest.mark.parametrize("name", TEXTS)
def test_who_asks_stays_text(name: str) -> None:
    assert rendered("rollback_slice", "roll_back", {"slice": SLICE}, by=name).by == name
    assert rendered("control_streams", "control", {}, by=name).by == f"{name} (control_streams)"


@pytest.mark.parametrize("text", TEXTS)
def test_a_reason_to_publish_stays_text(text: str) -> None:
    said = {"responded_by_user": {"name": text}, "params_input": {"reason": text}, "run": text, "shown": text}
    task = rendered("publish_blocked", "publish", {"slice": SLICE}, ti=SimpleNamespace(xcom_pull=lambda _: said))
    assert (task.reason, task.by, task.run, task.shown) == (text, text, text, text)


@pytest.mark.parametrize("text", TEXTS)
def test_a_reason_to_restate_stays_text(text: str) -> None:
    pipeline = PIPELINES["rolling_sum"]
    run = SimpleNamespace(run_id="a run", run_type="manual", partition_key=None, clear_number=0)
    params = {"from": "2026-01-31T12:00:00Z", "to": "2026-01-31T12:05:00Z", "dry_run": False, "reason": text}
    request = asked(pipeline, run, params, tuple).request
    assert request is not None
    assert request.reason == text


def test_what_is_no_text_keeps_its_kind() -> None:
    reset = rendered("reset_stream", "reset", {"job": "ingest", "sources": ["lines"], "timestamp": "2026"})
    assert (reset.sources, reset.timestamp, reset.apply, reset.to) == (["lines"], "2026", False, "earliest")
    control = rendered("control_streams", "control", {"jobs": ["word_count"], "seconds": 7})
    assert (control.jobs, control.seconds, control.action) == (["word_count"], 7, "status")
    assert rendered("control_streams", "control", {}).seconds is None
    traffic = rendered("generate_demo_traffic", "generate", {"late": 0.5, "rate": 7})
    assert (traffic.late, traffic.rate, traffic.sources) == (0.5, 7, ["numbers", "lines"])
