"""Removes old incidents, pages, run folders, half-written files, and files that were put aside.

They grow beside the tables. The pass may run at any time and beside everything else, and a second one finds nothing.
Writers remove old files of their tables (`jobs.lake.delta.retention`). This pass does it if a writer has not done so
for a day.
"""

import logging
import re
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from jobs.control.incidents import Incidents
from jobs.control.writing import writing
from jobs.finality.run.folder import KEPT_SECONDS, discard_old, old_runs
from jobs.lake.delta import log as delta_log
from jobs.lake.delta.freeing import free_tables
from jobs.lake.pipeline_lake import PipelineLake
from jobs.pipelines import PIPELINES
from jobs.pipelines.layout import CHECKPOINTS, PAGES, PUT_ASIDE
from jobs.refusal import Refusal
from jobs.settings import KeptDays
from jobs.storage.documents import UNREADABLE
from jobs.storage.folders import HALF_WRITTEN, Folder, last_written, remove
from jobs.upkeep.logs import Removed

log = logging.getLogger(__name__)

DAY_SECONDS = 24 * 3600.0
# Files are put aside after a power cut or by a reset. A person may want to look at them.
ASIDE_KEPT_SECONDS = 30 * DAY_SECONDS
# No write of such a file takes as long as this.
HALF_WRITTEN_KEPT_SECONDS = DAY_SECONDS
# Where killed processes leave half-written files: beside documents and in tables, and in the logs of tables.
_HALF_WRITTEN: dict[str, re.Pattern[str]] = {
    "*/*": HALF_WRITTEN,
    "*/*/*": HALF_WRITTEN,
    "*/*/_delta_log/*": delta_log.HALF_WRITTEN,
}


def look_after(lake_root: Folder, kept: KeptDays) -> list[Removed]:
    """Make one pass over a lake, and return how much was removed of each kind."""
    kept_seconds = kept.incidents * DAY_SECONDS
    lakes = (PipelineLake(lake_root, pipeline) for pipeline in PIPELINES.values())
    return [
        Removed(what="incidents", files=Incidents.of(lake_root).discard_old(kept_seconds)),
        _total("copies of unreadable documents", _older(_folders(lake_root, UNREADABLE), kept_seconds)),
        _total("files that were put aside", _older(_folders(lake_root, PUT_ASIDE), ASIDE_KEPT_SECONDS)),
        _total("half-written files of killed processes", _half_written(lake_root)),
        _total("pages about audits and checks", _older(_children(lake_root / PAGES), KEPT_SECONDS)),
        _total("run folders", (size for lake in lakes for size in _runs(lake))),
        _replaced(lake_root),
    ]


def _replaced(lake_root: Folder) -> Removed:
    freed = free_tables(lake_root, DAY_SECONDS)
    return Removed(what="files of tables that no reader needs", files=freed.files, bytes=freed.bytes)


def _total(what: str, sizes: Iterable[int]) -> Removed:
    found = list(sizes)
    return Removed(what=what, files=len(found), bytes=sum(found))


def _runs(lake: PipelineLake) -> list[int]:
    """Remove old run folders of a pipeline. A plan does so, too, but some pipelines are not planned any more."""
    if not old_runs(lake, and_abandoned=False):
        return []
    try:
        with writing(lake.root, lake.pipeline.recompute_job) as lease:
            sizes = [size for folder in old_runs(lake, and_abandoned=False) for size in _sizes(folder)]
            lease.check()
            discard_old(lake, and_abandoned=False)
            return sizes
    except Refusal as refusal:
        log.warning("run folders of %s are not removed now, the next pass tries again: %s", lake.pipeline.name, refusal)
        return []


def _older(folders: Iterable[Folder], kept_seconds: float) -> Iterator[int]:
    """Remove old files and folders from some folders, by the time they were put there; yield the sizes of files."""
    before = time.time() - kept_seconds
    for each in (child for folder in folders for child in _children(folder)):
        with suppress(FileNotFoundError):
            if 0 < _put_there(each) < before:
                sizes = _sizes(each)
                each.unlink(missing_ok=True) if each.is_file() else remove(each)
                yield from sizes


def _half_written(lake_root: Folder) -> Iterator[int]:
    """Remove half-written files after a day; yield their sizes. In a bucket every file is whole."""
    if not isinstance(lake_root, Path):
        return
    before = time.time() - HALF_WRITTEN_KEPT_SECONDS
    for place, name in _HALF_WRITTEN.items():
        for file in (each for each in lake_root.glob(place) if name.fullmatch(each.name)):
            with suppress(FileNotFoundError):
                seen = file.lstat()
                if stat.S_ISREG(seen.st_mode) and seen.st_mtime < before:
                    file.unlink()
                    yield seen.st_size


def _put_there(each: Folder) -> float:
    """When a file or folder was put there. A move on a disk keeps the time of the last write, but sets `st_ctime`."""
    if isinstance(each, Path):
        seen = each.stat(follow_symlinks=False)
        return max(seen.st_mtime, seen.st_ctime)
    return each.stat().st_mtime if each.is_file() else last_written(each)


def _sizes(each: Folder) -> list[int]:
    if not isinstance(each, Path):
        return [each.stat().st_size] if each.is_file() else [seen.st_size for seen in each.written().values()]
    return [file.stat().st_size for file in ([each] if each.is_file() else each.rglob("*")) if file.is_file()]


def _children(folder: Folder) -> list[Folder]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _folders(lake_root: Folder, name: str) -> list[Folder]:
    """The folders with this name, at all places where they can be.

    In a bucket no file is torn. There only a reset puts something aside, in a folder of `checkpoints`.
    """
    if not isinstance(lake_root, Path):
        return [lake_root / CHECKPOINTS / name]
    # Checkpoints of `ingest` lie one level deeper. Tables are not searched so deep, since that level holds all their
    # partitions.
    deep = lake_root.glob(f"{CHECKPOINTS}/*/*/{name}")
    found = [*lake_root.glob(f"*/{name}"), *lake_root.glob(f"*/*/{name}"), *deep]
    return [folder for folder in found if folder.is_dir()]
