"""Who waits longest is served first: the order of tasks that share a pool. Backfills take what the others leave."""

import time
from typing import TYPE_CHECKING

from airflow.task.priority_strategy import PriorityWeightStrategy
from airflow.utils.types import DagRunType

if TYPE_CHECKING:
    from airflow.models.taskinstance import TaskInstance

# What Airflow's column can hold.
_LARGEST = 2**31 - 1
# All runs of a backfill come into being at once, and several of them are under way: they would keep everybody waiting.
_BACKFILL_LATER_SECONDS = 365 * 24 * 3600
# What was planned is computed before anything else is planned: weights tell seconds apart, and runs begin together.
_BEGUN_SOONER_SECONDS = 60


class FirstCome(PriorityWeightStrategy):
    """The earlier a task came into being, the more it weighs.

    Without it, tasks of equal weight go by their run's logical date. Runs of partitions have none, so a pool of one
    slot served two pipelines in turns, and a third one never.
    """

    def get_weight(self, ti: "TaskInstance") -> int:
        """Asked when a task's run begins, and again when it is cleared."""
        is_backfill = DagRunType.from_run_id(ti.run_id) is DagRunType.BACKFILL_JOB
        later = _BACKFILL_LATER_SECONDS if is_backfill else 0
        sooner = _BEGUN_SOONER_SECONDS if ti.task and ti.task.upstream_task_ids else 0
        return _LARGEST - int(time.time()) - later + sooner
