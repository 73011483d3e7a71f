"""The simulated clock that the product's own code sees while a benchmark makes the commits of a year in minutes.

`simulated` lists everything that is patched. The Delta library reads the machine's clock, which cannot be set. So a
property of its tables makes them keep everything longer, by the difference of the two clocks.
"""

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any
from unittest.mock import patch

from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from jobs.lake.delta.fenced import set_properties
from jobs.settings import KeptDays, replaced_kept_minutes

KEPT = ("delta.logRetentionDuration", "delta.deletedFileRetentionDuration")
_SECONDS = {"hours": 3600, "days": 86_400, "seconds": 1}
_real_time = time.time
_real_utime = os.utime


@dataclass
class Clock:
    """The simulated time of a process, in seconds since 1970. It is never ahead of the machine's time."""

    now: float
    # Table -> how many seconds the product keeps its replaced files and its old log entries.
    kept: dict[str, dict[str, int]] = field(default_factory=dict)

    def keep_as_long(self, table: Path) -> None:
        """Make the library keep replaced files for the product's retention, by the simulated clock.

        This is one more commit. Until the next call, files are kept longer by the simulated time since this call.
        Example: with a retention of 6 hours, files are kept for 7 hours when the call was an hour ago.
        """
        if table.parent.name == "final":
            return self._keep_by_setting(table, "FINAL_VERSIONS_KEPT_DAYS", KeptDays().final_versions, 86_400)
        if table.parent.name in ("events", "live"):
            return self._keep_by_setting(table, "REPLACED_FILES_KEPT_MINUTES", replaced_kept_minutes({}), 60)
        try:
            opened = DeltaTable(str(table))
        except TableNotFoundError:
            return
        properties = opened.metadata().configuration
        kept = self.kept.setdefault(str(table), {name: seconds_of(properties[name]) for name in KEPT})
        behind = round(_real_time() - self.now)
        set_properties(opened, table, {name: f"interval {seconds + behind} seconds" for name, seconds in kept.items()})
        _real_utime(table / "_delta_log" / f"{opened.version():020}.json", (self.now, self.now))

    def _keep_by_setting(self, table: Path, setting: str, kept: int, unit_seconds: int) -> None:
        """Do the same for a table that takes its retention from a setting when it is opened."""
        self.kept[str(table)] = dict.fromkeys(KEPT, kept * unit_seconds)
        os.environ[setting] = str(kept + round((_real_time() - self.now) / unit_seconds))


def seconds_of(interval: str) -> int:
    """The seconds of an interval, as a table's property has it.

    >>> seconds_of("interval 6 hours")
    21600
    """
    found = re.fullmatch(r"interval (\d+) (\w+)", interval)
    if found is None:
        raise ValueError(f"{interval!r} is no interval that the product writes")
    return int(found[1]) * _SECONDS[found[2]]


@contextmanager
def simulated(clock: Clock) -> Iterator[None]:
    """Let all code of this process see the clock: `time.time`, `datetime.now` of `jobs`, and times of files.

    Files that code syncs or touches get the simulated time as their time of change. Nothing is fsynced, since that
    takes time and has no effect on growth.
    """

    def touch(path: Any, times: Any = None, **more: Any) -> None:
        _real_utime(path, (clock.now, clock.now) if times is None and not more else times, **more)

    def sync(descriptor: int) -> None:
        _real_utime(descriptor, (clock.now, clock.now))

    with patch("time.time", lambda: clock.now), patch("os.utime", touch), patch("os.fsync", sync), _datetimes(clock):
        yield


@contextmanager
def _datetimes(clock: Clock) -> Iterator[None]:
    """Patch `datetime.now` in the loaded modules of `jobs`."""

    class Kind(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, datetime)

    class Simulated(datetime, metaclass=Kind):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return datetime.fromtimestamp(clock.now, tz)

    asking = [module for name, module in list(sys.modules.items()) if name.startswith("jobs.")]
    asking = [module for module in asking if getattr(module, "datetime", None) is datetime]
    for module in asking:
        vars(module)["datetime"] = Simulated
    try:
        yield
    finally:
        for module in asking:
            vars(module)["datetime"] = datetime
