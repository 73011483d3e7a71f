"""Removes old documents, pages, run folders and logs once a day. It is on by default.

- In the lake: closed incidents (`INCIDENTS_KEPT_DAYS`), copies of unreadable documents, and files that were put aside;
  pages about audits and checks, and folders of recompute runs that ended or died.
- On the machine of its task, below `TIDELINE_HOME`: logs of tasks and of the DAG processor (`LOGS_KEPT_DAYS`). A large
  log of a process that lives on is begun anew.
- Of tables that nobody has looked through for a day: replaced files that no reader needs any more.

`docs/operations.md` lists every bound, and who sees to it.

Rows of tables are never touched: their writers look after them.

**Params.** None.

**Example.** Trigger it at any time. The run's note and the task's log say what was removed: files and bytes.

**Recovery.** Clear it, or wait for the next run. A pass that was cut short is finished by the next one.

**Triage.**
- *left to the next pass*: a recompute held its lease for minutes. Nothing is wrong unless it happens every day.
- *is left alone*: Airflow's logs lie elsewhere and may be of other DAGs, too. Bound them there.
- The disk fills all the same: `docs/operations.md` tells what else grows.
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
