"""Makes a stream begin at other offsets. Shows what would change, and changes nothing unless *Apply* is set.

For a pipeline the reset deletes the live rows, and moves the checkpoint to `checkpoints/_aside`. Final rows do not
change. `ingest` keeps its rows and only moves forward; the records that it skips are recorded as lost.

**Params.** `to` is one of:
- *earliest*: the first record that the topic still has.
- *latest*: the records that arrive from now on.
- *timestamp*: the first record that arrived at or after `timestamp`.
- *landed*: the offsets up to which `ingest` has landed the topic. Use it to hand a stream over to a changed definition.

`sources` is for `ingest` only; an empty list means all.

**Before.** Stop the stream (`control_streams`): a reset is refused while its driver runs.

**Connection.** `tideline_kafka`.

**Example.** Trigger it with `job="rolling_sum", to="earliest"`, and read the plan in the log. Trigger it again with
*Apply*, then start the stream. By hand: `tideline reset rolling_sum --to earliest --apply`.

**Recovery.** Trigger it again: the next reset completes an interrupted one. Until then the stream refuses to start.

**Triage.**
- *is already running*: stop the stream first.
- *nothing of topic … is landed*: there is no landed offset to begin at. Run `ingest` first, or choose another target.
"""

from airflow.sdk import DAG, Param

from jobs.pipelines import SOURCES, STREAMS
from tideline_airflow.operators.control import ResetStreamOperator
from tideline_airflow.scheduling.defaults import DAG_ARGS, TAG
from tideline_airflow.scheduling.params import apply, several_of, values_of

PARAMS = {
    "job": Param(STREAMS[1], type="string", title="Stream", description="The stream to reset.", enum=list(STREAMS)),
    "to": Param(
        "earliest",
        type="string",
        title="To",
        description="The offsets at which the next start begins to read.",
        enum=["earliest", "latest", "timestamp", "landed"],
    ),
    "timestamp": Param(
        None,
        type=["null", "string"],
        format="date-time",
        title="Timestamp",
        description="Only with to=timestamp: reading begins at the first record that arrived at or after this time.",
    ),
    "sources": several_of(
        SOURCES, title="Sources", description="For ingest only: the sources. An empty list means all sources."
    ),
    "apply": apply(),
}

with DAG(
    dag_id="reset_stream",
    description="Makes a stream begin at other offsets. Changes nothing unless Apply is set.",
    doc_md=__doc__,
    tags=[TAG, "stream"],
    schedule=None,
    is_paused_upon_creation=False,
    params=PARAMS,
    **DAG_ARGS,
) as dag:
    ResetStreamOperator(task_id="reset", retries=0, **values_of(dag))
