"""Removes old logs of Airflow's tasks and of the DAG processor, and bounds those of processes that live for months."""

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# A log of a process that lives on is begun anew at this size; the part before it is kept beside it.
LOG_BYTES = 20_000_000
BEFORE = ".1"
# Below the logs of tasks. These are bounded by their size, and a few are kept for each job.
DRIVERS = "drivers"
# A folder that is new may be about to be used.
_NEW_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class Removed:
    """How much was removed of one kind. Folders that were emptied do not count."""

    what: str
    files: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        """For people."""
        return f"{self.what}: {self.files:,} files, {self.bytes:,} bytes"


def discard_old(folder: Path, kept_seconds: float) -> Removed:
    """Remove old files below a folder, by their last line, and the folders that are empty then.

    The newest run of each DAG stays: a stream is one run for as long as it is not stopped.
    """
    now, sizes = time.time(), list[int]()
    # Listed before anything is removed: that changes the times of folders.
    for at, changed, files in list(_walk(folder)):
        sizes += _discard(files, now - kept_seconds)
        if changed < now - _NEW_SECONDS and at != folder:
            # A folder with something in it stays.
            with suppress(OSError):
                at.rmdir()
    return Removed(what=f"logs in {folder.name}", files=len(sizes), bytes=sum(sizes))


def _walk(folder: Path) -> Iterator[tuple[Path, float, list[Path]]]:
    """The folders below it, when each was changed, and their files; those that lie deeper first."""
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
    """Remove those that were written before; their sizes."""
    sizes = []
    for file in files:
        with suppress(FileNotFoundError):
            seen = file.lstat()
            if seen.st_mtime < before:
                file.unlink()
                sizes.append(seen.st_size)
    return sizes


def trim(*folders: Path) -> Removed:
    """Begin too large logs in some folders anew. The old content stays beside each, until the next time.

    Their processes append, so they go on at the new end. Lines that are written at this very moment may be lost.
    """
    freed = list[int]()
    for log in (log for folder in folders for log in folder.glob("*.log")):
        before = log.with_name(log.name + BEFORE)
        if log.stat().st_size > LOG_BYTES:
            freed.append(before.stat().st_size if before.is_file() else 0)
            shutil.copyfile(log, before)
            os.truncate(log, 0)
    return Removed(what="large logs, begun anew", files=len(freed), bytes=sum(freed))
