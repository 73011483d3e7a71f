"""Explains how far live numbers were off, one DAG for each pipeline: the drift balance of slices that became final.

For every window, key and measure the difference between the live and the final row is put down to events, each with
its cause: late for the stream, ahead of its clock, not yet reached, a duplicate, …. What nothing explains is a defect,
and an incident. It keeps out of the way of `recompute_…`, and comes before the stream prunes its rows.

**Params.** None.

**Connections.** `spark_default` says where Spark runs (client mode).

**Example.** Unpause it, or trigger it; then `tideline query "select * from balance_rolling_sum"`. By hand:
`python -m jobs account rolling_sum --run by-hand`.

**Recovery.** Nothing needs to be done: what is left, the next run does.

**Triage.**
- An incident `account.….unexplained`: it names slice, window, key and measure. Restate the slice: its final rows are
  made anew from the events. If the next account is clean, final was off, otherwise live is. Report it either way.
- *waits*: ingest is behind the stream; the slice's account comes later.
"""

from datetime import timedelta

from airflow.sdk import DAG

from jobs.pipelines import PIPELINES
from tideline_airflow.defaults import ALERTS, DEFAULT_ARGS, IN_ACCOUNT_POOL, TAG, deadline
from tideline_airflow.operators.batch import AccountOperator

for pipeline in PIPELINES.values():
    with DAG(
        dag_id=pipeline.account_job,
        description=f"Explains differences between live and final windows of {pipeline.name}.",
        doc_md=__doc__,
        default_args=DEFAULT_ARGS,
        tags=[TAG, "recompute"],
        schedule=timedelta(minutes=15),
        catchup=False,
        max_active_runs=1,
        is_paused_upon_creation=True,
        deadline=deadline(60),
        **ALERTS,
    ):
        AccountOperator(task_id="account", pipeline=pipeline.name, **IN_ACCOUNT_POOL)
