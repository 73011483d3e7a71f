"""What the receipt of a driver says, however the driver ends."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from jobs.control.epochs import Health, Owner, Phase, Receipt
from jobs.control.folder import Control
from jobs.control.lease import Lease, LeaseLostError
from jobs.refusal import Refusal
from jobs.settings import Settings
from jobs.streaming import driver
from jobs.streaming.driver import Ending, cause_of
from tests.streaming.counting import JOB
from tests.streaming.test_driver import broken_query

pytestmark = pytest.mark.spark


# -- The receipt --


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return replace(Settings.from_env({}), lake_root=tmp_path, stall_seconds=77)


def test_the_receipt_of_an_end_in_order(settings: Settings, control: Control) -> None:
    ending = Ending(why="caught up", batches={"numbers": 4}, offsets={"numbers": {0: 7, 1: 0}})
    lived: list[Any] = []

    def work(lease: Lease, stop: threading.Event) -> Ending:
        lived.append(control.epoch(lease.epoch))
        return ending

    driver.supervised(settings, JOB, work)
    (epoch,) = lived
    assert (epoch.number, epoch.phase, epoch.holder) == (1, Phase.STARTING, Owner.this_process())
    assert epoch.beat.stall_seconds == 77
    receipt = control.epoch(1).receipt
    assert receipt == Receipt(
        time=receipt.time if receipt else 0,
        clean=True,
        cause="caught up",
        batches=ending.batches,
        offsets=ending.offsets,
    )
    driver.supervised(settings, JOB, work)
    assert control.newest() == 2


def cause_told(settings: Settings, control: Control, error: BaseException) -> str:
    """The cause in the receipt of a driver that ended with this error."""

    def work(lease: Lease, stop: threading.Event) -> Ending:
        raise error

    with pytest.raises(type(error)) as raised:
        driver.supervised(settings, JOB, work)
    assert raised.value is error
    epoch = control.epoch(control.newest())
    assert control.health(epoch) is Health.FAILED
    assert epoch.receipt
    assert epoch.receipt.batches is epoch.receipt.offsets is None
    return epoch.receipt.cause


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (Refusal("no topic clicks: run the DAG provision_topics"), "no topic clicks: run the DAG provision_topics"),
        (LeaseLostError("epoch 1 was overtaken"), "epoch 1 was overtaken"),
        (driver.QueryFailedError("stream 'a' failed: [X] y"), "stream 'a' failed: [X] y"),
        (ValueError("batch 2\n is\n\nbroken"), "ValueError: batch 2 is broken"),
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit: 3"),
        (MemoryError(), "MemoryError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_the_receipt_of_a_failure(error: BaseException, cause: str, settings: Settings, control: Control) -> None:
    assert cause_told(settings, control, error) == cause


def test_a_long_cause_is_cut(settings: Settings, control: Control) -> None:
    cause = cause_told(settings, control, ValueError("sea " * 1000))
    assert cause.startswith("ValueError: sea sea")
    assert len(cause) <= 600


def test_the_receipt_of_one_that_was_declared_dead_stays(settings: Settings, control: Control) -> None:
    declared = Receipt(time=1.0, clean=False, cause="declared dead")

    def work(lease: Lease, stop: threading.Event) -> Ending:
        control.end(lease.epoch, declared)
        lease.check()
        raise AssertionError("it goes on")

    with pytest.raises(LeaseLostError):
        driver.supervised(settings, JOB, work)
    assert control.epoch(1).receipt == declared


_EARLY = """
import sys
from dataclasses import replace
from pathlib import Path
from jobs.streaming import driver
from jobs.settings import Settings

def work(lease, stop):
    print(lease.epoch, flush=True)
    assert stop.wait(60)
    return driver.Ending(why="stopped by a signal", batches={}, offsets={})

driver.supervised(replace(Settings.from_env({}), lake_root=Path(sys.argv[1])), "counting", work)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_there_is_a_session_ends_it_in_order(
    number: signal.Signals, control: Control, tmp_path: Path
) -> None:
    starting = subprocess.Popen([sys.executable, "-c", _EARLY, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert starting.stdout is not None
        assert starting.stdout.readline() == "1\n"
        starting.send_signal(number)
        assert starting.wait(30) == 0
    finally:
        starting.kill()
        starting.communicate()
    receipt = control.epoch(1).receipt
    assert receipt
    assert (receipt.clean, receipt.cause) == (True, "stopped by a signal")


def test_the_signals_are_given_back(settings: Settings, control: Control) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    seen: list[Any] = []

    def work(lease: Lease, stop: threading.Event) -> Ending:
        seen.extend(signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT))
        return Ending(why="caught up", batches={}, offsets={})

    driver.supervised(settings, JOB, work)
    assert not set(seen) & set(before)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


# Text that does not help an operator who reads the cause at 3 a.m.
NOISE = ("Traceback", "\n", "Identifier:", "Logical Plan", "Current State", "JVM stacktrace", "\tat ", ".scala:")


def assert_readable(cause: str) -> None:
    assert [noise for noise in NOISE if noise in cause] == [], cause
    assert len(cause) <= 600


def raised_by(action: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        action()
    return raised.value


def test_the_cause_of_a_query_that_failed_is_a_sentence(spark: SparkSession, tmp_path: Path) -> None:
    query = broken_query(spark, tmp_path / "broken")
    raised_by(lambda: query.awaitTermination(60))
    cause = cause_of(query.exception())
    assert "[DIVIDE_BY_ZERO] Division by zero." in cause
    assert_readable(cause)


def test_the_cause_of_an_analysis_that_failed_names_its_class(spark: SparkSession) -> None:
    cause = cause_of(raised_by(lambda: spark.range(1).select("nope")))
    assert "UNRESOLVED_COLUMN.WITH_SUGGESTION" in cause
    assert "`nope` cannot be resolved" in cause
    assert_readable(cause)


def test_the_cause_of_an_error_of_java_is_the_innermost(spark: SparkSession) -> None:
    jvm: Any = spark._jvm

    def fail() -> None:
        inner = jvm.java.io.IOException("No space left on device")
        jvm.java.util.concurrent.CompletableFuture.failedFuture(jvm.java.lang.RuntimeException("outer", inner)).get()

    error = raised_by(fail)
    assert type(error).__name__ == "Py4JJavaError"
    assert cause_of(error) == "Spark failed: java.io.IOException: No space left on device"


_KILLED = """
import sys, threading
from dataclasses import replace
from pathlib import Path
import psutil
from jobs import session
from jobs.streaming import driver
from jobs.settings import Settings
from tests.streaming.test_driver import Counting, unasked

folder = Path(sys.argv[1])
settings = replace(Settings.from_env({}), lake_root=folder, spark_master="local[2]")

def work(lease, stop):
    with session.opened(settings, "killed") as spark:
        batches = Counting.new(threading.Event(), folder / "numbers", enough=10**6)
        records = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
        writer = records.writeStream.foreachBatch(batches).option("checkpointLocation", str(folder / "numbers"))
        query = writer.start()
        while not batches.seen:
            assert query.isActive
        (jvm,) = [child for child in psutil.Process().children(recursive=True) if "java" in child.name()]
        threading.Timer(1.0, jvm.kill).start()
        return driver.run([(query, batches)], lease, stop, unasked)

driver.supervised(settings, "counting", work)
"""


def test_a_driver_whose_jvm_is_killed_says_so_and_ends(settings: Settings, control: Control, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr[-4000:]
    receipt = control.epoch(1).receipt
    assert receipt, done.stderr[-4000:]
    assert not receipt.clean
    assert receipt.cause == (
        "Spark's JVM does not answer any more (killed, or out of memory): see the end of the driver's log"
    )
