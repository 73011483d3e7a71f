"""Named points where a test can kill the process. When they are off, each costs a look at one variable."""

import os
import signal
from enum import StrEnum
from pathlib import Path

_SWITCH = os.environ.get("TIDELINE_FAILPOINT", "")


class FailPoint(StrEnum):
    """The points where a crash does the most harm."""

    PLANNED = "F1"
    STAGED = "F2"
    TABLE_COMMITTED = "F3"
    SLICES_STAGED = "F4"
    AUDITED = "F5"
    PUBLISHED = "F6"
    ANNOUNCED = "F7"
    MERGED = "F8"
    RESET_COMMITTED = "F9"


def may_fail_at(point: FailPoint, batch: int) -> None:
    """Kill this process, as `kill -9` does, if `TIDELINE_FAILPOINT` is `POINT:BATCH:FILE` and names this point.

    An empty BATCH means every batch. FILE records the hit; once it exists, the process is not killed again.
    """
    if not _SWITCH:
        return
    name, at, file = _SWITCH.split(":", 2)
    if name == point and at in ("", str(batch)) and not Path(file).exists():
        Path(file).write_text(f"{name} batch {batch} process {os.getpid()}\n")
        os.kill(os.getpid(), signal.SIGKILL)
