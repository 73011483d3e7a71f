"""Removes old documents, pages, run folders and logs once a day. It is on by default.

- In the lake: closed incidents (`INCIDENTS_KEPT_DAYS`), copies of unreadable documents, and files that were put aside;
  pages about audits and checks; folders of recompute runs that ended or that newer runs replaced.
- On the machine of its task, below `TIDELINE_HOME`: logs of tasks and of the DAG processor (`LOGS_KEPT_DAYS`). If a log
  of a running process is large, it is begun anew.
- In tables that were not cleaned for a day: replaced files that no reader needs any more.

`docs/operations.md` lists every bound, and the part of the platform that keeps it.

Rows of tables are never touched: the writers of the tables remove old rows themselves.

**Params.** None.

**Example.** Trigger it at any time. The run's note and the task's log give the number of removed files and their bytes.

**Recovery.** Clear it, or wait for the next run, which completes a run that was interrupted.

**Triage.**
- *the next pass tries again*: a recompute held its lease for minutes. Nothing is wrong unless it happens every day.
- *is left alone*: Airflow's logs lie elsewhere and may also belong to other DAGs. Bound them there.
- The disk fills all the same: `docs/operations.md` lists what else grows.
"""

from airflow.sdk import DAG

from tideline_airflow.defaults import ALERTS, DEFAULT_ARGS, TAG, deadline
from tideline_airflow.operators.upkeep import UpkeepOperator

with DAG(
    dag_id="upkeep",
    description="Removes old incidents, pages, run folders and logs.",
    doc_md=__doc__,
    default_args=DEFAULT_ARGS,
    tags=[TAG, "upkeep"],
    schedule="23 3 * * *",
    catchup=False,
    max_active_runs=1,
    is_paused_upon_creation=False,
    deadline=deadline(120),
    **ALERTS,
):
    UpkeepOperator(task_id="remove")
