"""When a slice is closed, on a real broker: what holds it open, and what comes too late to move its boundary."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from kafka import KafkaProducer, TopicPartition
from pyspark.sql import SparkSession

from jobs import ingest
from jobs.connectors import kafka
from jobs.connectors.final import FinalTable
from jobs.connectors.ledger import Ledger
from jobs.connectors.planning import Planned
from jobs.connectors.states import Boundary
from jobs.pipelines import PIPELINES
from jobs.settings import Settings
from tests import batch, checker, oracle, processes
from tests.integration.test_recompute_broker import numbers
from tests.oracle import Record

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.timeout(300)]

Produce = Callable[[str, list[Record]], None]
SUM = PIPELINES["rolling_sum"]


def land(settings: Settings) -> None:
    ingest.run(settings, until_caught_up=True)


def boundaries(settings: Settings) -> dict[str, Boundary | None]:
    ledger = Ledger.read(settings.lake_root, SUM)
    return {name: entry.boundary for name, entry in ledger.newest().items()} if ledger else {}


def judge(settings: Settings, events: int) -> None:
    """Everything that the topic holds is final."""
    final = FinalTable.read(settings.lake_root, SUM)
    assert final is not None
    assert sum(header.events for header in final.headers().values()) == events
    records = oracle.read_topic(settings.kafka.bootstrap, "numbers")
    assert checker.final_defects(settings.lake_root, SUM.name, records) == []


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
    # What arrives from now on moves no boundary; it is counted all the same, since it is landed when the plan looks.
    produce("numbers", numbers(30, first=66))
    assert is_held(batch.plan(settings, SUM, "run-2"))
    land(settings)
    batch.whole(settings, SUM, "run-3")
    judge(settings, 96)
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
    judge(settings, 90)
    assert {name: boundaries(settings)[name] for name in taken} == taken


@pytest.mark.parametrize("grown", ["before its boundary", "after its boundary"])
def test_a_partition_that_is_new_holds_a_slice_only_if_it_came_before_its_boundary(
    grown: str, spark: SparkSession, settings: Settings, produce: Produce
) -> None:
    produce("numbers", numbers(60))
    land(settings)
    if grown == "after its boundary":
        batch.plan(settings, SUM, "run-1")
    with kafka.admin(settings.kafka) as client:
        client.create_partitions({"numbers": 4})
        processes.wait_until(
            lambda: kafka.require(client, ["numbers"])["numbers"].partitions == 4, "the topic has four partitions"
        )
    produce("numbers", [replace(record, partition=3) for record in numbers(6, first=60)])
    planned = batch.plan(settings, SUM, "run-2")
    assert is_held(planned) is (grown == "before its boundary")
    land(settings)
    batch.whole(settings, SUM, "run-3")
    judge(settings, 66)


def test_what_retention_had_cut_is_not_waited_for(spark: SparkSession, settings: Settings, produce: Produce) -> None:
    produce("numbers", numbers(90))
    with kafka.admin(settings.kafka) as client:
        client.delete_records({TopicPartition("numbers", 0): 30, TopicPartition("numbers", 1): 10})
    # Of partition 0 nothing is left.
    land(settings)
    batch.whole(settings, SUM, "run-1")
    judge(settings, 50)


def test_of_an_empty_topic_nothing_is_due(spark: SparkSession, settings: Settings) -> None:
    planned = batch.plan(settings, SUM, "run-1")
    assert (planned.survey.due, planned.survey.waiting, planned.survey.tide_line_ms) == ((), {}, None)
    land(settings)
    assert batch.plan(settings, SUM, "run-2").survey.due == ()
    assert boundaries(settings) == {}


def test_quiet_slices_become_final_too(spark: SparkSession, settings: Settings, produce: Produce) -> None:
    """The tide line must pass minutes in which nothing happened."""
    produce("numbers", [*numbers(10, ago_ms=600_000, spread_ms=1_000), *numbers(10, ago_ms=60_000, spread_ms=1_000)])
    land(settings)
    # Between two moments one more slice may be over.
    at = time.time()
    batch.whole(settings, SUM, "run-1", at=at)
    final = FinalTable.read(settings.lake_root, SUM)
    assert final is not None
    empty = [header for header in final.headers().values() if not header.rows]
    assert len(empty) >= 7
    planned = batch.plan(settings, SUM, "run-2", at=at)
    assert planned.survey.due == ()
    assert planned.survey.tide_line_ms is not None
    judge(settings, 20)
