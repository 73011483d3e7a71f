"""Checks every ten minutes what a pipeline serves, one DAG for each pipeline.

Live windows keep the pipeline's checks and are unique; the newest is no older than it should be; final slices are still
those that were published, by their checksums: all of the last day, and a hundred older ones in turns.

**Params.** None.

**Example.** Unpause it, or trigger it; the link *Data Docs* of its task shows what was judged.

**Recovery.** The incident `check.….served` is closed by the next check that finds nothing wrong.

**Triage.**
- Freshness: does the stream run? `tideline streams status`.
- A check on a column: the live rows are wrong now; the audit keeps such rows from becoming final.
- *checksum*: files of `final` were changed by something else than this platform. Restate these slices.
- It is tried again: it could not check, which says nothing about the data.
"""

from datetime import timedelta

from airflow.sdk import DAG

from jobs.pipelines import PIPELINES
from tideline_airflow.defaults import ALERTS, DEFAULT_ARGS, TAG, deadline
from tideline_airflow.operators.check import CheckOperator

for pipeline in PIPELINES.values():
    with DAG(
        dag_id=pipeline.check_job,
        description=f"Checks what {pipeline.name} serves: windows, freshness, checksums.",
        doc_md=__doc__,
        default_args=DEFAULT_ARGS,
        tags=[TAG, "quality"],
        schedule=timedelta(minutes=10),
        catchup=False,
        max_active_runs=1,
        is_paused_upon_creation=True,
        deadline=deadline(30),
        **ALERTS,
    ):
        CheckOperator(task_id="check", pipeline=pipeline.name)
