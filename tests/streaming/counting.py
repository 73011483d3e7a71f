"""A query that counts its batches and writes nothing, and a driver that runs it."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pyspark.sql import DataFrame

from jobs.broker.kafka import TopicState
from jobs.control.checkpoint import Checkpoint, Offsets
from jobs.control.lease import Lease
from jobs.streaming import driver
from jobs.streaming.driver import Ending
from jobs.streaming.microbatch import MicroBatches
from jobs.streaming.start import Start

JOB = "counting"
ENDLESS = 10**6


class Counting(MicroBatches):
    """The batch function of a real query. It writes nothing: the tests only look at how the query runs and ends."""

    def _write(self, frame: DataFrame, number: int) -> None:
        if number in self.broken:
            raise ValueError(f"batch {number} is broken")
        frame.count()
        self.seen.append(number)
        self.reached = {0: number + 1}
        if len(self.seen) >= self.enough:
            self.stop.set()

    @classmethod
    def new(
        cls, stop: threading.Event, checkpoint: Path, *, enough: int = 3, broken: tuple[int, ...] = ()
    ) -> "Counting":
        nothing: Any = SimpleNamespace()
        topic = TopicState(cluster_id="c", topic_id="t", partitions=0, earliest={}, latest={})
        batches = cls(
            job=JOB,
            topic=checkpoint.name,
            lease=nothing,
            # The offsets of this query are not those of a topic's partitions.
            checkpoint=Checkpoint(checkpoint.with_name("none")),
            table=nothing,
            client=nothing,
            start=Start(topic=topic, noted_ends={}),
            stage=nothing,
        )
        batches.stop, batches.seen, batches.enough, batches.broken = stop, [], enough, broken
        return batches

    stop: threading.Event
    seen: list[int]
    enough: int
    broken: tuple[int, ...]


def unasked() -> Offsets:
    raise AssertionError("nobody asked for a drain")


def run(queries: list[Any], lease: Lease, stop: threading.Event, ends: driver.Ends = unasked) -> Ending:
    """Call `driver.run`; a deadlock fails the test instead of blocking the test run."""
    done: list[Ending] = []
    error: list[BaseException] = []

    def target() -> None:
        try:
            done.append(driver.run(queries, lease, stop, ends))
        except BaseException as raised:
            error.append(raised)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the driver does not stop"
    assert not any(query.isActive for query, _ in queries)
    if error:
        raise error[0]
    return done[0]
