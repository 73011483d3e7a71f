"""Removes old logs of Airflow's tasks and DAG processor, and bounds the logs of processes that run for months."""

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# At this size the log of a running process begins anew. The old part is kept beside it.
LOG_BYTES = 20_000_000
OLDER_SUFFIX = ".1"
# A folder below the logs of tasks. Its logs are bounded by their size, and a few are kept for each job.
DRIVERS = "drivers"
# A newer folder stays even if it is empty: a process may be about to use it.
_NEW_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class Removed:
    """The files of one kind that were removed: how many, and their size. Emptied folders do not count."""

    what: str
    files: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        """The result as text for people."""
        return f"{self.what}: {self.files:,} files, {self.bytes:,} bytes"


def discard_old(folder: Path, kept_seconds: float) -> Removed:
    """Remove old files below a folder, by the time of their last line, and then empty folders.

    The newest run of each DAG stays, because a stream is one run until it is stopped.
    """
    now, sizes = time.time(), list[int]()
    # Listed before anything is removed, because a removal changes the times of folders.
    for at, changed, files in list(_walk(folder)):
        sizes += _discard(files, now - kept_seconds)
        if changed < now - _NEW_SECONDS and at != folder:
            # A folder with something in it stays.
            with suppress(OSError):
                at.rmdir()
    return Removed(what=f"logs in {folder.name}", files=len(sizes), bytes=sum(sizes))


def _walk(folder: Path) -> Iterator[tuple[Path, float, list[Path]]]:
    """A folder and those below it, the deepest first, each with the time of its last change and its files."""
    if not folder.is_dir():
        return
    changed, children = folder.stat().st_mtime, list(os.scandir(folder))
    folders = [child for child in children if child.is_dir(follow_symlinks=False) and child.name != DRIVERS]
    if folder.name.startswith("dag_id="):
        folders = sorted(folders, key=lambda run: run.stat().st_mtime)[:-1]
    for each in folders:
        yield from _walk(Path(each.path))
    yield folder, changed, [Path(child.path) for child in children if not child.is_dir()]


def _discard(files: Iterable[Path], before: float) -> list[int]:
    """Remove the files that were last written before a time, and return their sizes."""
    sizes = []
    for file in files:
        with suppress(FileNotFoundError):
            seen = file.lstat()
            if seen.st_mtime < before:
                file.unlink()
                sizes.append(seen.st_size)
    return sizes


def trim(*folders: Path) -> Removed:
    """Empty logs that are too large. The old content stays beside each log until the log is emptied again.

    The processes append to their logs, so they go on at the new end. Lines that are written meanwhile may be lost.
    """
    freed = list[int]()
    for log in (log for folder in folders for log in folder.glob("*.log")):
        before = log.with_name(log.name + OLDER_SUFFIX)
        if log.stat().st_size > LOG_BYTES:
            freed.append(before.stat().st_size if before.is_file() else 0)
            shutil.copyfile(log, before)
            os.truncate(log, 0)
    return Removed(what="large logs that were cut", files=len(freed), bytes=sum(freed))
