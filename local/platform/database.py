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
# The first pass comes this long after the scheduler's start. So no start is slower, and a platform that runs only an
# hour a day is cleaned too.
FIRST_SECONDS = 600.0
# Each batch is one transaction. It must be short, since other processes wait at most five seconds for SQLite.
_BATCH_ROWS = 1000
# Runs, their tasks, and the rows that belong to tasks.
_OF_RUNS = ("dag_run", "task_instance", "task_instance_history", "xcom")
# The table of triggers is left out. A stream's trigger is as old as the stream, and its task would be deleted with it.
_OTHERS = ("log", "job", "callback", "import_error", "revoked_token")
# SQLite uses empty pages again, so they cost only disk. From this size on, it is worth freeing them.
_WORTH_BYTES = 100_000_000


@dataclass
class Cleaning:
    """When to clean, and the process that does so."""

    next_at: float = field(default_factory=lambda: time.monotonic() + FIRST_SECONDS)
    process: subprocess.Popen[bytes] | None = None

    def look(self) -> None:
        """Start the process when it is due, and log how the last one ended. Never wait for it."""
        if self.process is not None:
            if (code := self.process.poll()) is None:
                return
            level = logging.WARNING if code else logging.INFO
            log.log(level, "cleaning Airflow's database ended with exit code %d", code)
            self.process = None
        if time.monotonic() >= self.next_at:
            self.next_at = time.monotonic() + EVERY_SECONDS
            # With `nice`, all other work on this machine goes first.
            self.process = subprocess.Popen(
                ("nice", sys.executable, "-m", "local.platform.database"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )


def commands(kept_days: int, now: datetime) -> Iterator[tuple[str, ...]]:
    """The commands of one pass.

    Runs of streams are kept: a stream is one run until it is stopped, however old that run is.
    """
    before = (now - timedelta(days=kept_days)).isoformat()
    streams = ",".join(map(dag_id_of, STREAMS))
    # If DAGs are excluded, Airflow fails on the table of deadlines, which has no ids of DAGs, and goes on. So only the
    # second command is asked to report failures. It cleans the table of deadlines, too.
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
    """Run one pass, and return the highest exit code of its commands."""
    kept_days = whole_number(environment(env), "AIRFLOW_KEPT_DAYS", 30)
    return max(subprocess.run(one, env=env, check=False).returncode for one in commands(kept_days, datetime.now(UTC)))


def shrink(database: Path) -> int:
    """Give the empty pages of a SQLite file back to the disk, if that is worth it. Return the number of bytes.

    No other process may use the file, since this locks the whole file until it has finished.
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
