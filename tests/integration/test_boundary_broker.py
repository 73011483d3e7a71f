"""When a slice is closed, on a real broker: why it stays open, and which records come too late to move its boundary."""

import logging
import threading
import time
from dataclasses import replace

import pytest
from kafka import KafkaProducer, TopicPartition
from kafka.admin import ConfigResource
from pyspark.sql import SparkSession

from jobs.broker import kafka
from jobs.broker.clock import broker_clock, broker_now_ms
from jobs.finality import planning, publishing
from jobs.finality.planning import Planned
from jobs.lake.final import FinalTable
from jobs.lake.ledger import Ledger
from jobs.lake.slices import Boundary, Header
from jobs.pipelines import PIPELINES
from jobs.pipelines.slices import Slice, over_at, slice_at, slice_named
from jobs.pipelines.source import CLOCK, CLOCK_TOLERANCE_MS
from jobs.refusal import Refusal
from jobs.settings import Settings
from jobs.streaming import ingest, live
from tests import batch, processes
from tests.conftest import Produce, grow_topic
from tests.integration.test_recompute_broker import numbers
from tests.judges import checker, oracle

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.timeout(300)]

SUM = PIPELINES["rolling_sum"]


def land(settings: Settings) -> None:
    ingest.run(settings, until_caught_up=True)


def boundaries(settings: Settings) -> dict[str, Boundary | None]:
    ledger = Ledger.read(settings.lake_root, SUM)
    return {name: entry.boundary for name, entry in ledger.newest_of(ledger.days()).items()} if ledger else {}


def judge(settings: Settings, events: int, run: str) -> None:
    """Everything that the topic holds is final, and so is every slice that was over at the plan of the last run."""
    final = FinalTable.read(settings.lake_root, SUM)
    assert final is not None
    assert sum(header.events for header in final.headers().values()) == events
    records = oracle.read_topic(settings.kafka.bootstrap, "numbers")
    due_ms = batch.planned_ms(settings, SUM, run)
    assert checker.final_defects(settings.lake_root, SUM.name, records, due_ms=due_ms) == []


def is_held(planned: Planned) -> bool:
    return not planned.plan.work and bool(planned.survey.waiting)


def test_an_open_transaction_holds_slices_until_it_ends(
    spark: SparkSession, settings: Settings, produce: Produce
) -> None:
    produce("numbers", numbers(60))
    producer = KafkaProducer(bootstrap_servers=settings.kafka.bootstrap, transactional_id="writer")
    try:
        producer.init_transactions()
        producer.begin_transaction()
        for record in numbers(6, first=60):
            producer.send("numbers", record.value, key=record.key, partition=record.partition)
        producer.flush()
        land(settings)
        assert is_held(batch.plan(settings, SUM, "run-1"))
        taken = boundaries(settings)
        producer.commit_transaction()
    finally:
        producer.close()
    # Records that arrive from now on move no boundary. They are still counted, since they are landed at the plan.
    produce("numbers", numbers(30, first=66))
    assert is_held(batch.plan(settings, SUM, "run-2"))
    land(settings)
    batch.whole(settings, SUM, "run-3")
    judge(settings, 96, "run-3")
    assert {name: boundaries(settings)[name] for name in taken} == taken


def test_a_plan_that_comes_hours_late_only_takes_in_more(
    spark: SparkSession, settings: Settings, produce: Produce
) -> None:
    produce("numbers", numbers(60))
    land(settings)
    batch.plan(settings, SUM, "run-1")
    taken = boundaries(settings)
    produce("numbers", numbers(30, first=60))
    land(settings)
    batch.stage(settings, SUM, "run-1")
    batch.plan(settings, SUM, "run-2", later_seconds=3 * 3600)
    batch.stage(settings, SUM, "run-2")
    batch.audit(settings, SUM, "run-2")
    batch.publish(settings, SUM, "run-2")
    judge(settings, 90, "run-2")
    assert {name: boundaries(settings)[name] for name in taken} == taken


@pytest.mark.parametrize("grown", ["before its boundary", "after its boundary"])
def test_a_partition_that_is_new_holds_a_slice_only_if_it_came_before_its_boundary(
    grown: str, spark: SparkSession, settings: Settings, produce: Produce
) -> None:
    produce("numbers", numbers(60))
    land(settings)
    if grown == "after its boundary":
        batch.plan(settings, SUM, "run-1")
    grow_topic(settings.kafka, "numbers", 4)
    produce("numbers", [replace(record, partition=3) for record in numbers(6, first=60)])
    planned = batch.plan(settings, SUM, "run-2")
    assert is_held(planned) is (grown == "before its boundary")
    land(settings)
    batch.whole(settings, SUM, "run-3")
    judge(settings, 66, "run-3")


def test_what_retention_had_cut_is_not_waited_for(spark: SparkSession, settings: Settings, produce: Produce) -> None:
    produce("numbers", numbers(90))
    with kafka.admin(settings.kafka) as client:
        client.delete_records({TopicPartition("numbers", 0): 30, TopicPartition("numbers", 1): 10})
    # Partition 0 has no record left.
    land(settings)
    batch.whole(settings, SUM, "run-1")
    judge(settings, 50, "run-1")


def test_of_an_empty_topic_nothing_is_due(spark: SparkSession, settings: Settings) -> None:
    planned = batch.plan(settings, SUM, "run-1")
    assert (planned.survey.due, planned.survey.waiting, planned.survey.tide_line_ms) == ((), {}, None)
    land(settings)
    assert batch.plan(settings, SUM, "run-2").survey.due == ()
    assert boundaries(settings) == {}


def test_quiet_slices_become_final_too(spark: SparkSession, settings: Settings, produce: Produce) -> None:
    """The tide line must pass minutes without events."""
    produce("numbers", [*numbers(10, ago_ms=600_000, spread_ms=1_000), *numbers(10, ago_ms=60_000, spread_ms=1_000)])
    land(settings)
    # If the time were read twice, one more slice could be over the second time.
    at = time.time()
    batch.whole(settings, SUM, "run-1", at=at)
    final = FinalTable.read(settings.lake_root, SUM)
    assert final is not None
    empty = [header for header in final.headers().values() if not header.rows]
    assert len(empty) >= 7
    planned = batch.plan(settings, SUM, "run-2", at=at)
    assert planned.survey.due == ()
    assert planned.survey.tide_line_ms is not None
    judge(settings, 20, "run-1")


# -- Which clock decides --


def time_is(monkeypatch: pytest.MonkeyPatch, ahead_seconds: float) -> None:
    """Set this machine's clock for all code in this process."""
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + ahead_seconds)


def test_the_brokers_clock_is_read_without_noise(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    threads = threading.active_count()
    before_ms = time.time() * 1000
    with kafka.admin(settings.kafka) as client, broker_clock(client, settings.kafka) as clock:
        stamps = [clock() for _ in range(3)]
    # Broker and test run on one machine; a stamp has no fraction of a millisecond.
    assert before_ms - 1 <= stamps[0] <= stamps[1] <= stamps[2] <= time.time() * 1000
    assert caplog.records == []
    processes.wait_until(lambda: threading.active_count() <= threads, "the producer's thread has ended")


@pytest.mark.parametrize("ahead_seconds", [3600, -3600])
def test_a_machine_whose_clock_is_wrong_plans_and_streams_nothing(
    ahead_seconds: float, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_is(monkeypatch, ahead_seconds)
    with kafka.admin(settings.kafka) as client, broker_clock(client, settings.kafka) as clock:
        planner = planning.Planner(lake=batch.lake_of(settings, SUM), client=client, clock=clock)
        with pytest.raises(Refusal, match=r"set the clock that is wrong, e\.g\. by NTP"):
            planner.preview()
        with pytest.raises(Refusal, match=r"set the clock that is wrong"):
            planner.plan("ahead")
    for start in (lambda: live.run(settings, SUM), lambda: ingest.run(settings), lambda: broker_now_ms(settings.kafka)):
        with pytest.raises(Refusal, match=r"this machine's time is .*, the broker's is .*; set the clock"):
            start()
    assert boundaries(settings) == {}


def test_a_clock_that_is_off_by_seconds_changes_nothing(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    right_ms = time.time() * 1000
    time_is(monkeypatch, CLOCK_TOLERANCE_MS / 2000)
    assert broker_now_ms(settings.kafka) < right_ms + CLOCK_TOLERANCE_MS / 2


def test_a_clock_that_is_not_there_or_stamps_nothing_is_refused(settings: Settings) -> None:
    with kafka.admin(settings.kafka) as client:
        align = ConfigResource("topic", CLOCK.name, {"message.timestamp.type": "CreateTime"})
        client.alter_configs([align], incremental=True)
        with pytest.raises(Refusal, match=r"does not have message\.timestamp\.type=LogAppendTime: run the DAG"):
            broker_now_ms(settings.kafka)
        client.delete_topics([CLOCK.name])
        processes.wait_until(lambda: CLOCK.name not in client.list_topics(), "the topic is gone")
        with pytest.raises(Refusal, match=r"no topic tideline\.clock: run the DAG provision_topics"):
            broker_now_ms(settings.kafka)
        assert CLOCK.name not in client.list_topics()


def test_what_came_in_time_is_in_the_final_slice_whatever_clock_a_plan_was_made_by(
    spark: SparkSession, settings: Settings, produce: Produce
) -> None:
    """Plan with a clock that is an hour ahead, then publish without a look at the clock, as older versions did."""
    produce("numbers", numbers(1000, ago_ms=15_000, spread_ms=1_000))
    land(settings)
    hasty = slice_at(SUM, int(time.time() * 1000) - 15_000)
    plan = batch.plan(settings, SUM, "ahead", later_seconds=3600).plan
    assert hasty.name in {work.slice for work in plan.work}
    batch.stage(settings, SUM, "ahead")
    batch.audit(settings, SUM, "ahead")
    now_ms = broker_now_ms(settings.kafka)
    published = publishing.publish(batch.lake_of(settings, SUM), settings.kafka, "ahead", now_ms=now_ms)
    assert hasty.name in published.refused
    assert "by the broker's clock it is not over" in published.refused[hasty.name]
    assert all(over_at(SUM, slice_named(SUM, name)) <= now_ms for name in published.versions)
    publishing.publish(batch.lake_of(settings, SUM), settings.kafka, "ahead", now_ms=plan.as_of_ms)
    assert header(settings, hasty).version == 1
    events = header(settings, hasty).events
    produce("numbers", [replace(record, value=at(hasty, n)) for n, record in enumerate(numbers(3, first=1000))])
    land(settings)
    # By the broker's clock it is not over: it waits.
    with kafka.admin(settings.kafka) as client, broker_clock(client, settings.kafka) as clock:
        planner = planning.Planner(lake=batch.lake_of(settings, SUM), client=client, clock=clock)
        assert planner.plan("waiting").plan.work == ()
    batch.whole(settings, SUM, "healing")
    assert (header(settings, hasty).version, header(settings, hasty).events) == (2, events + 3)
    assert header(settings, hasty).reason == "3 missing events that had arrived in time"
    judge(settings, 1003, "healing")


def at(slice_: Slice, number: int) -> bytes:
    return b'{"id":%d,"ts":%d,"value":1}' % (5000 + number, slice_.start_ms + number)


def header(settings: Settings, slice_: Slice) -> Header:
    final = FinalTable.read(settings.lake_root, SUM)
    assert final is not None
    return final.headers()[slice_.name]
