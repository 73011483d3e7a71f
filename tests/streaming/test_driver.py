"""A driver ends between two micro-batches, whichever way it is asked, and its receipt gives the reason."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from kafka.errors import KafkaTimeoutError
from obstore.store import MemoryStore
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from jobs.control import lease as lease_module
from jobs.control.checkpoint import Offsets
from jobs.control.epochs import Epoch, Phase, Receipt, Stop
from jobs.control.folder import Control
from jobs.control.lease import Lease, LeaseLostError
from jobs.pipelines.layout import control_of
from jobs.settings import Settings
from jobs.storage.documents import Documents
from jobs.streaming import driver
from jobs.streaming.driver import Ending
from tests.processes import wait_until
from tests.streaming.counting import ENDLESS, JOB, Counting, run, unasked

pytestmark = pytest.mark.spark


# -- A signal --


def test_a_busy_query_stops_and_goes_on_where_it_was(busy, lease: Lease) -> None:
    """No batch begins twice: each stop waited until Spark had committed the last one."""
    seen: list[int] = []
    for _ in range(8):
        stop = threading.Event()
        query, batches = busy(stop)
        ending = run([(query, batches)], lease, stop)
        assert len(batches.seen) >= 3
        seen += batches.seen
        last = seen[-1]
        assert ending == Ending(
            why="stopped by a signal", batches={"numbers": last}, offsets={"numbers": {0: last + 1}}
        )
    assert seen == list(range(len(seen)))


def test_the_error_of_one_query_stops_the_others_and_is_the_one_that_is_told(busy, lease: Lease) -> None:
    stop = threading.Event()
    queries = [busy(stop, "sound", enough=ENDLESS), busy(stop, "broken", broken=(2,))]
    with pytest.raises(ValueError, match="batch 2 is broken"):
        run(queries, lease, stop)


def test_a_query_that_spark_ends_is_told_by_its_error_class(
    spark: SparkSession, busy, lease: Lease, tmp_path: Path
) -> None:
    stop = threading.Event()
    batches = Counting.new(stop, tmp_path / "broken")
    with pytest.raises(driver.QueryFailedError, match=r"^stream 'broken' failed: .*DIVIDE_BY_ZERO"):
        run([busy(stop, "sound", enough=ENDLESS), (broken_query(spark, tmp_path / "broken"), batches)], lease, stop)


def broken_query(spark: SparkSession, checkpoint: Path) -> StreamingQuery:
    records = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    writer = records.selectExpr("1 / (value - value)").writeStream.queryName(checkpoint.name).format("noop")
    return writer.option("checkpointLocation", str(checkpoint)).start()


def test_a_query_that_waits_for_room_is_not_stalled(busy, control: Control, lease: Lease) -> None:
    stop = threading.Event()
    query, batches = busy(stop, enough=ENDLESS)
    batches.waits_for_room = True
    watch = driver._Watch([(query, batches)], lease, unasked)
    began = watch._progress[0].stepped
    try:
        wait_until(lambda: time.time() > began, "the clock moves")
        watch.show()
        assert lease._beat.queries[0].stepped > began
    finally:
        batches.waits_for_room = False
        stop.set()
        run([(query, batches)], lease, stop)


def test_a_receipt_that_finds_no_room_hides_no_error(control: Control, tmp_path: Path) -> None:
    """The job's folder is a file, so nothing can be written into it, as on a full disk."""
    settings = replace(Settings.from_env({}), lake_root=tmp_path)

    def work(lease: Lease, stop: threading.Event) -> Ending:
        folder = tmp_path / control_of("failing")
        folder.rename(tmp_path / "aside")
        folder.touch()
        raise ValueError("batch 2 is broken")

    with pytest.raises(ValueError, match="batch 2 is broken"):
        driver.supervised(settings, "failing", work)


def test_a_driver_that_is_overtaken_stops_its_queries(busy, control: Control, lease: Lease) -> None:
    stop = threading.Event()
    query, batches = busy(stop, enough=ENDLESS)
    wait_until(lambda: bool(batches.seen), "the first batch", 60)
    control.end(lease.epoch, Receipt(time=time.time(), clean=False, cause="declared dead"))
    with pytest.raises(LeaseLostError):
        run([(query, batches)], lease, stop)


def test_a_driver_that_ends_looks_whether_it_was_overtaken(
    busy, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat has not seen it yet, but the driver must not report an end in order."""
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 600)
    lease, stop = Lease.acquire(control, {}), threading.Event()
    control.end(lease.epoch, Receipt(time=time.time(), clean=False, cause="declared dead"))
    with pytest.raises(LeaseLostError):
        run([busy(stop)], lease, stop)
    assert not lease.is_lost
    lease.release(Receipt(time=time.time(), clean=True, cause="end of the test"))


class Away(Documents):
    """A store that does not answer for a while."""

    away = threading.Event()

    def exists(self, name: str) -> bool:
        if self.away.is_set():
            raise OSError(5, "Input/output error")
        return super().exists(name)


def test_a_control_folder_that_does_not_answer_for_a_while_ends_nobody(busy, control: Control) -> None:
    documents = Away(MemoryStore())
    lease, stop = Lease.acquire(Control(documents, JOB), {}), threading.Event()
    query, batches = busy(stop, enough=ENDLESS)

    def watch() -> None:
        try:
            documents.away.set()
            count = len(batches.seen)
            wait_until(lambda: len(batches.seen) > count + 5, "some batches", 60)
        finally:
            documents.away.clear()
            stop.set()

    watching = threading.Thread(target=watch)
    watching.start()
    ending = run([(query, batches)], lease, stop)
    watching.join()
    assert ending.why == "stopped by a signal"
    assert ending.batches["numbers"] >= 5
    lease.release(Receipt(time=time.time(), clean=True, cause="end of the test"))


def test_a_query_that_has_read_all_ends_by_itself(spark: SparkSession, lease: Lease, tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "one.txt").write_text("a\nb\n")
    stop = threading.Event()
    batches = Counting.new(stop, tmp_path / "lines", enough=ENDLESS)
    writer = spark.readStream.text(str(tmp_path / "records")).writeStream.foreachBatch(batches)
    writer = writer.option("checkpointLocation", str(tmp_path / "lines")).trigger(availableNow=True)
    ending = run([(writer.start(), batches)], lease, stop)
    assert ending == Ending(why="caught up", batches={"lines": 0}, offsets={"lines": {0: 1}})


# -- The control folder --


def test_a_request_in_the_control_folder_stops_it(busy, control: Control, lease: Lease) -> None:
    stop = threading.Event()
    query, batches = busy(stop, enough=ENDLESS)
    control.ask_to_stop(lease.epoch, Stop(time=time.time(), by="an operator"))
    ending = run([(query, batches)], lease, stop)
    assert ending.why == "stopped by an operator"
    assert ending.batches == ({"numbers": batches.seen[-1]} if batches.seen else {})


def test_a_drain_ends_at_the_offsets_seen_when_it_was_first_asked(busy, control: Control, lease: Lease) -> None:
    """The topics go on growing, so ends that are read later would never be reached."""
    stop = threading.Event()
    one, other = busy(stop, "one", enough=ENDLESS), busy(stop, "other", enough=ENDLESS)
    first: list[Offsets] = []

    def ends() -> Offsets:
        if first:
            return {topic: {0: ENDLESS} for topic in ("one", "other")}
        # The second partition is empty, so the drain does not wait for it.
        first.append({"one": {0: len(one[1].seen) + 3, 1: 0}, "other": {0: len(other[1].seen) + 20, 1: 0}})
        return first[0]

    control.ask_to_stop(lease.epoch, Stop(time=time.time(), by="an operator", drain=True))
    ending = run([one, other], lease, stop, ends)
    assert ending.why == "drained and stopped by an operator"
    assert all(ending.offsets[topic][0] >= wanted[0] for topic, wanted in first[0].items())
    assert all(ending.offsets[topic][0] < wanted[0] + 100 for topic, wanted in first[0].items())


def test_what_is_drained_already_stops_at_once(busy, control: Control, lease: Lease) -> None:
    control.ask_to_stop(lease.epoch, Stop(time=time.time(), by="an operator", drain=True))
    stop = threading.Event()
    ending = run([busy(stop, enough=ENDLESS)], lease, stop, lambda: {"numbers": {0: 0}})
    assert ending.why == "drained and stopped by an operator"


def test_a_drain_asks_again_while_kafka_does_not_answer(busy, control: Control, lease: Lease) -> None:
    silent = iter([True, True])

    def ends() -> Offsets:
        if next(silent, False):
            raise KafkaTimeoutError
        return {"numbers": {0: 1}}

    control.ask_to_stop(lease.epoch, Stop(time=time.time(), by="an operator", drain=True))
    stop = threading.Event()
    assert run([busy(stop, enough=ENDLESS)], lease, stop, ends).why == "drained and stopped by an operator"
    assert next(silent, None) is None


def test_a_drain_whose_patience_is_over_stops_undrained(busy, control: Control, lease: Lease) -> None:
    control.ask_to_stop(lease.epoch, Stop(time=time.time(), by="an operator", seconds=1.0, drain=True))
    stop = threading.Event()
    asked = time.monotonic()
    ending = run([busy(stop, enough=ENDLESS)], lease, stop, lambda: {"numbers": {0: ENDLESS}})
    assert ending.why == "stopped by an operator, not yet drained"
    assert 0.9 < time.monotonic() - asked < 30


def test_a_drain_in_vain_is_hurried_by_a_later_request(busy, control: Control, lease: Lease) -> None:
    stop, drains = threading.Event(), threading.Event()

    def ends() -> Offsets:
        drains.set()
        control.ask_to_stop(lease.epoch, Stop(time=time.time(), by="somebody in a hurry"))
        return {"numbers": {0: ENDLESS}}

    control.ask_to_stop(lease.epoch, Stop(time=time.time(), by="an operator", drain=True))
    ending = run([busy(stop, enough=ENDLESS)], lease, stop, ends)
    assert drains.is_set()
    assert ending.why == "stopped by somebody in a hurry"


def test_the_heartbeat_tells_what_spark_says_of_the_queries(busy, control: Control, lease: Lease) -> None:
    stop, before, seen = threading.Event(), time.time(), []

    def watch() -> None:
        """Stop the driver as soon as its heartbeat shows a batch."""
        try:
            wait_until(lambda: shows_a_batch(control.epoch(1)), "a beat with progress", 30)
            seen.append(control.epoch(1))
        finally:
            stop.set()

    query, batches = busy(stop, enough=ENDLESS)
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        run([(query, batches)], lease, stop)
    finally:
        stop.set()
        thread.join()
    ((told,),) = [epoch.beat.queries for epoch in seen]
    assert (told.topic, told.rows, told.lag) == ("numbers", 1, None)
    assert 2 <= told.batch <= batches.finished
    assert before < told.stepped < time.time()
    assert told.batch_seconds > 0
    assert told.rows_per_second > 0
    wait_until(lambda: control.epoch(1).phase is Phase.STOPPING, "the last beat", 10)


def shows_a_batch(epoch: Epoch) -> bool:
    return (
        epoch.phase is Phase.RUNNING and epoch.beat is not None and any((q.batch or 0) > 1 for q in epoch.beat.queries)
    )


@pytest.mark.parametrize(
    ("latest", "end", "lag"),
    [
        (None, None, None),
        ("", "", None),
        ("null", "null", None),
        ("null", '{"numbers":{"0":3}}', None),
        ('{"numbers":{"0":10}}', "null", None),
        ('{"numbers":{"0":10}}', '{"numbers":{"0":10}}', 0),
        ('{"numbers":{"0":10,"1":5}}', '{"numbers":{"0":7,"1":5}}', 3),
        ('{"numbers":{"0":10,"1":5}}', '{"numbers":{"0":7}}', 8),
    ],
    ids=["unknown", "empty", "null", "latest is null", "end is null", "caught up", "behind", "a new partition"],
)
def test_lag_by_spark_s_account(latest: str | None, end: str | None, lag: int | None) -> None:
    assert driver._lag(latest, end) == lag
