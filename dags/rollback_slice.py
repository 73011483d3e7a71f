"""Serves an earlier version of a slice again. Shows both versions, and changes nothing unless *Apply* is set.

The earlier rows are published as a new version. The ledger records who did it, and why.

**Params.** `pipeline`, `slice` (its name is its start), `to_version`, `reason`, `apply`.

**Example.** `slice="20260131T120000Z", to_version=1`; look at the run's note; again with *Apply* and a reason. By hand:
`tideline rollback rolling_sum --slice 20260131T120000Z --to-version 1 --reason R --apply`.

**Recovery.** Trigger it again. To undo a roll-back, roll back to the version that was served before it.

**Triage.**
- *is not there*: that version was never published, or was replaced more than `FINAL_VERSIONS_KEPT_DAYS` ago.
- *is at version … already*: nothing to do.
"""

from airflow.sdk import DAG, Param

from jobs.pipelines import PIPELINES
from tideline_airflow.operators.slices import RollBackOperator
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
    "to_version": Param(1, type="integer", title="To version", description="Which to serve again.", minimum=1),
    "reason": Param(None, type=["null", "string"], title="Reason", description="Why; needed with Apply."),
    "apply": Param(False, type="boolean", title="Apply", description="Do it. Without it nothing is changed."),
}

with DAG(
    dag_id="rollback_slice",
    description="Serve an earlier version of a final slice again; a dry run unless told otherwise.",
    doc_md=__doc__,
    default_args=DEFAULT_ARGS,
    tags=[TAG, "recompute"],
    schedule=None,
    is_paused_upon_creation=False,
    params=PARAMS,
    **ALERTS,
) as dag:
    RollBackOperator(
        task_id="roll_back",
        retries=0,
        by="{{ dag_run.triggering_user_name or 'somebody' }}",
        **{name: dag.param(name) for name in PARAMS},
    )
