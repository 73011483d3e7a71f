"""Drivers that are real processes, so that tests can kill them."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jobs.control.epochs import Health
from jobs.control.folder import Control
from jobs.settings import Settings

DEADLINE_SECONDS = 120.0


def environment(settings: Settings, **extra: str) -> dict[str, str]:
    """The environment that gives these settings to a job started by hand."""
    return {
        **os.environ,
        **settings.kafka.as_env(),
        "LAKE_ROOT": str(settings.lake_root),
        "TIDELINE_JARS": str(settings.jars),
        "SPARK_MASTER": settings.spark_master,
        "SPARK_SHUFFLE_PARTITIONS": str(settings.shuffle_partitions or ""),
        # The Python that executors would run: on a cluster they may have none.
        "PYSPARK_PYTHON": "/executors/have/no/python",
        **extra,
    }


def start(settings: Settings, *arguments: str, log: Path, **extra: str) -> subprocess.Popen[bytes]:
    """Start `python -m jobs ...` as a user would, in a session of its own."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "jobs", *arguments],
            env=environment(settings, **extra),
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(driver: subprocess.Popen[bytes], log: Path, seconds: float = DEADLINE_SECONDS) -> int:
    """Return the exit code. If there is none in time, fail and show the log."""
    try:
        return driver.wait(seconds)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"still running after {seconds} s:\n{log.read_text()[-4000:]}") from None
    finally:
        # A JVM needs some time to notice that its Python process has ended.
        end(driver)


def signal_group(driver: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal the Python driver and its JVM at once; nothing happens if both are gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(driver.pid, number)


def end(driver: subprocess.Popen[bytes]) -> None:
    """Kill the driver, whatever it is doing."""
    signal_group(driver, signal.SIGKILL)
    driver.wait()


def lease_is_stale(settings: Settings, job: str) -> bool:
    """Whether a successor may take over from a driver whose heartbeats have stopped."""
    return not newest_health(settings, job).alive


def newest_health(settings: Settings, job: str) -> Health:
    """The health of a job's newest epoch."""
    control = Control.of(settings.lake_root, job)
    return control.health(control.epoch(control.newest()))


def race(racer: Callable[..., None], folder: Path, *, racers: int, answers: int) -> list[Any]:
    """Run the same function in several processes at once and return their answers.

    Each process is given a folder, a barrier and a queue.
    """
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(racers), context.Queue()
    running = [context.Process(target=racer, args=(str(folder), start, results)) for _ in range(racers)]
    for process in running:
        process.start()
    found = [results.get(timeout=60) for _ in range(answers)]
    for process in running:
        process.join(60)
        assert process.exitcode == 0
    results.close()
    results.join_thread()
    return found


@contextmanager
def repeated(action: Callable[[], object], every_seconds: float = 0.01) -> Iterator[None]:
    """Repeat an action in a thread while the block runs."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(every_seconds):
            action()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def wait_until(condition: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    """Poll a condition until its deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.1)
