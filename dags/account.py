"""Explains how far live numbers were off, one DAG for each pipeline.

For each slice that became final, an account compares the live and the final row of every window, key and measure. It
puts the difference down to single events, each with its cause: late for the stream, ahead of its clock, not yet
reached, a duplicate, …. A difference that no event explains is a defect and opens an incident.

The account runs in a pool of its own, so that it does not hold up `recompute_…`. The stream prunes the live rows of a
slice only after its account.

**Params.** None.

**Connections.** `spark_default` says where Spark runs (client mode).

**Example.** Unpause it, or trigger it; then `tideline query "select * from balance_rolling_sum"`. By hand:
`python -m jobs account rolling_sum --run by-hand`.

**Recovery.** Nothing needs to be done: the next run accounts for the slices that this run left.

**Triage.**
- An incident `account.….unexplained`: it names slice, window, key and measure. Restate the slice: its final rows are
  computed anew from the events. If the next account is clean, the final row was wrong; otherwise the live row is.
  Report it in both cases.
- *waits*: ingest is behind the stream. The account of the slice comes later.
"""

from datetime import timedelta

from airflow.sdk import DAG

from jobs.pipelines import PIPELINES
from tideline_airflow.operators.account import AccountOperator
from tideline_airflow.scheduling.defaults import ALERTS, DEFAULT_ARGS, IN_ACCOUNT_POOL, TAG, deadline

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
