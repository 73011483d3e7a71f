"""Keeps a streaming job running, one DAG for each.

`stream_ingest` lands every source topic in the lake. The others keep the live windows of their pipeline. The only task,
`run`, starts the Spark driver, or finds the driver that runs already. Then it waits in the triggerer, so a running
stream holds no worker slot. The driver is a process of its own: it goes on when Airflow stops or fails.

**On.** Unpause the DAG: the stream starts at once, and again whenever it ends.

**Off.** Trigger `control_streams` with the action *stop*, or `tideline streams stop JOB`: it pauses the DAG, then asks
the driver to end after its micro-batch. If you only pause the DAG, the driver goes on, and is not restarted if it ends.

**Restart.** Mark the task as failed or clear it: the driver finishes its micro-batch and ends, and the next run starts
another. Or `tideline streams restart JOB`. Nothing is lost or counted twice, because a start goes on from the
checkpoint.

**Connections.** `spark_default` says where Spark runs (client mode), `tideline_kafka` how Kafka is reached. The lake
is `LAKE_ROOT`.

**Example.** Run `provision_topics`, unpause `stream_ingest` and `stream_rolling_sum`, trigger `generate_demo_traffic`,
then `tideline query "select * from rolling_sum limit 5"`. By hand: `python -m jobs live rolling_sum`.

**Recovery.**
- A driver that was killed counts as dead ten seconds after its last heartbeat. A dead or failed driver is started
  again: after 5 s at first, and after up to 5 minutes when it fails again and again.
- Five failures in a row are a crash loop. The run fails with the cause, and an incident is opened. After that, each run
  of the DAG waits up to five minutes, and then starts one driver.
- A driver that runs but makes no step is *stalled*. An incident is opened, and the driver is left running.

**Triage.** The links of the task lead to the stream's state, to its Spark UI and to the driver's log. A failed try
gives the reason in one paragraph; `tideline streams status` gives it for all streams. "Running streams" in
`docs/streams.md` has the rest.
"""

from datetime import UTC, datetime

from airflow.sdk import DAG

from jobs.pipelines import STREAMS
from jobs.pipelines.layout import dag_id_of
from tideline_airflow.operators.streaming import StreamingJobOperator
from tideline_airflow.scheduling.defaults import ALERTS, ON_FAILURE, OWNER, TAG

for job in STREAMS:
    with DAG(
        dag_id=dag_id_of(job),
        description=f"Runs the streaming job {job}.",
        doc_md=__doc__,
        default_args={"owner": OWNER, **ON_FAILURE},
        tags=[TAG, "stream"],
        schedule="@continuous",
        # Without a start date Airflow 3.3 gives the second run the first run's logical date, and never begins it.
        start_date=datetime(2026, 1, 1, tzinfo=UTC),
        max_active_runs=1,
        is_paused_upon_creation=True,
        **ALERTS,
    ):
        StreamingJobOperator(task_id="run", job=job)
