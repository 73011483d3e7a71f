"""Checks every ten minutes the rows that a pipeline serves, one DAG for each pipeline.

- Live windows pass the pipeline's checks, and no window is served twice.
- The newest micro-batch of the stream is not too far behind the newest landed event.
- Final slices still have the checksums with which they were published. Each run checks all slices of the last day, and
  a hundred older ones in turns.

**Params.** None.

**Example.** Unpause it, or trigger it. The link *Data Docs* of its task shows the result of each check.

**Recovery.** The incident `check.….served` is closed by the next check that finds nothing wrong.

**Triage.**
- Freshness: does the stream run? `tideline streams status`.
- A check on a column: the live rows are wrong now. The audit keeps such rows from becoming final.
- *checksum*: something other than this platform changed files of the final table. Restate these slices.
- The task is tried again: the check itself could not run. The data may be good or bad.
"""

from datetime import timedelta

from airflow.sdk import DAG

from jobs.pipelines import PIPELINES
from tideline_airflow.operators.check import CheckOperator
from tideline_airflow.scheduling.defaults import TAG, scheduled

for pipeline in PIPELINES.values():
    with DAG(
        dag_id=pipeline.check_job,
        description=f"Checks what {pipeline.name} serves: windows, freshness, checksums.",
        doc_md=__doc__,
        tags=[TAG, "quality"],
        schedule=timedelta(minutes=10),
        is_paused_upon_creation=True,
        **scheduled(deadline_minutes=30),
    ):
        CheckOperator(task_id="check", pipeline=pipeline.name)
