"""Spark drivers as processes: find them, and end them in order."""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil

from local.platform.process import terminate, wait_gone


def is_driver(process: psutil.Process) -> bool:
    """Whether this is a Python process that runs our jobs. Such a process can stop in order."""
    with suppress(psutil.Error):
        words = process.cmdline()
        module = ("-m", "jobs") in pairwise(words)
        script = any(word.endswith("jobs/__main__.py") for word in words[1:3])
        return "python" in Path(words[0]).name and (module or script) if words else False
    return False


def is_job(process: psutil.Process) -> bool:
    """Whether this is a driver, or the JVM below a driver."""
    with suppress(psutil.Error):
        return is_driver(process) or "org.apache.spark.deploy.SparkSubmit" in process.cmdline()
    return False


def end_drivers(living: Callable[[], Iterable[psutil.Process]], seconds: float) -> None:
    """Ask each driver once to end, which it does between two batches. Drivers that take too long are left running."""
    asked: set[int] = set()
    deadline = time.monotonic() + seconds
    while drivers := [process for process in living() if is_driver(process)]:
        terminate([driver for driver in drivers if driver.pid not in asked])
        asked |= {driver.pid for driver in drivers}
        if time.monotonic() > deadline:
            return
        wait_gone(drivers, 0.5)
