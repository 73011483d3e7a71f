"""The free room on the disk of a lake. Below a reserve no new work begins, so that work under way can end.

Streams wait before their next micro-batch, and tasks wait before they begin. One incident reports the full disk, and
closes when there is room again. A bucket has no such limit.
"""

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Self

from jobs.control.incident import full_disk_key
from jobs.control.incidents import Incidents
from jobs.pipelines.layout import SPARE
from jobs.settings import reserve_bytes
from jobs.storage.folders import Folder, create_whole, make_folder

log = logging.getLogger(__name__)

# The size of the file `SPARE`, which holds some bytes until the disk is full. Then it is deleted, since heartbeats,
# receipts and the incident need those bytes.
_SPARE_BYTES = 1024 * 1024
# Work goes on when this many times the reserve is free. If work went on at the reserve itself, it would stop again at
# once.
_ENOUGH = 1.2


class Room:
    """The free room for a lake, as one process sees it. `is_short` looks at the disk anew each time."""

    def __init__(self, lake_root: Folder, reserve: int) -> None:
        """``reserve`` is how many bytes must be free."""
        self._root = lake_root
        self._reserve = reserve
        # True: this process opened the incident. False: it saw enough room. None: it has not looked yet.
        self._reported_full: bool | None = None

    @classmethod
    def of(cls, lake_root: Folder) -> Self:
        """The room with the reserve from the settings of this process."""
        return cls(lake_root, reserve_bytes())

    def is_short(self) -> bool:
        """Whether work must wait. When that changes, the incident is opened or closed."""
        if not isinstance(self._root, Path) or not self._root.is_dir():
            return False
        disk = shutil.disk_usage(self._root)
        short = disk.free < self._reserve or (disk.free < self._wanted and self._was_short(self._root))
        try:
            self._report_full_disk(self._root, disk.free, disk.total) if short else self._keep_spare(self._root)
        except OSError as error:
            # Another process took the bytes that were left. The next look tries again.
            log.warning("the incident about the free space of the lake's disk could not be updated: %s", error)
        return short

    @property
    def _wanted(self) -> float:
        return self._reserve * _ENOUGH

    def _was_short(self, root: Path) -> bool:
        """Whether the spare is missing and the incident is open.

        In a new lake the spare is missing, too, but no incident is open.
        """
        return not (root / SPARE).is_file() and bool(Incidents.of(root).still_open(full_disk_key()))

    def _report_full_disk(self, root: Path, free: int, total: int) -> None:
        """Open the incident, and delete the spare.

        Both together are the sign for other processes: they, too, wait until `_ENOUGH` times the reserve is free.
        """
        if self._reported_full:
            return
        incidents, sentence = Incidents.of(root), self._sentence(root, free, total)
        with suppress(OSError):
            incidents.open(full_disk_key(), sentence)
        (root / SPARE).unlink(missing_ok=True)
        incidents.open(full_disk_key(), sentence)
        self._reported_full = True

    def _keep_spare(self, root: Path) -> None:
        """Close the incident and restore the spare. A missing spare tells any process that the incident may be open."""
        if self._reported_full is False and (root / SPARE).is_file():
            return
        Incidents.of(root).close(
            full_disk_key(), f"the disk of the lake ({root}) has enough free space again: all jobs go on"
        )
        if not (root / SPARE).is_file():
            make_folder((root / SPARE).parent)
            create_whole(root / SPARE, os.urandom(_SPARE_BYTES))
        self._reported_full = False

    def _sentence(self, root: Path, free: int, total: int) -> str:
        return (
            f"the disk of the lake ({root}) has {_mb(free)} of {_mb(total)} left, and LAKE_RESERVE_MB keeps "
            f"{_mb(self._reserve)} free: streams and batch jobs wait. Nothing is lost, and they go on by themselves "
            f"when {_mb(self._wanted)} are free. Enlarge the disk, or delete files on it that are not part of the "
            "lake. In the lake, the waiting jobs delete replaced files of tables once a minute, after their retention "
            "(hours in most tables). The DAG upkeep removes old incidents, run folders and logs"
        )


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"
