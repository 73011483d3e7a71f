"""A year in minutes: what time it is for the product's own code while a benchmark makes commits of the past.

What is patched is listed in `simulated`, and nothing else. The Delta library asks the machine's clock, which cannot be
set: its tables are told, as their property, to keep everything longer by as much as the two clocks differ.
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

from jobs.settings import KeptDays

KEPT = ("delta.logRetentionDuration", "delta.deletedFileRetentionDuration")
_SECONDS = {"hours": 3600, "days": 86_400, "seconds": 1}
_real_time = time.time
_real_utime = os.utime


@dataclass
class Clock:
    """The simulated time of a process, in seconds since 1970. It never lies ahead of the machine's."""

    now: float
    # Table -> the seconds for which the product has it keep what is replaced.
    kept: dict[str, dict[str, int]] = field(default_factory=dict)

    def keep_as_long(self, table: Path) -> None:
        """Let the library keep what a table has replaced as long as the product says, by the simulated clock.

        It is one more commit. Later in a step, what is kept is older by as much as the step is long.
        """
        if table.parent.name == "final":
            return self._keep_by_setting(table)
        try:
            opened = DeltaTable(str(table))
        except TableNotFoundError:
            return
        said = opened.metadata().configuration
        kept = self.kept.setdefault(str(table), {name: seconds_of(said[name]) for name in KEPT})
        behind = round(_real_time() - self.now)
        opened.alter.set_table_properties(
            {name: f"interval {seconds + behind} seconds" for name, seconds in kept.items()}
        )
        _real_utime(table / "_delta_log" / f"{opened.version():020}.json", (self.now, self.now))

    def _keep_by_setting(self, final: Path) -> None:
        """The final table has its retention from a setting, in whole days, whenever it is opened."""
        days = KeptDays().final_versions
        self.kept[str(final)] = dict.fromkeys(KEPT, days * 86_400)
        os.environ["FINAL_VERSIONS_KEPT_DAYS"] = str(days + round((_real_time() - self.now) / 86_400))


def seconds_of(interval: str) -> int:
    """What a table's property says.

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

    What is made durable, or placed, gets the simulated time as its time of change. Nothing is fsynced: that says
    nothing of growth, and takes time.
    """

    def touch(path: Any, times: Any = None, **more: Any) -> None:
        _real_utime(path, (clock.now, clock.now) if times is None and not more else times, **more)

    def sync(descriptor: int) -> None:
        _real_utime(descriptor, (clock.now, clock.now))

    with patch("time.time", lambda: clock.now), patch("os.utime", touch), patch("os.fsync", sync), _datetimes(clock):
        yield


@contextmanager
def _datetimes(clock: Clock) -> Iterator[None]:
    """`datetime.now` in the modules of `jobs` that are loaded."""

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
