"""A driver that is asked to stop ends between two micro-batches, also when they come without a pause."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from jobs import driver
from jobs.connectors.control import Lease
from jobs.microbatch import MicroBatches

pytestmark = pytest.mark.spark


class Counting(MicroBatches):
    """The function of a real query, with nothing to write: only its life is of interest."""

    def _write(self, frame: DataFrame, number: int) -> None:
        if number in self.broken:
            raise ValueError(f"batch {number} is broken")
        self.seen.append(number)
        if len(self.seen) >= self.enough:
            self.stop.set()

    @classmethod
    def new(cls, stop: threading.Event, *, enough: int = 3, broken: tuple[int, ...] = ()) -> "Counting":
        nothing: Any = SimpleNamespace()
        batches = cls(
            job="counting",
            topic="numbers",
            fingerprint=None,
            lease=nothing,
            checkpoint=nothing,
            table=nothing,
            client=nothing,
            cluster_id="c",
            topic_id="t",
            stage=nothing,
        )
        batches.stop, batches.seen, batches.enough, batches.broken = stop, [], enough, broken
        return batches

    stop: threading.Event
    seen: list[int]
    enough: int
    broken: tuple[int, ...]


@pytest.fixture
def lease(tmp_path: Path):
    lease = Lease.acquire(tmp_path / "control", "counting")
    yield lease
    lease.release()


def busy(spark: SparkSession, checkpoint: Path, batches: MicroBatches):
    """A query that has always more to do."""
    records = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    return records.writeStream.foreachBatch(batches).option("checkpointLocation", str(checkpoint)).start()


def run(queries: list[Any], lease: Lease, stop: threading.Event) -> None:
    """`driver.run`, but a deadlock is a failure and not the end of the test run."""
    error: list[BaseException] = []

    def target() -> None:
        try:
            driver.run(queries, lease, stop)
        except BaseException as raised:
            error.append(raised)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the driver does not stop"
    if error:
        raise error[0]


def test_a_busy_query_stops_and_goes_on_where_it_was(spark: SparkSession, lease: Lease, tmp_path: Path) -> None:
    """No batch is begun twice: each stop waited until Spark had committed the last one."""
    seen: list[int] = []
    for _ in range(8):
        stop = threading.Event()
        batches = Counting.new(stop)
        run([(busy(spark, tmp_path / "checkpoint", batches), batches)], lease, stop)
        assert len(batches.seen) >= 3
        seen += batches.seen
    assert seen == list(range(len(seen)))


def test_the_error_of_one_query_stops_the_others_and_is_the_one_that_is_told(
    spark: SparkSession, lease: Lease, tmp_path: Path
) -> None:
    stop = threading.Event()
    sound, broken = Counting.new(stop, enough=10**6), Counting.new(stop, broken=(2,))
    queries = [(busy(spark, tmp_path / name, b), b) for name, b in (("sound", sound), ("broken", broken))]
    with pytest.raises(ValueError, match="batch 2 is broken"):
        run(queries, lease, stop)
    assert not any(query.isActive for query, _ in queries)
