"""Keeps Airflow's database from growing: the scheduler's executor starts a process once a day, which deletes old rows.

A task cannot do this, since Airflow keeps its database from tasks.
"""

import logging
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)

EVERY_SECONDS = 24 * 3600.0
# The first pass comes this long after the scheduler's start. So no start is slower, and a platform that runs only an
# hour a day is cleaned too.
FIRST_SECONDS = 600.0
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
                ("nice", sys.executable, "-m", "local.platform.old_rows"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )


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
