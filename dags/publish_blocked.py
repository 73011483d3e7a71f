"""Publishes a slice although its checks failed, after a person has approved it.

**Tasks.** `show` lists the failed checks. `approve` waits until a person decides: *Browse → Required Actions*, or the
task's own page. `publish` publishes exactly the rows that were audited. The ledger records who approved it, and why.

**Params.** `pipeline` and `slice`, as the incident and the failed audit name them.

**Example.** `pipeline="rolling_sum", slice="20260131T120000Z"`.

**Recovery.** Trigger it again. The rows of a blocked slice are kept for seven days; after that restate the slice.

**Triage.**
- *is not blocked*: the slice was restated meanwhile, or the name belongs to another slice.
- *was computed again since it was shown*: look at the new verdict first.
"""

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import DAG, Param

from jobs.pipelines import PIPELINES
from tideline_airflow.operators.slices import PublishBlockedOperator, ShowBlockedOperator
from tideline_airflow.scheduling.defaults import ALERTS, DEFAULT_ARGS, TAG

PARAMS = {
    "pipeline": Param(next(iter(PIPELINES)), type="string", title="Pipeline", enum=list(PIPELINES)),
    "slice": Param(
        "20260131T120000Z",
        type="string",
        title="Slice",
        description="Its name is its start.",
        pattern=r"^\d{8}T\d{6}Z$",
    ),
}
_SLICE = {name: f"{{{{ params.{name} }}}}" for name in PARAMS}

with DAG(
    dag_id="publish_blocked",
    description="Publish a slice that its checks have blocked, after approval.",
    doc_md=__doc__,
    default_args=DEFAULT_ARGS,
    tags=[TAG, "recompute"],
    schedule=None,
    is_paused_upon_creation=False,
    params=PARAMS,
    **ALERTS,
):
    show = ShowBlockedOperator(task_id="show", retries=0, **_SLICE)
    approve = ApprovalOperator(
        task_id="approve",
        subject="Publish slice {{ params.slice }} of {{ params.pipeline }} although its checks failed?",
        body="{{ ti.xcom_pull('show')['body'] }}",
        params={"reason": Param("", type="string", title="Reason", description="Why; the ledger keeps it.")},
    )
    publish = PublishBlockedOperator(
        task_id="publish",
        retries=0,
        run="{{ ti.xcom_pull('show')['run'] }}",
        shown="{{ ti.xcom_pull('show')['shown'] }}",
        by="{{ ti.xcom_pull('approve')['responded_by_user']['name'] }}",
        reason="{{ ti.xcom_pull('approve')['params_input']['reason'] }}",
        **_SLICE,
    )
    show >> approve >> publish
