"""The room that is left on the disk of a lake. Below a reserve nothing new is begun, so that work under way can end.

Streams wait before their next micro-batch, and tasks before they begin. One incident tells of it, and is over when
there is room again. A bucket has no such bound.
"""

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Self

from jobs.control.incident import full_disk
from jobs.control.incidents import Incidents
from jobs.settings import reserve_bytes
from jobs.storage.folders import Folder, create_whole, make_folder

log = logging.getLogger(__name__)

# Takes some bytes of the disk until it is full. Then it is deleted: heartbeats, receipts and the incident need them.
_SPARE = "control/_spare"
_SPARE_BYTES = 1024 * 1024
# So much more than the reserve must be free before work goes on: at the border it would stop and go all the time.
_ENOUGH = 1.2


class Room:
    """What one process knows of the room for a lake. It is looked up anew with each question."""

    def __init__(self, lake_root: Folder, reserve: int) -> None:
        """``reserve``: how many bytes must be free."""
        self._root = lake_root
        self._reserve = reserve
        # Whether this process has opened the incident; none: it has not looked yet.
        self._told: bool | None = None

    @classmethod
    def of(cls, lake_root: Folder) -> Self:
        """By the settings of this process."""
        return cls(lake_root, reserve_bytes())

    def is_short(self) -> bool:
        """Whether to wait. The incident is opened, or closed, when that changes."""
        if not isinstance(self._root, Path) or not self._root.is_dir():
            return False
        disk = shutil.disk_usage(self._root)
        short = disk.free < self._reserve or (disk.free < self._wanted and self._was_short(self._root))
        try:
            self._report_full_disk(self._root, disk.free, disk.total) if short else self._keep_spare(self._root)
        except OSError as error:
            # Another process was faster with the bytes that were left: the next look tries again.
            log.warning("nobody can be told how much room the disk of the lake has: %s", error)
        return short

    @property
    def _wanted(self) -> float:
        return self._reserve * _ENOUGH

    def _was_short(self, root: Path) -> bool:
        """Without the spare: a lake that is new has none yet, and no incident either."""
        return not (root / _SPARE).is_file() and bool(Incidents.of(root).still_open(full_disk()))

    def _report_full_disk(self, root: Path, free: int, total: int) -> None:
        """The incident first: without it and without the spare, it would look as if nothing had ever been short."""
        if self._told:
            return
        incidents, sentence = Incidents.of(root), self._sentence(root, free, total)
        with suppress(OSError):
            incidents.open(full_disk(), sentence)
        (root / _SPARE).unlink(missing_ok=True)
        incidents.open(full_disk(), sentence)
        self._told = True

    def _keep_spare(self, root: Path) -> None:
        """Where it is missing, the incident may be open: processes that run know that by it."""
        if self._told is False and (root / _SPARE).is_file():
            return
        Incidents.of(root).close(full_disk(), f"the disk of the lake ({root}) has room again: all goes on")
        if not (root / _SPARE).is_file():
            make_folder((root / _SPARE).parent)
            create_whole(root / _SPARE, os.urandom(_SPARE_BYTES))
        self._told = False

    def _sentence(self, root: Path, free: int, total: int) -> str:
        return (
            f"the disk of the lake ({root}) has {_mb(free)} of {_mb(total)} left, and LAKE_RESERVE_MB keeps "
            f"{_mb(self._reserve)} free: streams and batch jobs wait, nothing is lost, and all goes on by itself when "
            f"{_mb(self._wanted)} are free. Enlarge the disk, or delete from it what is not of the lake. Of the lake, "
            "all that wait delete replaced files of its tables once a minute, as soon as they are kept for long enough "
            "(hours in most tables), and the DAG upkeep removes old incidents, run folders and logs"
        )


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"
