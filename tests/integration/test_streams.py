"""Dirty traffic through the real broker and the real jobs: landed records, live rows, and messages in the topics."""

import json
import time
from decimal import Decimal
from pathlib import Path
from random import Random

import pytest
from kafka import KafkaProducer
from pyspark.sql import SparkSession

from jobs.broker import kafka
from jobs.control.epochs import Attach, Launch, Receipt, Stop
from jobs.control.folder import Control
from jobs.control.lease import Lease
from jobs.pipelines import PIPELINES, SOURCES
from jobs.query.lake import Lake
from jobs.refusal import Refusal
from jobs.settings import Settings
from jobs.streaming import ingest, live
from jobs.traffic.generator import records as traffic
from jobs.transforms.aggregate import aggregate
from tests import dirty, processes
from tests.conftest import Produce
from tests.judges import checker, oracle
from tests.judges.oracle import Record
from tests.query.test_query import as_json

pytestmark = [pytest.mark.integration, pytest.mark.spark]


def now_ms() -> int:
    return int(time.time() * 1000)


def lines(seed: int, count: int) -> list[Record]:
    made = traffic("lines", seed=seed, count=count, start_ms=None, late=0.05, duplicate=0.05, corrupt=0.05)
    shuffled = [
        Record(partition=-1, arrival_ms=0, key=r.key or b"k", value=r.value, headers=tuple(r.headers)) for r in made
    ]
    Random(seed).shuffle(shuffled)
    return shuffled


def newest_messages(bootstrap: str, topic: str) -> dict[str, dict[str, object]]:
    """Key -> the last message, read with a plain consumer."""
    return {
        (record.key or b"").decode(): json.loads(record.value or b"null", parse_float=Decimal)
        for record in oracle.read_topic(bootstrap, topic)
    }


def test_dirty_traffic_lands_once_and_live_equals_the_oracle(
    spark: SparkSession, settings: Settings, produce: Produce
) -> None:
    for round_ in range(3):
        produce("numbers", dirty.records(now_ms(), each=30, seed=round_))
        produce("lines", lines(round_, 400))
        for pipeline in PIPELINES.values():
            live.run(settings, pipeline, until_caught_up=True)
        ingest.run(settings, until_caught_up=True)
    bootstrap = settings.kafka.bootstrap
    landed = {source: oracle.read_topic(bootstrap, source) for source in ("numbers", "lines")}
    assert len(landed["numbers"]) > 2000
    for source, records in landed.items():
        assert checker.landed_defects(settings.lake_root, source, records) == []
    for name, pipeline in PIPELINES.items():
        records = landed[pipeline.source.name]
        assert checker.live_defects(settings.lake_root, name, records) == []
        judge_relation_and_topic(settings, name, records)
    judge_quarantine(settings, landed["numbers"])


def judge_relation_and_topic(settings: Settings, name: str, records: list[Record]) -> None:
    """The relation equals the newest rows of the table, and the topic's newest messages equal the relation."""
    pipeline = PIPELINES[name]
    table = checker.read_table(settings.lake_root / pipeline.live_table)
    assert len({row["batch"] for row in table.rows}) == 3
    wanted = checker.current_windows(name, table.rows)
    answer = Lake(settings.lake_root).query(f"SELECT * FROM {name}")
    columns = ["window_start", "window_end", *pipeline.value_columns, "finality", "version", "as_of"]
    assert answer.column_names == columns
    rows = {(checker._ms(row["window_start"]), row[pipeline.keys[0]]): row for row in answer.to_pylist()}
    assert len(rows) == answer.num_rows == len(wanted)
    for at, row in wanted.items():
        assert [rows[at][name] for name in pipeline.value_columns] == [row[name] for name in pipeline.value_columns]
        assert (rows[at]["finality"], rows[at]["version"], rows[at]["as_of"]) == ("live", 0, row["as_of"])
    messages = newest_messages(settings.kafka.bootstrap, pipeline.output)
    shown = json.loads(as_json(answer), parse_float=Decimal)
    assert messages == {
        json.dumps([row["window_start"], row[pipeline.keys[0]]], separators=(",", ":"), ensure_ascii=False): row
        for row in shown
    }


def judge_quarantine(settings: Settings, records: list[Record]) -> None:
    lake = Lake(settings.lake_root)
    (counts,) = lake.query(
        "SELECT (SELECT count(*) FROM events_numbers) AS events, (SELECT count(*) FROM quarantine_numbers) AS rejected"
    ).to_pylist()
    accepted = sum(oracle.accept("numbers", record) is not None for record in records)
    assert counts == {"events": accepted, "rejected": len(records) - accepted}
    reasons = {row["reason"] for row in lake.query("SELECT DISTINCT reason FROM quarantine_numbers").to_pylist()}
    assert {"null value", "invalid UTF-8", "malformed JSON", "no key", "wrong type: value", "missing: value"} <= reasons
    (raw,) = lake.query("SELECT raw FROM quarantine_numbers WHERE raw IS NOT NULL LIMIT 1").to_pylist()
    assert raw["raw"] in {record.value for record in records}


def test_running_total_of_words(spark: SparkSession, settings: Settings, produce: Produce) -> None:
    produce("lines", [Record(partition=-1, arrival_ms=0, value=text.encode()) for text in ("Sea sea", "the SEA", "")])
    live.run(settings, PIPELINES["word_count"], until_caught_up=True)
    answer = Lake(settings.lake_root).query("SELECT word, occurrences FROM word_count_total ORDER BY word")
    assert json.loads(as_json(answer)) == [{"word": "sea", "occurrences": 3}, {"word": "the", "occurrences": 1}]


def test_aborted_transactions_leave_no_trace_and_no_gap(
    spark: SparkSession, settings: Settings, produce: Produce
) -> None:
    producer = KafkaProducer(bootstrap_servers=settings.kafka.bootstrap, transactional_id="writer")
    producer.init_transactions()
    for attempt in range(6):
        producer.begin_transaction()
        for n in range(20):
            value = b'{"id":%d,"ts":%d,"value":%d}' % (n, now_ms(), attempt)
            producer.send("numbers", value, key=b"k")
        producer.abort_transaction() if attempt % 2 else producer.commit_transaction()
        if attempt % 3 == 2:
            ingest.run(settings, until_caught_up=True)
    producer.close()
    records = oracle.read_topic(settings.kafka.bootstrap, "numbers")
    assert len(records) == 60
    assert checker.landed_defects(settings.lake_root, "numbers", records) == []


def test_a_second_driver_is_refused(spark: SparkSession, settings: Settings) -> None:
    lease = Lease.acquire(Control.of(settings.lake_root, "rolling_sum"))
    try:
        with pytest.raises(Refusal, match="already running"):
            live.run(settings, PIPELINES["rolling_sum"], until_caught_up=True)
    finally:
        lease.release(Receipt(time=time.time(), clean=True, cause="end of the test"))


def test_a_driver_is_drained_through_its_control_folder(settings: Settings, produce: Produce, tmp_path: Path) -> None:
    """It reads all records that wait at the request, in several small batches. The receipt has the reached offsets."""
    control, log = Control.of(settings.lake_root, "word_count"), tmp_path / "driver.log"
    produce("lines", lines(1, 300))
    job = processes.start(settings, "live", "word_count", log=log, STREAM_MAX_OFFSETS="200")
    try:
        processes.wait_until(lambda: waiting(control) == 0, f"a beat of a driver that is caught up {log}")
        produce("lines", lines(2, 2000))
        with kafka.admin(settings.kafka) as client:
            ends = kafka.committed_ends(client, ["lines"])
        assert control.next_step() == Attach(1)
        control.ask_to_stop(1, Stop(time=time.time(), by="an operator", drain=True))
        assert processes.finish(job, log) == 0, log.read_text()[-4000:]
    finally:
        processes.end(job)
    receipt = control.epoch(1).receipt
    assert receipt
    assert (receipt.clean, receipt.cause, receipt.offsets) == (True, "drained and stopped by an operator", ends)
    assert receipt.batches
    assert receipt.batches["lines"] >= 10
    assert control.next_step() == Launch()
    records = oracle.read_topic(settings.kafka.bootstrap, "lines")
    assert checker.live_defects(settings.lake_root, "word_count", records) == []


def waiting(control: Control) -> int | None:
    """The number of records left to read, by the newest heartbeat."""
    return control.epoch(control.newest()).lag


def test_missing_topics_are_named(settings: Settings) -> None:
    with kafka.admin(settings.kafka) as client:
        client.delete_topics(["clicks"])
        # The broker answers before it has forgotten it.
        processes.wait_until(lambda: "clicks" not in client.list_topics(), "the topic is gone")
    with pytest.raises(Refusal, match="no topic clicks: run the DAG provision_topics"):
        ingest.run(settings, until_caught_up=True)


def test_every_definition_is_valid_spark_sql(spark: SparkSession) -> None:
    """Spark's analysis finds errors that the text of a definition does not show."""
    for pipeline in PIPELINES.values():
        columns = ", ".join(f"`{field.name}` {field.type}" for field in SOURCES[pipeline.source.name].columns)
        windows = aggregate(spark.createDataFrame([], f"event_time timestamp, {columns}"), pipeline)
        assert windows.columns == ["window_start", "window_end", *pipeline.value_columns, "slice"]
