"""Named moments at which a test can end the process; they cost a look at one variable when off."""

import os
import signal
from enum import StrEnum
from pathlib import Path

_SWITCH = os.environ.get("TIDELINE_FAILPOINT", "")


class FailPoint(StrEnum):
    """Where a crash hurts most."""

    PLANNED = "F1"
    STAGED = "F2"
    TABLE_COMMITTED = "F3"
    SLICES_STAGED = "F4"
    AUDITED = "F5"
    PUBLISHED = "F6"
    TOLD = "F7"
    MERGED = "F8"
    RESET_COMMITTED = "F9"


def reach(point: FailPoint, batch: int) -> None:
    """Die here, as by `kill -9`, if `TIDELINE_FAILPOINT` is `POINT:BATCH:FILE`; FILE then says it was hit.

    Without a BATCH, in any.
    """
    if not _SWITCH:
        return
    name, at, file = _SWITCH.split(":", 2)
    if name == point and at in ("", str(batch)) and not Path(file).exists():
        Path(file).write_text(f"{name} batch {batch} process {os.getpid()}\n")
        os.kill(os.getpid(), signal.SIGKILL)
