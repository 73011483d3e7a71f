"""Starts, stops or restarts streams, or shows their state. Several at once.

**Actions.**
- *status* changes nothing.
- *start* unpauses the DAGs of the streams. A stream that waits after failures is started at once.
- *stop* pauses the DAGs first, else they would start the streams again. Then each driver finishes its micro-batch and
  ends. The next start goes on at the very next offset.
- *drain-and-stop* first reads all records that are in the topics at the moment of asking, then stops.
- *restart* lets each driver end after its micro-batch; its DAG starts another.

**Params.** `jobs`: which streams; an empty list means all. `seconds`: how long a driver may take to end or to drain. To
end, it has 120 seconds by default. After that it breaks off, and the next start runs its micro-batch again. To drain,
it has an hour by default.

**Connection.** `tideline_airflow`: the address of Airflow's API server and a login that may edit DAGs.

**Example.** `action=stop, jobs=["rolling_sum"]`. By hand: `tideline streams stop rolling_sum`.

**Recovery.** Trigger it again: steps that are done already are not repeated.

**Triage.** The log shows the state of the streams afterwards, with the cause for each stream that failed. *did not end
within …*: the driver hangs. It ends itself at its deadline; ten seconds after its last heartbeat it counts as dead.
"""

from airflow.sdk import DAG, Param

from jobs.pipelines import STREAMS
from tideline_airflow.operators.control import Action, ControlStreamsOperator
from tideline_airflow.scheduling.defaults import ALERTS, DEFAULT_ARGS, TAG

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
