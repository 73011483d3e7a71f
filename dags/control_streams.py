"""Starts, stops or restarts one or more streams, or shows their states.

**Actions.**
- *status* changes nothing.
- *start* unpauses the DAGs of the streams. A stream that waits after failures is started at once.
- *stop* pauses the DAGs first, else they would start the streams again. Then each driver finishes its micro-batch and
  ends. The next start goes on at the very next offset.
- *drain-and-stop* first reads all records that are in the topics when the task runs, then stops.
- *restart* lets each driver end after its micro-batch; its DAG starts another.

**Params.** `jobs`: the streams; an empty list means all. `seconds`: how long a driver may take. To end, it has 120
seconds by default. After that it ends without finishing its micro-batch, and the next start runs that micro-batch
again. To drain, it has an hour by default.

**Connection.** `tideline_airflow`: the address of Airflow's API server and a login that may edit DAGs.

**Example.** `action=stop, jobs=["rolling_sum"]`. By hand: `tideline streams stop rolling_sum`.

**Recovery.** Trigger it again: steps that are done already are not repeated.

**Triage.** The log shows the state of the streams afterwards, with the cause for each stream that failed. *did not end
within …*: the driver still counted as running 30 seconds after its time was over. A driver kills itself when its time
is over, but it counts that time from the moment when it sees the request. So a driver that was still starting ends
later: trigger the DAG again. If this does not help, read the driver's log, and kill its process. Ten seconds after its
last heartbeat it counts as dead.
"""

from airflow.sdk import DAG, Param

from jobs.pipelines import STREAMS
from tideline_airflow.operators.control import Action, ControlStreamsOperator
from tideline_airflow.scheduling.defaults import DAG_ARGS, TAG
from tideline_airflow.scheduling.params import TRIGGERED_BY, several_of, values_of

PARAMS = {
    "action": Param(
        "status",
        type="string",
        title="Action",
        description="What to do with the streams. The page of the DAG explains each action.",
        enum=list(Action),
    ),
    "jobs": several_of(STREAMS, title="Streams", description="The streams. An empty list means all streams."),
    "seconds": Param(
        None,
        type=["null", "integer"],
        title="Seconds",
        description="How long a driver may take. If empty: 120 to end, 3600 to drain.",
        minimum=1,
    ),
}

with DAG(
    dag_id="control_streams",
    description="Starts, stops, drains or restarts streams, or shows their states.",
    doc_md=__doc__,
    tags=[TAG, "stream"],
    schedule=None,
    is_paused_upon_creation=False,
    params=PARAMS,
    **DAG_ARGS,
) as dag:
    ControlStreamsOperator(task_id="control", retries=0, by=f"{TRIGGERED_BY} (control_streams)", **values_of(dag))
