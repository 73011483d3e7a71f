"""Lets a stream begin elsewhere. Shows what would change, and changes nothing unless *Apply* is set.

For a pipeline the reset deletes the live rows, and moves the checkpoint aside to `checkpoints/_aside`. It never touches
final rows. `ingest` keeps its rows and only moves forward; the records that it passes over are booked as lost.

**Params.** `to` is one of:
- *earliest*: the first record that the topic still has.
- *latest*: the records that arrive from now on.
- *timestamp*: the first record that arrived at or after `timestamp`.
- *landed*: the offsets up to which `ingest` has landed the topic. It hands a stream over to a changed definition.

`sources` is for `ingest` only; an empty list means all.

**Before.** Stop the stream (`control_streams`): a reset is refused while its driver lives.

**Connection.** `tideline_kafka`.

**Example.** `job="rolling_sum", to="earliest"`; look at the plan in the log; again with *Apply*; then start the stream.
By hand: `tideline reset rolling_sum --to earliest --apply`.

**Recovery.** Trigger it again: the next reset completes an interrupted one. Until then the stream refuses to start.

**Triage.**
- *is already running*: stop the stream first.
- *nothing of topic … is landed*: there is no landed offset to begin at. Run `ingest` first, or choose another target.
"""

from airflow.sdk import DAG, Param

from jobs.pipelines import SOURCES, STREAMS
from tideline_airflow.operators.control import ResetStreamOperator
from tideline_airflow.scheduling.defaults import ALERTS, DEFAULT_ARGS, TAG

PARAMS = {
    "job": Param(STREAMS[1], type="string", title="Stream", description="Which stream.", enum=list(STREAMS)),
    "to": Param(
        "earliest",
        type="string",
        title="To",
        description="Where the next start reads from.",
        enum=["earliest", "latest", "timestamp", "landed"],
    ),
    "timestamp": Param(
        None,
        type=["null", "string"],
        format="date-time",
        title="Timestamp",
        description="With *timestamp* only: the first record that arrived at or after it.",
    ),
    "sources": Param(
        [],
        type="array",
        title="Sources",
        description="For ingest only: which sources; none means all.",
        items={"type": "string", "enum": list(SOURCES)},
        examples=list(SOURCES),
        uniqueItems=True,
    ),
    "apply": Param(False, type="boolean", title="Apply", description="Do it. Without it nothing is changed."),
}

with DAG(
    dag_id="reset_stream",
    description="Let a stream begin elsewhere; a dry run unless told otherwise.",
    doc_md=__doc__,
    default_args=DEFAULT_ARGS,
    tags=[TAG, "stream"],
    schedule=None,
    is_paused_upon_creation=False,
    params=PARAMS,
    **ALERTS,
) as dag:
    ResetStreamOperator(task_id="reset", retries=0, **{name: dag.param(name) for name in PARAMS})
