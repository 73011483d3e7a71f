"""Resets on a real broker with the real jobs: which records come again or are skipped, and what is refused when."""

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from kafka import KafkaProducer, TopicPartition
from pyspark.sql import SparkSession

from jobs.broker import kafka
from jobs.control.epochs import Receipt
from jobs.control.folder import Control
from jobs.control.incidents import Incidents
from jobs.control.lease import Lease, LeaseLostError
from jobs.failpoints import FailPoint
from jobs.lake.delta.fenced import OvertakenError
from jobs.lake.delta.manifest import Manifest
from jobs.lake.stream_tables import Note, Ranges, TableWriter, last_note
from jobs.pipelines import PIPELINES, SOURCES
from jobs.pipelines.layout import ASIDE
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.window import Measure
from jobs.query.lake import Lake
from jobs.refusal import Refusal
from jobs.settings import Settings
from jobs.streaming import ingest, live, reset
from jobs.streaming.reset_plan import Request, ResetPlan, To
from tests import processes
from tests.conftest import Produce, grow_topic, renew_topics
from tests.judges import checker, oracle
from tests.judges.oracle import Record

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.timeout(600)]

SUM = PIPELINES["rolling_sum"]


def numbers(count: int) -> list[Record]:
    """Records for the topic's three partitions in turn, so that the test can compute their offsets."""
    now = int(time.time() * 1000)
    values = (b'{"id":%d,"ts":%d,"value":%d}' % (n, now, n) for n in range(count))
    return [Record(partition=n % 3, arrival_ms=0, key=b"k%d" % (n % 9), value=v) for n, v in enumerate(values)]


def run_ingest(settings: Settings) -> None:
    ingest.run(settings, until_caught_up=True)


def run_sum(settings: Settings, pipeline: Pipeline = SUM) -> None:
    live.run(settings, pipeline, until_caught_up=True)


def planned(settings: Settings, job: str, to: To, **more: Any) -> ResetPlan:
    with kafka.admin(settings.kafka) as client:
        return reset.plan(settings, client, Request(job=job, to=to, **more))


def apply(settings: Settings, job: str, to: To, **more: Any) -> ResetPlan:
    with kafka.admin(settings.kafka) as client:
        return reset.apply(settings, client, Request(job=job, to=to, **more))


def everything(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def in_topic(settings: Settings) -> list[Record]:
    return oracle.read_topic(settings.kafka.bootstrap, "numbers")


def moves(plan: ResetPlan) -> dict[int, tuple[int | None, int]]:
    (query,) = plan.queries
    return {move.partition: (move.table_end, move.start) for move in query.moves}


def total(settings: Settings) -> int:
    """The number of events in all windows together."""
    (row,) = Lake(settings.lake_root).query("SELECT sum(events) AS total FROM rolling_sum").to_pylist()
    return int(row["total"] or 0)


def delete_records(settings: Settings, before: Mapping[int, int]) -> None:
    with kafka.admin(settings.kafka) as client:
        client.delete_records({TopicPartition("numbers", partition): end for partition, end in before.items()})


def judge_sum(settings: Settings, since: Mapping[int, int]) -> None:
    """The live table equals the oracle's result for all records from these offsets on."""
    records = [record for record in in_topic(settings) if record.offset >= since[record.partition]]
    assert checker.live_defects(settings.lake_root, "rolling_sum", in_topic(settings)) == []
    assert total(settings) == sum(oracle.accept("numbers", record) is not None for record in records)


def test_a_pipeline_begins_anew_at_the_earliest_record(
    spark: SparkSession, settings: Settings, produce: Produce
) -> None:
    for _ in range(2):
        produce("numbers", numbers(900))
        run_sum(settings)
    before = everything(settings.lake_root)
    dry = planned(settings, "rolling_sum", To.EARLIEST)
    assert everything(settings.lake_root) == before, "a dry run changes nothing"
    assert moves(dry) == {0: (600, 0), 1: (600, 0), 2: (600, 0)}
    (row,) = dry.as_rows()
    rows = sum(row["slice"] != "batches" for row in checker.read_table(settings.lake_root / SUM.live_table).rows)
    assert (row["rows_cleared"], row["checkpoint_state"]) == (rows, "batch 1 planned, 1 committed")
    assert rows > 9

    assert apply(settings, "rolling_sum", To.EARLIEST) == dry
    assert checker.read_table(settings.lake_root / SUM.live_table).rows == []
    (aside,) = (settings.lake_root / ASIDE).iterdir()
    kept = {name: content for name, content in before.items() if name.startswith("checkpoints/rolling_sum/")}
    moved = {f"checkpoints/rolling_sum/{name}": content for name, content in everything(aside).items()}
    assert moved == kept, "the old checkpoint is put aside, not deleted"
    newest = Control.of(settings.lake_root, "rolling_sum").history()[-1]
    assert newest.receipt is not None
    assert (newest.receipt.clean, newest.receipt.cause) == (True, "reset to earliest")

    run_sum(settings)
    judge_sum(settings, {0: 0, 1: 0, 2: 0})
    produce("numbers", numbers(300))
    run_sum(settings)
    judge_sum(settings, {0: 0, 1: 0, 2: 0})
    assert total(settings) == 2100


def test_a_pipeline_begins_at_the_latest_record_and_at_a_time(
    spark: SparkSession, settings: Settings, produce: Produce
) -> None:
    produce("numbers", numbers(300))
    run_sum(settings)
    assert moves(apply(settings, "rolling_sum", To.LATEST)) == {0: (100, 100), 1: (100, 100), 2: (100, 100)}
    run_sum(settings)
    assert total(settings) == 0
    receipt = Control.of(settings.lake_root, "rolling_sum").history()[-1].receipt
    assert receipt is not None
    assert receipt.offsets == {"numbers": {0: 100, 1: 100, 2: 100}}, "it need not wait for what it passed over"
    between = int(time.time() * 1000) + 1
    processes.wait_until(lambda: time.time() * 1000 > between + 1, "a later millisecond")
    produce("numbers", numbers(600))
    grow_topic(settings.kafka, "numbers", 4)
    produce("numbers", [replace(record, partition=3) for record in numbers(50)])
    run_sum(settings)
    assert total(settings) == 650, "a partition that is newer than the reset is read from its first record"
    judge_sum(settings, {0: 100, 1: 100, 2: 100, 3: 0})

    run_sum(settings)
    found = moves(apply(settings, "rolling_sum", To.TIMESTAMP, timestamp_ms=between))
    assert found == {0: (300, 100), 1: (300, 100), 2: (300, 100), 3: (50, 0)}
    run_sum(settings)
    judge_sum(settings, {0: 100, 1: 100, 2: 100, 3: 0})
    future = int(time.time() * 1000) + 3_600_000
    assert set(moves(planned(settings, "rolling_sum", To.TIMESTAMP, timestamp_ms=future)).values()) == {
        (300, 300),
        (50, 50),
    }


def test_a_changed_definition_is_handed_over(
    spark: SparkSession, settings: Settings, produce: Produce, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce("numbers", numbers(600))
    run_sum(settings)
    with pytest.raises(Refusal, match="nothing of topic 'numbers' is landed, so --to landed has no offset to begin at"):
        planned(settings, "rolling_sum", To.LANDED)
    run_ingest(settings)
    produce("numbers", numbers(300))
    largest = Measure(name="largest", sql="max(value)", type="DECIMAL(18,6)")
    changed = replace(SUM, measures=(largest, *SUM.measures))
    monkeypatch.setitem(PIPELINES, "rolling_sum", changed)
    with pytest.raises(Refusal, match=r"definition has changed .*`tideline reset rolling_sum --to landed`"):
        run_sum(settings, changed)
    assert moves(apply(settings, "rolling_sum", To.LANDED)) == dict.fromkeys(range(3), (200, 200))
    with pytest.raises(Refusal, match="definition has changed"):
        run_sum(settings, SUM)
    run_sum(settings, changed)
    judge_sum(settings, dict.fromkeys(range(3), 200))
    answer = Lake(settings.lake_root).query("SELECT max(largest) AS largest FROM rolling_sum").to_pylist()
    assert answer == [{"largest": 299}]
    assert "largest" in [field.name for field in DeltaTable(settings.lake_root / SUM.live_table).schema().fields]
    produce("numbers", numbers(300))
    run_sum(settings, changed)
    judge_sum(settings, dict.fromkeys(range(3), 200))


def test_state_that_was_partitioned_otherwise_is_refused_before_spark_starts(
    spark: SparkSession, settings: Settings, produce: Produce
) -> None:
    produce("numbers", numbers(30))
    run_sum(settings)
    with pytest.raises(Refusal, match=r"written with SPARK_SHUFFLE_PARTITIONS=2, now it is 3: set it back, or .*reset"):
        run_sum(replace(settings, shuffle_partitions=3))
    run_ingest(settings)
    run_ingest(replace(settings, shuffle_partitions=3))


def test_refused_while_the_stream_runs(spark: SparkSession, settings: Settings, produce: Produce) -> None:
    produce("numbers", numbers(30))
    run_sum(settings)
    lease = Lease.acquire(Control.of(settings.lake_root, "rolling_sum"))
    try:
        before = everything(settings.lake_root / "live") | everything(settings.lake_root / "checkpoints")
        with pytest.raises(Refusal, match="already running"):
            apply(settings, "rolling_sum", To.EARLIEST)
        planned(settings, "rolling_sum", To.EARLIEST)
        assert before == everything(settings.lake_root / "live") | everything(settings.lake_root / "checkpoints")
    finally:
        lease.release(Receipt(time=time.time(), clean=True, cause="stopped"))


def land(settings: Settings, source: str, batch: int, end: int, writer: TableWriter | None = None) -> TableWriter:
    """A commit of `ingest` without rows: each partition is landed up to here."""
    topic = kafka.describe(settings.kafka, [source])[source]
    path = settings.lake_root / SOURCES[source].events_table
    writer = writer or TableWriter.open(path, None, "hour", epoch=1)
    note = Note(
        job="ingest",
        write_id="f0d56b73-584e-4a44-aec5-39765d39db41",
        batch=batch,
        epoch=0,
        cluster_id=topic.cluster_id,
        topics={source: Ranges(topic_id=topic.topic_id, offsets={p: (end - 10, end) for p in topic.latest})},
    )
    writer.commit(Manifest.of(writer.new_stage()), note)
    return writer


def receipt_of(settings: Settings) -> tuple[bool, str]:
    """Whether the driver of `ingest` ended cleanly, and the cause."""
    receipt = Control.of(settings.lake_root, "ingest").history()[-1].receipt
    assert receipt is not None
    return receipt.clean, receipt.cause


@pytest.mark.parametrize("sources", [("numbers",), ("lines", "numbers")])
def test_one_that_slept_and_commits_under_the_reset_makes_it_fail(
    settings: Settings, produce: Produce, monkeypatch: pytest.MonkeyPatch, sources: tuple[str, ...]
) -> None:
    """Otherwise it would begin at 10 although 20 is landed. A refused reset changes nothing.

    It does not count as a failure of the stream.
    """
    produce("numbers", numbers(90))
    zombie = land(settings, "numbers", 0, 10)
    folder = settings.lake_root / "checkpoints/ingest/numbers"
    folder.mkdir(parents=True)
    check, looked = Lease.check, []

    def slept(lease: Lease) -> None:
        check(lease)
        looked.append(lease)
        # The first look is before the tables are opened.
        if len(looked) == 2:
            land(settings, "numbers", 1, 20, zombie)

    monkeypatch.setattr(Lease, "check", slept)
    with pytest.raises(OvertakenError, match="another writer has committed"):
        apply(settings, "ingest", To.EARLIEST, sources=sources)
    note = last_note(settings.lake_root / "events/numbers")
    assert note is not None
    assert (note.batch, note.ends) == (1, {"numbers": dict.fromkeys(range(3), 20)})
    assert folder.exists()
    clean, cause = receipt_of(settings)
    if sources == ("numbers",):
        assert clean
        assert cause.startswith("the reset to earliest changed nothing: another writer has committed to")
    else:
        assert not clean
        assert cause.startswith("the reset to earliest failed halfway, run it again: another writer has committed to")
    found = apply(settings, "ingest", To.EARLIEST, sources=("numbers",))
    assert moves(found) == dict.fromkeys(range(3), (20, 20))
    assert receipt_of(settings) == (True, "reset to earliest")


def test_one_that_slept_through_its_own_reset_moves_no_checkpoint(
    settings: Settings, produce: Produce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor may have begun another checkpoint in the same place."""
    produce("numbers", numbers(90))
    control = Control.of(settings.lake_root, "ingest")
    folder = settings.lake_root / "checkpoints/ingest/numbers"
    folder.mkdir(parents=True)

    def sleep(point: FailPoint, _batch: int) -> None:
        assert point is FailPoint.RESET_COMMITTED
        control.end(control.newest(), Receipt(time=time.time(), clean=False, cause="it slept"))

    monkeypatch.setattr(reset, "may_fail_at", sleep)
    with pytest.raises(LeaseLostError):
        apply(settings, "ingest", To.EARLIEST, sources=("numbers",))
    assert folder.exists()
    assert receipt_of(settings) == (False, "it slept")


def test_what_is_passed_over_is_an_incident_that_is_over_at_once(settings: Settings, produce: Produce) -> None:
    produce("numbers", numbers(90))
    land(settings, "numbers", 0, 10)
    incidents = Incidents.of(settings.lake_root)
    planned(settings, "ingest", To.LATEST, sources=("numbers",))
    apply(settings, "ingest", To.EARLIEST, sources=("numbers",))
    assert incidents.all() == [], "nothing is passed over"
    apply(settings, "ingest", To.LATEST)
    (incident,) = incidents.all()
    assert (incident.key, incident.closed) == ("stream.ingest.lost.numbers", True)
    assert incident.text == (
        "numbers: the reset to latest skipped at most 60 records, which are not landed: "
        "partition 0 [10, 30), partition 1 [10, 30), partition 2 [10, 30)"
    )
    apply(settings, "ingest", To.LATEST)
    apply(settings, "rolling_sum", To.LATEST)
    assert incidents.all() == [incident], "what was booked is booked once"


def test_what_ingest_cannot_read_any_more_is_booked_as_lost(
    spark: SparkSession, settings: Settings, produce: Produce
) -> None:
    produce("numbers", numbers(300))
    run_ingest(settings)
    run_sum(settings)
    produce("numbers", numbers(600))
    records = in_topic(settings)
    delete_records(settings, {0: 250, 1: 100, 2: 40})
    for run in (run_ingest, run_sum):
        with pytest.raises(
            Refusal, match=r"its records from 100 on were deleted before they were read; .*`tideline rese"
        ):
            run(settings)
    assert moves(apply(settings, "ingest", To.EARLIEST, sources=("numbers",))) == {
        0: (100, 250),
        1: (100, 100),
        2: (100, 100),
    }
    run_ingest(settings)
    table = checker.read_table(settings.lake_root / "events/numbers")
    assert checker.booked_as_lost(table.notes, "numbers") == {(0, offset) for offset in range(100, 250)}
    assert checker.landed_defects(settings.lake_root, "numbers", records) == []
    assert len(table.rows) == 900 - 150
    apply(settings, "rolling_sum", To.EARLIEST)
    run_sum(settings)
    judge_sum(settings, {0: 250, 1: 100, 2: 40})

    produce("numbers", numbers(300))
    produce("lines", [Record(partition=0, arrival_ms=0, value=b"sea")])
    found = apply(settings, "ingest", To.LATEST)
    assert len(found.queries) == 6
    produce("numbers", numbers(300))
    run_ingest(settings)
    records += [record for record in in_topic(settings) if record.offset >= 300]
    assert checker.landed_defects(settings.lake_root, "numbers", records) == []
    lost = checker.booked_as_lost(checker.read_table(settings.lake_root / "events/numbers").notes, "numbers")
    assert len(lost) == 150 + 300


def test_ingest_goes_on_with_a_topic_that_was_re_created(
    spark: SparkSession, settings: Settings, produce: Produce
) -> None:
    produce("numbers", numbers(300))
    run_ingest(settings)
    old = in_topic(settings)
    renew_topics(settings.kafka)
    produce("numbers", numbers(60))
    with pytest.raises(Refusal, match=r"was re-created .*`tideline reset ingest --source numbers --to earliest`"):
        run_ingest(settings)
    assert moves(planned(settings, "ingest", To.EARLIEST, sources=("numbers",))) == dict.fromkeys(range(3), (None, 0))
    apply(settings, "ingest", To.EARLIEST)
    run_ingest(settings)
    assert checker.landed_defects(settings.lake_root, "numbers", old + in_topic(settings)) == []
    assert len(checker.read_table(settings.lake_root / "events/numbers").rows) == 360


def test_a_table_that_was_deleted_begins_anew(spark: SparkSession, settings: Settings, produce: Produce) -> None:
    produce("numbers", numbers(300))
    run_sum(settings)
    shutil.rmtree(settings.lake_root / SUM.live_table)
    with pytest.raises(Refusal, match="the table was deleted"):
        run_sum(settings)
    assert moves(apply(settings, "rolling_sum", To.LATEST)) == {0: (None, 100), 1: (None, 100), 2: (None, 100)}
    produce("numbers", numbers(60))
    run_sum(settings)
    judge_sum(settings, dict.fromkeys(range(3), 100))


def test_an_open_transaction_is_not_passed_over(spark: SparkSession, settings: Settings, produce: Produce) -> None:
    produce("numbers", numbers(300))
    run_sum(settings)
    producer = KafkaProducer(bootstrap_servers=settings.kafka.bootstrap, transactional_id="writer")
    try:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send("numbers", numbers(1)[0].value, key=b"k", partition=0).get(timeout=30)
        assert moves(apply(settings, "rolling_sum", To.LATEST)) == {0: (100, 100), 1: (100, 100), 2: (100, 100)}
        run_sum(settings)
        assert total(settings) == 0
        producer.commit_transaction()
    finally:
        producer.close()
    run_sum(settings)
    assert total(settings) == 1


def test_ended_in_the_middle_it_is_refused_until_it_is_done_again(
    spark: SparkSession, settings: Settings, produce: Produce, tmp_path: Path
) -> None:
    """F9: the table has the note of the reset already, the old checkpoint is still in its place."""
    produce("numbers", numbers(300))
    run_ingest(settings)
    run_sum(settings)
    for job, run in (("rolling_sum", run_sum), ("ingest", run_ingest)):
        hit, log = tmp_path / job, tmp_path / f"{job}.log"
        command = ("reset", job, "--to", "latest", "--apply", *(("--source", "numbers") if job == "ingest" else ()))
        driver = processes.start(settings, *command, log=log, TIDELINE_FAILPOINT=f"F9:0:{hit}")
        assert processes.finish(driver, log) == -9
        assert hit.exists()
        with pytest.raises(Refusal, match=r"the table was reset, but the checkpoint .* is older: the reset was inter"):
            run(settings)
        driver = processes.start(settings, *command, log=log)
        assert processes.finish(driver, log) == 0, log.read_text()
    produce("numbers", numbers(60))
    run_ingest(settings)
    run_sum(settings)
    judge_sum(settings, dict.fromkeys(range(3), 100))
    assert checker.landed_defects(settings.lake_root, "numbers", in_topic(settings)) == []


def test_an_old_checkpoint_is_refused_after_a_reset(spark: SparkSession, settings: Settings, produce: Produce) -> None:
    """Two more are refused: a checkpoint that has planned only its begin, and one with its only batch in the table."""
    produce("numbers", numbers(300))
    run_sum(settings)
    checkpoint = settings.lake_root / "checkpoints/rolling_sum"
    forget(checkpoint, "commits/0")
    apply(settings, "rolling_sum", To.EARLIEST)
    (aside,) = (settings.lake_root / ASIDE).iterdir()
    shutil.copytree(aside, checkpoint)
    with pytest.raises(Refusal, match=r"batch 0 planned, None committed\) is older"):
        run_sum(settings)
    shutil.rmtree(checkpoint)
    run_sum(settings)
    judge_sum(settings, dict.fromkeys(range(3), 0))

    forget(checkpoint, "commits/0", "offsets/0")
    (checkpoint / "metadata").write_text('{"id":"f0d56b73-584e-4a44-aec5-39765d39db41"}')
    (checkpoint / ".metadata.crc").unlink(missing_ok=True)
    shutil.copytree(checkpoint, settings.lake_root / "begun")
    apply(settings, "rolling_sum", To.LATEST)
    note = last_note(settings.lake_root / SUM.live_table)
    assert note is not None
    assert note.write_id == "f0d56b73-584e-4a44-aec5-39765d39db41"
    shutil.copytree(settings.lake_root / "begun", checkpoint)
    (checkpoint / "metadata").write_text('{"id":"00000000-584e-4a44-aec5-39765d39db41"}')
    with pytest.raises(
        Refusal, match=r"but the checkpoint begins at \{0: 0, 1: 0, 2: 0\}: checkpoint and table do not"
    ):
        run_sum(settings)


def forget(checkpoint: Path, *names: str) -> None:
    for name in names:
        file = checkpoint / name
        file.unlink()
        file.with_name(f".{file.name}.crc").unlink(missing_ok=True)


def test_the_command_shows_does_and_refuses(settings: Settings, produce: Produce, tmp_path: Path) -> None:
    produce("numbers", numbers(300))

    def run(*arguments: str) -> tuple[int, str]:
        log = tmp_path / f"{len(list(tmp_path.iterdir()))}.log"
        done = processes.start(settings, "reset", *arguments, log=log)
        return processes.finish(done, log), log.read_text()

    code, said = run("rolling_sum", "--to", "latest")
    assert code == 0
    assert "Nothing is changed. To reset it: tideline reset rolling_sum --to latest --apply" in said
    assert not (settings.lake_root / "live").exists()
    code, said = run("rolling_sum", "--to", "latest", "--apply", "--format", "json")
    (row,) = json.loads(said)
    assert (code, [part["start"] for part in row["partitions"]]) == (0, [100, 100, 100])
    assert last_note(settings.lake_root / SUM.live_table) is not None
    for arguments, reason in (
        (("none", "--to", "latest"), "there is no streaming job 'none': choose one of ingest, rolling_sum"),
        (("rolling_sum", "--to", "tomorrow"), "--to 'tomorrow': choose one of earliest, latest, timestamp, landed"),
        (("rolling_sum", "--to", "landed"), "nothing of topic 'numbers' is landed"),
    ):
        code, said = run(*arguments)
        assert (code, reason in said) == (1, True), said
