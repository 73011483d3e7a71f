"""Removes old documents, pages, run folders and logs once a day. It is on by default.

- In the lake: closed incidents (`INCIDENTS_KEPT_DAYS`), copies of unreadable documents, and files that were put aside;
  half-written files of killed processes; pages about audits and checks; folders of recompute runs that ended or that
  newer runs replaced.
- On the machine of its task, below `TIDELINE_HOME`: logs of tasks and of the DAG processor (`LOGS_KEPT_DAYS`). A large
  log of a running process is emptied; its content stays beside it, in a file with the suffix `.1`.
- In tables that were not cleaned for a day: replaced files that no reader needs any more.

`docs/operations.md` lists every bound, and the part of the platform that keeps it.

Rows of tables are never touched: the writers of the tables remove old rows themselves.

**Params.** None.

**Example.** Trigger it at any time. The run's note and the task's log give the number of removed files and their bytes.

**Recovery.** Clear it, or wait for the next run, which completes a run that was interrupted.

**Triage.**
- *the next pass tries again*: a recompute held its lease for minutes. Nothing is wrong unless it happens every day.
- *logs are not removed*: Airflow's logs are in another folder, and may also belong to other DAGs. Limit them there.
- The disk still fills: `docs/operations.md` lists what else grows.
"""

from airflow.sdk import DAG

from tideline_airflow.operators.upkeep import UpkeepOperator
from tideline_airflow.scheduling.defaults import TAG, scheduled

with DAG(
    dag_id="upkeep",
    description="Removes old incidents, pages, run folders and logs.",
    doc_md=__doc__,
    tags=[TAG, "upkeep"],
    schedule="23 3 * * *",
    is_paused_upon_creation=False,
    **scheduled(deadline_minutes=120),
):
    UpkeepOperator(task_id="remove")
