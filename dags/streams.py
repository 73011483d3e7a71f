"""Runs a streaming job, one DAG for each.

`stream_ingest` lands every source topic in the lake, the others keep the live windows
of their pipeline. Its one task, `run`, is the Spark driver: it runs for as long as the stream does.

**Start.** Unpause the DAG: it starts at once, and again whenever it ends. One run at a time.

**Stop.** Pause the DAG, then mark the running task as failed. Nothing is lost: the next start goes on from the
checkpoint.

**Connections.** `spark_default` says where Spark runs (client mode), `tideline_kafka` how Kafka is reached. The lake
is `LAKE_ROOT`.

**Example.** Run `provision_topics`, unpause `stream_ingest` and `stream_rolling_sum`, trigger `generate_demo_traffic`,
then `tideline query "select * from rolling_sum limit 5"`. By hand: `python -m jobs live rolling_sum`.

**Recovery.** A driver that dies is retried after 10, 20 and 40 seconds, then the run fails and a new one begins.
Each start continues from the checkpoint.

**Triage.** The last lines of the task's log say why it ended.
- *tideline: …*: a refusal. The sentence says what disagrees (checkpoint, table, topic, lease) and what to do.
- *Kafka does not answer*: the broker is down; the retries bridge a restart.
- *no Spark jars*: fetch them with `tideline jars`.
"""

from airflow.sdk import DAG

from jobs.pipelines import STREAMS
from jobs.pipelines.spec import dag_id_of
from tideline_airflow.defaults import DEFAULT_ARGS, TAG
from tideline_airflow.operators.streaming import StreamOperator

for job in STREAMS:
    with DAG(
        dag_id=dag_id_of(job),
        description=f"Runs the streaming job {job}.",
        doc_md=__doc__,
        default_args=DEFAULT_ARGS,
        tags=[TAG, "stream"],
        schedule="@continuous",
        max_active_runs=1,
        is_paused_upon_creation=True,
    ):
        StreamOperator(task_id="run", job=job, retries=3)
