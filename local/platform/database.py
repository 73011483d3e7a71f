"""Keeps Airflow's database from growing: it deletes the rows of runs that are over.

A task cannot do this, since Airflow keeps its database from tasks. The scheduler's executor starts it once a day, as
`python -m local.platform.database`.
"""

import logging
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from jobs.pipelines import STREAMS
from jobs.pipelines.layout import dag_id_of
from jobs.settings import environment, whole_number

log = logging.getLogger(__name__)

EVERY_SECONDS = 24 * 3600.0
# After the start of the scheduler: a platform that is up for an hour a day is cleaned, too, and no start is slower.
FIRST_SECONDS = 600.0
# A batch is a transaction, and others wait at most five seconds for SQLite.
_BATCH_ROWS = 1000
# Rows of runs, each with its tasks and what belongs to them.
_OF_RUNS = ("dag_run", "task_instance", "task_instance_history", "xcom")
# Those of triggers are left out: the trigger of a stream is as old as the stream, and its task would go with it.
_OTHERS = ("log", "job", "callback", "import_error", "revoked_token")
# SQLite uses empty pages again: they cost nothing but disk.
_WORTH_BYTES = 100_000_000


@dataclass
class Cleaning:
    """When to clean, and the process that does so."""

    next_at: float = field(default_factory=lambda: time.monotonic() + FIRST_SECONDS)
    process: subprocess.Popen[bytes] | None = None

    def look(self) -> None:
        """Start it when its time has come; it never waits."""
        if self.process is not None:
            if (code := self.process.poll()) is None:
                return
            log.log(logging.WARNING if code else logging.INFO, "cleaning Airflow's database ended with %d", code)
            self.process = None
        if time.monotonic() >= self.next_at:
            self.next_at = time.monotonic() + EVERY_SECONDS
            # It steps back behind what else runs on this machine.
            self.process = subprocess.Popen(
                ("nice", sys.executable, "-m", "local.platform.database"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )


def commands(kept_days: int, now: datetime) -> Iterator[tuple[str, ...]]:
    """What one pass runs.

    A stream is one run for as long as it is not stopped, however old that is: runs of streams are left alone.
    """
    before = (now - timedelta(days=kept_days)).isoformat()
    streams = ",".join(map(dag_id_of, STREAMS))
    # With names of DAGs Airflow fails on the table of deadlines, which has none, and goes on. So only the other command
    # may fail, which cleans that table, too.
    for tables, more in (
        (_OF_RUNS, ("--exclude-dag-ids", streams)),
        (_OTHERS, ("--error-on-cleanup-failure",)),
    ):
        yield (
            *(sys.executable, "-m", "airflow", "db", "clean", "--yes", "--skip-archive"),
            *("--batch-size", str(_BATCH_ROWS), "--clean-before-timestamp", before),
            *("--tables", ",".join(tables), *more),
        )


def clean(env: Mapping[str, str]) -> int:
    """One pass; what the worst of its commands ended with."""
    kept_days = whole_number(environment(env), "AIRFLOW_KEPT_DAYS", 30)
    return max(subprocess.run(one, env=env, check=False).returncode for one in commands(kept_days, datetime.now(UTC)))


def shrink(database: Path) -> int:
    """Give empty pages of a SQLite file back to the disk, if that is worth it; how many bytes.

    Nothing else may run: for as long as it takes, it has the whole file for itself.
    """
    if not database.is_file():
        return 0
    with closing(sqlite3.connect(database, timeout=30)) as connection:
        page, pages, free = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_size", "page_count", "freelist_count")
        )
        if free * page < _WORTH_BYTES or free * 2 < pages:
            return 0
        connection.execute("VACUUM")
    return int(free * page)


if __name__ == "__main__":
    sys.exit(clean(os.environ))
