"""Deletes files that no reader needs from all tables of a lake, even if a table's writer does not run.

This needs no lease, because it deletes only files that no kept version names and that no writer can still commit. A
writer that can still commit has placed its files after the newest commit, and those stay (`retention`).
"""

import logging
from threading import Lock

from deltalake import DeltaTable

from jobs.lake.delta.fenced import FencedTable, OvertakenError
from jobs.lake.delta.log import is_whole
from jobs.lake.delta.retention import Freed, is_due
from jobs.storage.folders import Folder

log = logging.getLogger(__name__)

# The folders of a lake that contain tables.
_KINDS = ("events", "live", "final", "ledger", "drift", "balance")
# Many writers may wait for room at a time, and each asks about once a minute. A table is searched at most this often.
_EVERY_SECONDS = 50.0
_turn = Lock()


def make_room(lake_root: Folder) -> None:
    """Free room for a writer that waits for it. Tables that another process has just searched are skipped."""
    if not _turn.acquire(blocking=False):
        return
    try:
        free_tables(lake_root, _EVERY_SECONDS)
    finally:
        _turn.release()


def free_tables(lake_root: Folder, every_seconds: float) -> Freed:
    """Free each table whose last turn was at least ``every_seconds`` ago. Tables that fail wait for the next turn."""
    freed = [_freed(path, every_seconds) for kind in _KINDS for path in _tables(lake_root / kind)]
    return Freed(files=sum(each.files for each in freed), bytes=sum(each.bytes for each in freed))


def _tables(kind: Folder) -> list[Folder]:
    try:
        return [path for path in kind.iterdir() if (path / "_delta_log").is_dir()] if kind.is_dir() else []
    except OSError as error:
        log.warning("%s could not be searched for files to delete: %s", kind, error)
        return []


def _freed(path: Folder, every_seconds: float) -> Freed:
    try:
        if is_due(path, every_seconds):
            table = FencedTable(path, DeltaTable(str(path)))
            if is_whole(path):
                return table.delete_what_no_reader_needs()
            # Its writer will put the torn commit aside. Then the files that this commit replaced are needed again.
            log.warning(
                "no file of %s is deleted: its log is incomplete after a power cut, and only its writer repairs it",
                path,
            )
    except OvertakenError:
        log.info("no file of %s is deleted now, because another process writes to it", path)
    except Exception as error:
        # An error in one table must not keep the others from being freed.
        log.warning("%s could not be searched for files to delete: %s", path, error)
    return Freed()
