"""Publishes a slice although its checks failed, after a person has approved it.

**Tasks.** `show` lists the failed checks. `approve` waits until a person decides: *Browse → Required Actions*, or the
task's own page. `publish` publishes exactly the rows that were audited. The ledger records who approved it, and why.

**Params.** `pipeline` and `slice`, as the incident and the failed audit name them.

**Example.** `pipeline="rolling_sum", slice="20260131T120000Z"`.

**Recovery.** Trigger it again. The rows of a blocked slice are kept for seven days; after that restate the slice.

**Triage.**
- *is not blocked*: the slice was restated meanwhile, or the name belongs to another slice.
- *was computed again since it was shown*: trigger this DAG again, and read the new failed checks first.
"""

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import DAG, Param

from tideline_airflow.operators.slices import PublishBlockedOperator, ShowBlockedOperator
from tideline_airflow.scheduling.defaults import DAG_ARGS, TAG
from tideline_airflow.scheduling.params import slice_of_pipeline, values_of

with DAG(
    dag_id="publish_blocked",
    description="Publishes a blocked slice after a person has approved it.",
    doc_md=__doc__,
    tags=[TAG, "recompute"],
    schedule=None,
    is_paused_upon_creation=False,
    params=slice_of_pipeline(),
    **DAG_ARGS,
) as dag:
    show = ShowBlockedOperator(task_id="show", retries=0, **values_of(dag))
    approve = ApprovalOperator(
        task_id="approve",
        subject="{{ ti.xcom_pull('show')['subject'] }}",
        body="{{ ti.xcom_pull('show')['body'] }}",
        params={
            "reason": Param(
                "",
                type="string",
                title="Reason",
                description="Why you publish the slice although its checks failed. The ledger records the reason.",
            )
        },
    )
    publish = PublishBlockedOperator(
        task_id="publish",
        retries=0,
        run="{{ ti.xcom_pull('show')['run'] }}",
        shown="{{ ti.xcom_pull('show')['shown'] }}",
        by="{{ ti.xcom_pull('approve')['responded_by_user']['name'] }}",
        reason="{{ ti.xcom_pull('approve')['params_input']['reason'] }}",
        **values_of(dag),
    )
    show >> approve >> publish
