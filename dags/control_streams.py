"""Switches streams on and off, restarts them, or shows how they do. Several at once.

**Actions.**
- *status* changes nothing.
- *start* unpauses the DAGs of the streams. One that waits after failures is started at once.
- *stop* pauses the DAGs first, else they would start the streams again; then each driver finishes its micro-batch and
  ends. The next start goes on at the very next offset.
- *drain-and-stop* reads what is in the topics at the moment of asking, then stops.
- *restart* lets each driver end after its micro-batch; its DAG starts another.

**Params.** `jobs`: which streams; none means all. `seconds`: how long to wait, for the micro-batch under way (120 by
default; then the driver ends hard, and the batch is run again at the next start), or for draining (an hour).

**Connection.** `tideline_airflow`: the address of Airflow's API server and a login that may edit DAGs.

**Example.** `action=stop, jobs=["rolling_sum"]`. By hand: `tideline streams stop rolling_sum`.

**Recovery.** Trigger it again: what is done already is left as it is.

**Triage.** The log shows the streams afterwards, with the cause where one failed. *did not end within …*: the driver
hangs; it ends itself at its deadline, and is dead ten seconds after its last heartbeat at the latest.
"""

from airflow.sdk import DAG, Param

from jobs.pipelines import STREAMS
from tideline_airflow.defaults import ALERTS, DEFAULT_ARGS, TAG
from tideline_airflow.operators.control import Action, ControlStreamsOperator

PARAMS = {
    "action": Param("status", type="string", title="Action", description="What to do.", enum=list(Action)),
    "jobs": Param(
        [],
        type="array",
        title="Streams",
        description="Which streams; none means all.",
        items={"type": "string", "enum": list(STREAMS)},
        examples=list(STREAMS),
        uniqueItems=True,
    ),
    "seconds": Param(
        None,
        type=["null", "integer"],
        title="Seconds",
        description="How long a driver may take to end, or to drain.",
        minimum=1,
    ),
}

with DAG(
    dag_id="control_streams",
    description="Start, stop, drain or restart streams, or show how they do.",
    doc_md=__doc__,
    default_args=DEFAULT_ARGS,
    tags=[TAG, "stream"],
    schedule=None,
    is_paused_upon_creation=False,
    params=PARAMS,
    **ALERTS,
) as dag:
    ControlStreamsOperator(
        task_id="control",
        retries=0,
        by="{{ dag_run.triggering_user_name or 'somebody' }} (control_streams)",
        **{name: dag.param(name) for name in PARAMS},
    )
