"""Explains how far live numbers were off, one DAG for each pipeline.

For each slice that became final, an account compares the live and the final row of every window, key and measure. It
explains each difference by single events with their causes: late for the stream, too far ahead of it, not yet reached,
a duplicate, …. A difference that no event explains is a defect and opens an incident.

The account runs in a pool of its own, so that it does not hold up `recompute_…`. The stream prunes the live rows of a
slice only after its account. So unpause it with the stream: while it is paused, the live table grows.

**Params.** None.

**Connections.** `spark_default` says where Spark runs (client mode).

**Example.** Unpause it, or trigger it; then `tideline query "select * from balance_rolling_sum"`. By hand:
`python -m jobs account rolling_sum --run by-hand`.

**Recovery.** Nothing needs to be done: the next run accounts for the slices that this run left.

**Triage.**
- An incident `account.….unexplained`: it names slice, window, key and measure. Restate the slice: its final rows are
  computed anew from the events. If the next account is clean, the final row was wrong; otherwise the live row is.
  Report it in both cases.
- *slices wait*: `ingest` has landed fewer records than the stream has read. A later run accounts for these slices.
"""

from datetime import timedelta

from airflow.sdk import DAG

from jobs.pipelines import PIPELINES
from tideline_airflow.operators.account import AccountOperator
from tideline_airflow.scheduling.defaults import IN_ACCOUNT_POOL, TAG, scheduled

for pipeline in PIPELINES.values():
    with DAG(
        dag_id=pipeline.account_job,
        description=f"Explains differences between live and final windows of {pipeline.name}.",
        doc_md=__doc__,
        tags=[TAG, "recompute"],
        schedule=timedelta(minutes=15),
        is_paused_upon_creation=True,
        **scheduled(deadline_minutes=60),
    ):
        AccountOperator(task_id="account", pipeline=pipeline.name, **IN_ACCOUNT_POOL)
