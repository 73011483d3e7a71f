"""Serves an earlier version of a slice again. Shows both versions, and changes nothing unless *Apply* is set.

The earlier rows are published as a new version. The ledger records who did it, and why.

**Params.** The form explains each one. A slice is named after its begin.

**Example.** Trigger it with `slice="20260131T120000Z", to_version=1`, and read the run's note. Trigger it again with
*Apply* and a reason. By hand:
`tideline rollback rolling_sum --slice 20260131T120000Z --to-version 1 --reason R --apply`.

**Recovery.** Trigger it again. To undo a roll-back, roll back to the version that was served before it.

**Triage.**
- *is not there*: that version was never published, or was replaced more than `FINAL_VERSIONS_KEPT_DAYS` ago.
- *is at version … already*: nothing to do.
"""

from airflow.sdk import DAG, Param

from tideline_airflow.operators.slices import RollBackOperator
from tideline_airflow.scheduling.defaults import DAG_ARGS, TAG
from tideline_airflow.scheduling.params import TRIGGERED_BY, apply, reason, slice_of_pipeline, values_of

PARAMS = {
    **slice_of_pipeline(),
    "to_version": Param(
        1, type="integer", title="To version", description="The earlier version to serve again.", minimum=1
    ),
    "reason": reason(),
    "apply": apply(),
}

with DAG(
    dag_id="rollback_slice",
    description="Serves an earlier version of a final slice again. Changes nothing unless Apply is set.",
    doc_md=__doc__,
    tags=[TAG, "recompute"],
    schedule=None,
    is_paused_upon_creation=False,
    params=PARAMS,
    **DAG_ARGS,
) as dag:
    RollBackOperator(task_id="roll_back", retries=0, by=TRIGGERED_BY, **values_of(dag))
