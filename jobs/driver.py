"""The life of a driver: queries run until they are drained, asked to stop, or fail."""

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

from jobs.connectors.control import Lease
from jobs.microbatch import MicroBatches
from jobs.refusal import Refusal

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
QUIET_SECONDS = 15.0


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set: the micro-batch under way finishes first."""
    stop = threading.Event()

    def request(number: int, _frame: FrameType | None) -> None:
        log.info("%s: stopping after the current micro-batch", signal.Signals(number).name)
        stop.set()

    before = {number: signal.signal(number, request) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StreamFailedError(Refusal):
    """A query ended with an error of Spark's; the log above has all of it."""


def run(queries: list[tuple[StreamingQuery, MicroBatches]], lease: Lease, stop: threading.Event) -> None:
    """Wait for all queries; if one fails or the lease is lost all are stopped, and the reason is raised."""
    try:
        while any(query.isActive for query, _ in queries) and not stop.is_set():
            lease.check()
            if any(batches.failure or _failed(query, batches) for query, batches in queries):
                break
            stop.wait(POLL_SECONDS)
    finally:
        for query, batches in queries:
            _stop_between_batches(query, batches)
    lease.check()
    for query, batches in queries:
        if batches.failure:
            raise batches.failure
        if _failed(query, batches):
            raise StreamFailedError(f"stream {query.name!r} failed: {_first_line(query)}")


def _first_line(query: StreamingQuery) -> str:
    return str(query.exception()).strip().partition("\n")[0]


def _failed(query: StreamingQuery, batches: MicroBatches) -> bool:
    return not query.isActive and query.exception() is not None and not batches.turned_away


def _stop_between_batches(query: StreamingQuery, batches: MicroBatches) -> None:
    """Stopping inside `foreachBatch` ends in a StackOverflowError, so wait until Spark has committed the last one.

    No lock is held while Spark stops: it waits for its thread, which may just ask us to begin a batch.
    """
    batches.close()
    deadline = time.monotonic() + QUIET_SECONDS
    while query.isActive and not _committed(query, batches.finished) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS / 10)
    with suppress(StreamingQueryException):
        query.stop()


def _committed(query: StreamingQuery, batch: int) -> bool:
    progress = query.lastProgress
    return batch < 0 or (progress is not None and progress.batchId >= batch)
