"""The life of a driver: it takes the lease, and runs its queries until they are drained, asked to stop, or fail."""

import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from kafka.errors import KafkaError
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from jobs.control.checkpoint import Offsets
from jobs.control.epochs import BEAT_SECONDS, Phase, QueryProgress, Receipt, Stop
from jobs.control.folder import Control
from jobs.control.lease import Lease
from jobs.refusal import Refusal
from jobs.settings import Settings
from jobs.signals import stop_on_signal
from jobs.streaming.microbatch import MicroBatches

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
# How long a driver that stops waits until Spark has committed the last micro-batch.
QUIET_SECONDS = 15.0
_CAUSE_LENGTH = 600

Queries = Sequence[tuple[StreamingQuery, MicroBatches]]
# Returns the present end of each topic, for a driver that must read up to there and no further.
Ends = Callable[[], Offsets]


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Why a driver ended cleanly, and how far it got."""

    why: str
    batches: dict[str, int]
    offsets: Offsets


def supervised(settings: Settings, job: str, work: Callable[[Lease, threading.Event], Ending]) -> None:
    """Hold the job's lease while ``work`` runs, and write a receipt about its end, also after a failure.

    ``work`` gets the lease, and an event that is set when it must stop: after SIGTERM or SIGINT.
    """
    lease = Lease.acquire(Control.of(settings.lake_root, job), stall_seconds=settings.stall_seconds)
    log.info("%s holds epoch %d", job, lease.epoch)
    try:
        with stop_on_signal(_report_signal) as stop:
            ending = work(lease, stop)
    except BaseException as error:
        _leave(lease, Receipt(time=time.time(), clean=False, cause=cause_of(error)))
        raise
    lease.release(
        Receipt(time=time.time(), clean=True, cause=ending.why, batches=ending.batches, offsets=ending.offsets)
    )
    log.info("%s: %s; receipt of epoch %d written", job, ending.why, lease.epoch)


def _report_signal(number: signal.Signals) -> None:
    log.info("%s: stopping after the current micro-batch", number.name)


def _leave(lease: Lease, receipt: Receipt) -> None:
    """Write the receipt of a failure. On a full disk this fails: then only the log has the cause.

    Airflow notices the end all the same, because the driver writes no more heartbeats.
    """
    try:
        lease.release(receipt)
    except OSError as error:
        log.error("no receipt can be written (%s); epoch %d ended: %s", error, lease.epoch, receipt.cause)


def start_query(
    writer: DataStreamWriter, batches: MicroBatches, trigger_ms: int | None
) -> tuple[StreamingQuery, MicroBatches]:
    """Start a query that begins a micro-batch every ``trigger_ms``. With None it ends when it has caught up."""
    writer = writer.foreachBatch(batches).option("checkpointLocation", str(batches.checkpoint.path))
    trigger = {"availableNow": True} if trigger_ms is None else {"processingTime": f"{trigger_ms} milliseconds"}
    return writer.trigger(**trigger).start(), batches


class QueryFailedError(Refusal):
    """A query ended with an error of Spark's; the log above has the whole error."""


def run(queries: Queries, lease: Lease, stop: threading.Event, ends: Ends) -> Ending:
    """Wait until all queries have ended, or until the driver is asked to stop; then stop all of them.

    If a query fails or the lease is lost, all queries are stopped, too, and the reason is raised.
    """
    watch = _Watch(queries, lease, ends)
    why = "caught up"
    try:
        lease.update_heartbeat(phase=Phase.RUNNING)
        while any(query.isActive for query, _ in queries):
            if lease.is_lost or any(batches.failure or _failed(query, batches) for query, batches in queries):
                break
            if asked := watch.asked(stop):
                why = asked
                break
            watch.show()
            stop.wait(POLL_SECONDS)
        lease.update_heartbeat(phase=Phase.STOPPING)
    finally:
        for query, batches in queries:
            _stop_between_batches(query, batches)
    lease.check()
    for query, batches in queries:
        if batches.failure:
            raise batches.failure
        if _failed(query, batches):
            raise QueryFailedError(f"stream {query.name!r} failed: {cause_of(query.exception())}")
    return Ending(
        why=why,
        batches={batches.topic: batches.finished for _, batches in queries if batches.finished >= 0},
        offsets={batches.topic: batches.reached for _, batches in queries},
    )


class _Watch:
    """Watches a driver's queries while they run."""

    def __init__(self, queries: Queries, lease: Lease, ends: Ends) -> None:
        self._queries = queries
        self._lease = lease
        self._ends = ends
        self._drain_to: Offsets | None = None
        # The request to drain, and when this driver saw it first, by the monotonic clock. The time in the request is
        # not used: it comes from another machine, and a time of day may be corrected.
        self._asked: tuple[Stop, float] | None = None
        self._shown_at = 0.0
        now = time.time()
        self._progress = [QueryProgress(topic=batches.topic, stepped=now) for _, batches in queries]
        self._seen: list[object] = [None] * len(queries)

    def asked(self, stop: threading.Event) -> str | None:
        """Why the driver must end now; None if it need not."""
        if stop.is_set():
            return "stopped by a signal"
        request = self._lease.stop
        if request is None:
            return None
        if not request.drain:
            return f"stopped by {request.by}"
        if self._asked is None or self._asked[0] != request:
            self._asked, self._drain_to = (request, time.monotonic()), None
        if time.monotonic() - self._asked[1] > request.seconds:
            return f"stopped by {request.by}, not yet drained"
        return f"drained and stopped by {request.by}" if self._is_drained() else None

    def show(self) -> None:
        """Hand Spark's progress of the queries to the heartbeat, once per heartbeat at most."""
        if time.monotonic() - self._shown_at < BEAT_SECONDS:
            return
        self._shown_at = time.monotonic()
        self._progress = [self._look(index) for index in range(len(self._queries))]
        self._lease.update_heartbeat(queries=tuple(self._progress))

    def _is_drained(self) -> bool:
        """Whether the queries have read all records that were in the topics when the request to drain was seen."""
        if self._drain_to is None:
            try:
                self._drain_to = self._ends()
            except KafkaError as error:
                log.warning("draining: the end offsets of the topics cannot be read, trying again (%s)", error)
                return False
            log.info("draining up to %s", self._drain_to)
        return all(
            batches.reached.get(partition, 0) >= end
            for _, batches in self._queries
            for partition, end in self._drain_to[batches.topic].items()
        )

    def _look(self, index: int) -> QueryProgress:
        query, batches = self._queries[index]
        if batches.waits_for_room:
            # The query waits for room on the disk, and another incident reports that: it is not stalled.
            return replace(self._progress[index], stepped=time.time())
        last = query.lastProgress
        if last is None or (seen := (last.batchId, last.timestamp)) == self._seen[index]:
            return self._progress[index]
        # An idle query reports itself every ten seconds: that is a step, too.
        self._seen[index] = seen
        source = last.sources[0]
        return QueryProgress(
            topic=batches.topic,
            stepped=time.time(),
            batch=last.batchId,
            rows=last.numInputRows,
            rows_per_second=round(last.processedRowsPerSecond or 0.0, 1),
            batch_seconds=round(last.durationMs.get("triggerExecution", 0) / 1000, 3),
            lag=_lag(source.latestOffset, source.endOffset),
            watermark=last.eventTime.get("watermark"),
        )


def _lag(latest: str | None, end: str | None) -> int | None:
    """How many records a batch left in the topic, by Spark's own report."""
    ends, latests = json.loads(end or "null"), json.loads(latest or "null")
    if ends is None or latests is None:
        return None
    return sum(
        int(last) - int(ends.get(topic, {}).get(partition, 0))
        for topic, partitions in latests.items()
        for partition, last in partitions.items()
    )


def cause_of(error: BaseException | None) -> str:
    """An error in one readable paragraph: a refusal's sentence, Spark's error class, never a trace."""
    if isinstance(error, Refusal):
        return str(error)
    if isinstance(error, Py4JJavaError):
        return _one_line(f"Spark failed: {_root_cause(error)}")
    if isinstance(error, Py4JError | ConnectionError | EOFError):
        return "Spark's JVM does not answer any more (killed, or out of memory): see the end of the driver's log"
    if isinstance(error, PySparkException):
        return _one_line(f"{error.getCondition() or type(error).__name__}: {error}")
    return _one_line(f"{type(error).__name__}: {error}").removesuffix(":")


def _root_cause(error: Py4JJavaError) -> str:
    with suppress(Py4JError, OSError):
        cause = error.java_exception
        while cause.getCause() is not None:
            cause = cause.getCause()
        return str(cause.toString())
    return str(error)


def _one_line(text: str) -> str:
    """The message without the traces that Java puts below it."""
    sentence = text.partition("=== Streaming Query ===")[0]
    lines = [line.strip() for line in sentence.splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("at ", "JVM stacktrace", "===", "..."))]
    return " ".join(told)[:_CAUSE_LENGTH]


def _failed(query: StreamingQuery, batches: MicroBatches) -> bool:
    return not query.isActive and query.exception() is not None and not batches.turned_away


def _stop_between_batches(query: StreamingQuery, batches: MicroBatches) -> None:
    """Stop a query, but only after Spark has committed its last batch.

    If it is stopped inside `foreachBatch`, it ends with a StackOverflowError. The lock of `MicroBatches` is not held
    while Spark stops the query. Spark waits for the query's thread, and this thread may need the lock to begin a batch.
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
