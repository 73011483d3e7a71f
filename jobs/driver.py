"""The life of a driver: queries run until they are drained, asked to stop, or fail."""

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

from jobs.microbatch import MicroBatches

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


def run(queries: list[tuple[StreamingQuery, MicroBatches]], stop: threading.Event) -> None:
    """Wait for all queries; if one fails the others are stopped too, and its error is raised."""
    try:
        while any(query.isActive for query, _ in queries) and not stop.is_set():
            if any(batches.failure for _, batches in queries) or any(_failed(query) for query, _ in queries):
                break
            time.sleep(POLL_SECONDS)
    finally:
        for query, batches in queries:
            _stop_between_batches(query, batches)
    for query, batches in queries:
        if batches.failure:
            raise batches.failure
        if _failed(query) and not stop.is_set():
            raise query.exception() or RuntimeError(f"query {query.name} ended")


def _failed(query: StreamingQuery) -> bool:
    return not query.isActive and query.exception() is not None


def _stop_between_batches(query: StreamingQuery, batches: MicroBatches) -> None:
    """Stopping inside `foreachBatch` ends in a StackOverflowError, so wait until Spark has committed the last one."""
    deadline = time.monotonic() + QUIET_SECONDS
    while query.isActive and time.monotonic() < deadline:
        with batches.running:
            progress = query.lastProgress
            if batches.finished < 0 or (progress and progress.batchId >= batches.finished):
                query.stop()
                return
        time.sleep(0.02)
    with batches.running:
        try:
            query.stop()
        except StreamingQueryException:
            log.debug("the query ended with an error", exc_info=True)
