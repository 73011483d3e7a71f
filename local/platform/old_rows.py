"""Deletes the rows of ended runs, and old asset events, from the database of this process's Airflow.

It is a process of its own: `python -m local.platform.old_rows`. Nothing imports it, since it imports all of Airflow.
"""

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.models.asset import AssetEvent, PartitionedAssetKeyLog, association_table
from airflow.models.dagrun import DagRun
from airflow.utils.session import create_session
from airflow.utils.state import State
from sqlalchemy import Select, delete, func, select

from jobs.settings import environment, whole_number

# Each batch is one transaction. It must be short, since other processes wait at most five seconds for SQLite.
_BATCH_ROWS = 1000
# With a run go its tasks, and all rows of its tasks.
_BATCH_RUNS = 100
# The tables that `airflow db clean` cleans. Tables of runs and tasks are left out: the command looks only at the age of
# a row, and would delete a stream that has run for months. So is the table of triggers, since a stream's trigger is as
# old as the stream, and its task would be deleted with it.
_BY_AGE = ("log", "job", "callback", "import_error", "revoked_token", "partitioned_asset_key_log")


def main() -> int:
    """Run one pass. Return the exit code of `airflow db clean`; if another step fails, its error is raised."""
    kept_days = whole_number(environment(), "AIRFLOW_KEPT_DAYS", 30)
    before = datetime.now(UTC) - timedelta(days=kept_days)
    code = subprocess.run(
        (
            *(sys.executable, "-m", "airflow", "db", "clean", "--yes", "--skip-archive", "--error-on-cleanup-failure"),
            *("--batch-size", str(_BATCH_ROWS), "--clean-before-timestamp", before.isoformat()),
            *("--tables", ",".join(_BY_AGE)),
        ),
        check=False,
    ).returncode
    _delete_ended_runs(before)
    _delete_unused_events(before)
    return code


def _delete_ended_runs(before: datetime) -> None:
    """Delete the runs that ended before a moment. By the database's foreign keys their tasks go with them.

    A run that has not ended stays, however old it is. The newest run of each kind of each DAG stays, too, since Airflow
    continues the DAG's schedule after it.
    """
    newest = select(func.max(DagRun.id)).group_by(DagRun.dag_id, DagRun.run_type)
    ended = (DagRun.state.in_(State.finished_dr_states), DagRun.end_date < before)
    _delete(DagRun, select(DagRun.id).where(*ended, DagRun.id.not_in(newest)), _BATCH_RUNS)


def _delete_unused_events(before: datetime) -> None:
    """Delete old asset events, except those that belong to a run in the database or to a partition that waits.

    A partition waits if its run has not been created yet. `airflow db clean` deletes the links between events and
    partitions after the partition's run was deleted.
    """
    of_run, of_partition = association_table.c.event_id, PartitionedAssetKeyLog.asset_event_id
    unused = (
        select(AssetEvent.id)
        .outerjoin(association_table, of_run == AssetEvent.id)
        .outerjoin(PartitionedAssetKeyLog, of_partition == AssetEvent.id)
        .where(AssetEvent.timestamp < before, of_run.is_(None), of_partition.is_(None))
    )
    _delete(AssetEvent, unused, _BATCH_ROWS)


def _delete(table: Any, ids: Select[tuple[int]], rows: int) -> None:
    """Delete the rows with these ids. Each transaction deletes up to a number of ``rows``."""
    some = delete(table).where(table.id.in_(ids.limit(rows)))
    deleted = 1
    while deleted:
        with create_session() as session:
            deleted = session.connection().execute(some).rowcount


if __name__ == "__main__":
    sys.exit(main())
