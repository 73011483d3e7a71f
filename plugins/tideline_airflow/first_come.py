"""The order of tasks that share a pool: the longest wait goes first. Backfills take the slots that are left."""

import time
from typing import TYPE_CHECKING

from airflow.task.priority_strategy import PriorityWeightStrategy
from airflow.utils.types import DagRunType

if TYPE_CHECKING:
    from airflow.models.taskinstance import TaskInstance

# The largest value of Airflow's column.
_LARGEST = 2**31 - 1
# All runs of a backfill are created at once, and several are active. Without this they would hold up all other runs.
_BACKFILL_LATER_SECONDS = 365 * 24 * 3600
# A run that has its plan goes on before another run makes one. Runs that begin together have nearly equal weights, so
# the tasks after the plan count as a minute older.
_BEGUN_SOONER_SECONDS = 60


class FirstCome(PriorityWeightStrategy):
    """The earlier a task was created, the more it weighs.

    Without this rule Airflow orders tasks of equal weight by the logical date of their run. Runs of partitions have no
    logical date, so a pool of one slot served two pipelines in turns, and a third pipeline never.
    """

    def get_weight(self, ti: "TaskInstance") -> int:
        """Airflow calls this when a task's run begins, and again when the task is cleared."""
        is_backfill = DagRunType.from_run_id(ti.run_id) is DagRunType.BACKFILL_JOB
        later = _BACKFILL_LATER_SECONDS if is_backfill else 0
        sooner = _BEGUN_SOONER_SECONDS if ti.task and ti.task.upstream_task_ids else 0
        return _LARGEST - int(time.time()) - later + sooner
