"""Recompute on a real broker with the real jobs: which slices are closed and become final, and what readers see."""

import json
import time
from decimal import Decimal
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from jobs.lake.final import FinalTable
from jobs.lake.ledger import Ledger
from jobs.lake.slices import State
from jobs.pipelines import PIPELINES
from jobs.pipelines.slices import slice_named
from jobs.query.lake import Lake
from jobs.settings import Settings
from jobs.streaming import ingest, live
from tests import batch
from tests.conftest import Produce
from tests.judges import checker, oracle
from tests.judges.oracle import Record

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.timeout(600)]

SUM = PIPELINES["rolling_sum"]


def numbers(count: int, *, ago_ms: int = 90_000, spread_ms: int = 120_000, first: int = 0) -> list[Record]:
    """Records with times in several slices, out of order."""
    since = int(time.time() * 1000) - ago_ms
    made = []
    for number in range(first, first + count):
        at = since + number * 7919 % spread_ms
        value = b'{"id":%d,"ts":%d,"value":%d.25}' % (number, at, number)
        made.append(Record(partition=number % 3, arrival_ms=0, key=b"k%d" % (number % 9), value=value))
    return made


def current(settings: Settings, pipeline: str = "rolling_sum") -> list[dict[str, object]]:
    return Lake(settings.lake_root).query(f"SELECT * FROM {pipeline}").to_pylist()


def defects(settings: Settings, pipeline: str) -> list[str]:
    """Defects after `run-1`, which made every slice final that was over."""
    records = oracle.read_topic(settings.kafka.bootstrap, PIPELINES[pipeline].source.name)
    due_ms = batch.planned_ms(settings, PIPELINES[pipeline], "run-1")
    return checker.final_defects(settings.lake_root, pipeline, records, due_ms=due_ms)


@pytest.mark.parametrize("name", PIPELINES)
def test_live_turns_final_and_equals_the_oracle(
    name: str, spark: SparkSession, settings: Settings, produce: Produce
) -> None:
    pipeline = PIPELINES[name]
    produce("numbers", numbers(600))
    produce("lines", [Record(partition=-1, arrival_ms=0, value=b"the sea the tide %d" % n) for n in range(50)])
    live.run(settings, pipeline, until_caught_up=True)
    before = current(settings, name)
    assert before
    assert {row["finality"] for row in before} == {"live"}
    ingest.run(settings, until_caught_up=True)
    done = batch.whole(settings, pipeline, "run-1")
    assert done.versions
    assert not done.blocked
    after = current(settings, name)
    assert {row["finality"] for row in after} == {"final"}
    assert {row["version"] for row in after} == {1}
    assert defects(settings, name) == []
    judge_topic(settings, name, after)
    final, ledger = FinalTable.read(settings.lake_root, pipeline), Ledger.read(settings.lake_root, pipeline)
    assert final is not None
    assert ledger is not None
    for slice_, header in final.headers().items():
        states = [entry.state for entry in ledger.history(slice_)]
        assert states == [State.OPEN, State.CLOSED, State.RECOMPUTING, State.AUDITING, State.FINAL]
        assert ledger.newest([slice_])[slice_].checksum == header.checksum


def judge_topic(settings: Settings, name: str, rows: list[dict[str, object]]) -> None:
    """The newest message of each key is a final row."""
    topic = PIPELINES[name].final_topic.name
    newest = {
        (record.key or b"").decode(): json.loads(record.value, parse_float=Decimal) if record.value else None
        for record in oracle.read_topic(settings.kafka.bootstrap, topic)
    }
    assert len([message for message in newest.values() if message]) == len(rows)
    assert {message["finality"] for message in newest.values() if message} == {"final"}


def test_the_same_inputs_have_the_same_checksum(spark: SparkSession, settings: Settings, produce: Produce) -> None:
    produce("numbers", numbers(300))
    ingest.run(settings, until_caught_up=True)
    batch.whole(settings, SUM, "run-1")
    final = FinalTable.read(settings.lake_root, SUM)
    assert final is not None
    first = final.headers()
    again = batch.whole(settings, SUM, "run-2", slices=[slice_named(SUM, name) for name in first])
    assert set(again.versions.values()) == {2}
    second = FinalTable.read(settings.lake_root, SUM)
    assert second is not None
    assert {n: h.checksum for n, h in second.headers().items()} == {n: h.checksum for n, h in first.items()}
    assert {row["version"] for row in current(settings)} == {2}
    assert defects(settings, "rolling_sum") == []


def test_nothing_is_due_twice(spark: SparkSession, settings: Settings, produce: Produce, tmp_path: Path) -> None:
    produce("numbers", numbers(100))
    ingest.run(settings, until_caught_up=True)
    # If the time were read twice, one more slice could be over the second time.
    at = time.time()
    batch.whole(settings, SUM, "run-1", at=at)
    planned = batch.plan(settings, SUM, "run-2", at=at)
    assert planned.survey.due == ()
    assert planned.plan.unannounced == ()
    assert planned.survey.tide_line_ms is not None
