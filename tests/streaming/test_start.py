"""When a stream may begin: checkpoint, table and topic must agree. Every refusal, every acceptance."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.broker.kafka import TopicState
from jobs.control.checkpoint import Checkpoint, Offsets
from jobs.lake.stream_tables import Note, Ranges
from jobs.refusal import Refusal
from jobs.streaming.start import EARLIEST, CheckpointProgress, Start, check_start
from tests.control import test_checkpoint

# The offsets at which batches 0, 1, 2 … end; the stream began at offset 10 of partition 0.
BEGIN: Offsets = {"numbers": {0: 10, 1: 0}}
ENDS: list[Offsets] = [{"numbers": {0: 100 * n + 100, 1: 50 * n + 50}} for n in range(6)]
CONF = {"spark.sql.shuffle.partitions": "2", "spark.sql.streaming.stateStore.providerClass": "Rocks", "other": "1"}
TOPIC = TopicState(cluster_id="c1", topic_id="t1", partitions=2, earliest={0: 10, 1: 0}, latest={0: 900, 1: 900})


def progress(planned: int | None, committed: int | None) -> CheckpointProgress:
    """The progress of a checkpoint that was never tampered with."""
    if planned is None:
        return CheckpointProgress(write_id="w1")
    starts = ENDS[planned - 1] if planned else BEGIN
    return CheckpointProgress(
        write_id="w1",
        planned=planned,
        committed=committed,
        resume=ENDS[planned] if planned == committed else starts,
        reached=ENDS[planned],
        ends={batch: ENDS[batch] for batch in (planned, committed) if batch is not None},
        first=BEGIN,
        conf=CONF,
    )


def note(batch: int) -> Note:
    """The table's note after that batch."""
    starts = (ENDS[batch - 1] if batch else BEGIN)["numbers"]
    ranges = {partition: (starts.get(partition, 0), end) for partition, end in ENDS[batch]["numbers"].items()}
    topics = {"numbers": Ranges(topic_id="t1", offsets=ranges)}
    return Note(job="ingest", write_id="w1", batch=batch, epoch=3, cluster_id="c1", topics=topics)


def reset_note(write_id: str = "w0", start: Offsets = BEGIN) -> Note:
    """The table's note after a reset that booked the offsets between 0 and the start."""
    ranges = Ranges(topic_id="t1", offsets={partition: (0, at) for partition, at in start["numbers"].items()})
    return replace(note(0), write_id=write_id, batch=None, topics={"numbers": ranges})


def refusal(
    found: CheckpointProgress | None, landed: Note | None, topics: dict[str, TopicState] | None = None, **more: Any
) -> str | None:
    try:
        check_start("ingest", found, landed, {"numbers": TOPIC} if topics is None else topics, **more)
        return None
    except Refusal as refused:
        said = str(refused)
    assert said.startswith("stream 'ingest' is refused: ")
    assert said.endswith(". Nothing was read or written.")
    return said


SOUND = {
    (None, None): "a new stream",
    ((None, None), None): "created, crashed before its first plan",
    ((0, None), None): "F1 or F2 in batch 0: planned, nothing landed",
    ((0, None), 0): "F3 in batch 0: landed, not committed",
    ((0, 0), 0): "stopped after batch 0",
    ((1, 0), 0): "F1 or F2 in batch 1",
    ((1, 0), 1): "F3 in batch 1",
    ((1, 1), 1): "stopped after batch 1",
    ((2, 1), 1): "F1 or F2 in batch 2",
    ((2, 1), 2): "F3 in batch 2",
    ((2, 2), 2): "stopped after batch 2",
    ((3, 2), 2): "F1 or F2 in batch 3",
    ((3, 2), 3): "F3 in batch 3",
    ((3, 3), 3): "stopped after batch 3",
}


@pytest.mark.parametrize("landed", [None, 0, 1, 2, 3])
@pytest.mark.parametrize(
    "state", [None, (None, None), *((p, c) for p in range(4) for c in (p, p - 1 if p else None))], ids=str
)
def test_every_pair_of_a_checkpoint_and_a_table(
    state: tuple[int | None, int | None] | None, landed: int | None
) -> None:
    """Only the states that a crash or a stop leaves are accepted; in all others the two are from different moments."""
    said = None if landed is None else note(landed)
    answer = refusal(progress(*state) if state else None, said)
    assert (answer is None) == ((state, landed) in SOUND), answer


@pytest.mark.parametrize(
    ("found", "said", "reason"),
    [
        (None, note(3), "the table holds batch 3, but the checkpoint is gone"),
        (progress(None, None), note(3), "the table holds batch 3, but the checkpoint is gone"),
        (progress(3, 3), None, "has committed batch 3, but the table has no batch: the table was deleted"),
        (progress(3, 2), None, "has committed batch 2, but the table has no batch"),
        (
            progress(3, 3),
            note(2),
            "holds batch 2, the checkpoint planned batch 3 and committed 3: checkpoint and table do not belong",
        ),
        (progress(2, 2), note(3), "holds batch 3, the checkpoint planned batch 2 and committed 2"),
        (progress(3, 2), note(1), "holds batch 1, the checkpoint planned batch 3 and committed 2"),
        (progress(0, None), note(1), "holds batch 1, the checkpoint planned batch 0 and committed None"),
        (
            replace(progress(3, 3), write_id="w2"),
            note(3),
            "was last written from another checkpoint (write identity w1, this one is w2)",
        ),
        (
            replace(progress(3, 3), ends={3: {"numbers": {0: 401, 1: 200}}}),
            note(3),
            "batch 3 ended at {'numbers': {0: 400, 1: 200}} by the table, and at {'numbers': {0: 401, 1: 200}} by the",
        ),
        (replace(progress(3, 3), ends={3: {"numbers": {0: 400}}}), note(3), "restore both from one backup"),
        (replace(progress(3, 3), ends={3: {"clicks": ENDS[3]["numbers"]}}), note(3), "restore both from one"),
    ],
)
def test_two_stories_are_refused_with_the_reason(
    found: CheckpointProgress | None, said: Note | None, reason: str
) -> None:
    assert reason in (refusal(found, said) or "")


RESET = {
    None: "nothing yet, or the checkpoint was put aside",
    (None, None): "created, crashed before its first plan",
    (0, None): "F1 or F2 in batch 0",
}


@pytest.mark.parametrize(
    "state", [None, (None, None), *((p, c) for p in range(4) for c in (p, p - 1 if p else None))], ids=str
)
def test_after_a_reset_only_a_new_checkpoint_is_accepted(state: tuple[int | None, int | None] | None) -> None:
    found = progress(*state) if state else None
    answer = refusal(found, reset_note())
    assert (answer is None) == (state in RESET), answer
    assert answer is None or "is older: the reset was interrupted, or that checkpoint was restored" in answer
    if found:
        same = refusal(found, reset_note(write_id="w1"))
        assert "is older" in (same or ""), "the one that was put aside, whatever it got done"


@pytest.mark.parametrize("state", [(None, None), (0, None)])
def test_after_a_reset_a_checkpoint_begins_where_it_said(state: tuple[int | None, int | None]) -> None:
    found = replace(progress(*state), first=BEGIN)
    assert refusal(found, reset_note(start={"numbers": {0: 10}})) is None, "a newer partition begins anywhere"
    assert refusal(replace(found, first=None), reset_note()) is None, "it has not looked at its topic yet"
    for other in ({0: 11, 1: 0}, {0: 10, 1: 1}):
        said = refusal(found, reset_note(start={"numbers": other}))
        assert "but the checkpoint begins at {0: 10, 1: 0}: checkpoint and table do not belong" in (said or "")


@pytest.mark.parametrize(
    ("topic", "reason"),
    [
        ({"topic_id": "t2"}, "was re-created"),
        ({"cluster_id": "c2"}, "this is cluster c2"),
        ({"earliest": {0: 11, 1: 0}}, "partition 0 begins at 11: its records from 10 on were deleted before they"),
        ({"latest": {0: 9, 1: 900}}, "partition 0 ends at 9, before offset 10"),
    ],
)
def test_a_topic_that_changed_after_a_reset_is_refused(topic: dict[str, object], reason: str) -> None:
    for found in (None, progress(None, None)):
        assert reason in (refusal(found, reset_note(), {"numbers": replace(TOPIC, **topic)}) or "")


def test_after_a_reset_a_stream_may_begin_past_the_first_record() -> None:
    """Without a reset, a topic that begins before the stream did is another topic."""
    older = {"numbers": replace(TOPIC, earliest={0: 0, 1: 0})}
    assert refusal(progress(0, None), reset_note(), older) is None
    assert "where the stream began" in (refusal(progress(0, None), None, older) or "")


def test_where_a_stream_begins_that_has_planned_nothing() -> None:
    topics = {"numbers": replace(TOPIC, latest={0: 900, 1: 900, 2: 5}, earliest={0: 10, 1: 0, 2: 3})}
    new = Start.of("numbers", topics, None)
    assert (new.begins, new.reached) == ({}, {0: 10, 1: 0, 2: 3})
    again = Start.of("numbers", topics, reset_note(start={"numbers": {0: 100, 1: 50}}))
    assert again.begins == {0: 100, 1: 50, 2: EARLIEST}
    assert again.reached == {0: 100, 1: 50, 2: 3}


# -- Upgrades --


def test_a_changed_definition_is_refused_with_both_ways_on() -> None:
    landed = replace(note(3), fingerprint="old")
    assert refusal(progress(3, 3), landed, fingerprint="old") is None
    for found, said in ((progress(3, 3), landed), (None, replace(reset_note(), fingerprint="old"))):
        reason = refusal(found, said, fingerprint="new") or ""
        assert "its definition has changed (fingerprint new, the rows so far are of old)" in reason
        assert "`tideline reset ingest --to earliest`" in reason
        assert "after the last landed record: `tideline reset ingest --to landed`" in reason


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        ({}, None),
        (CONF, None),
        ({**CONF, "other": "2"}, None),
        ({"spark.sql.shuffle.partitions": "4"}, "with SPARK_SHUFFLE_PARTITIONS=2, now it is 4: set it back, or"),
        ({"spark.sql.streaming.stateStore.providerClass": "Hdfs"}, "providerClass=Rocks, now it is Hdfs: set it back"),
    ],
)
def test_what_binds_the_state_stays(now: dict[str, str], reason: str | None) -> None:
    for state in ((3, 3), (3, 2), (0, None)):
        said = refusal(progress(*state), note(state[1]) if state[1] else None, conf=now)
        assert (said is None) if reason is None else (reason in (said or ""))
        assert reason is None or "`tideline reset ingest --to landed`" in (said or "")
    assert refusal(None, None, conf=now) is None
    assert refusal(replace(progress(3, 3), conf={}), note(3), conf=now) is None, "an older Spark did not write it down"


def test_a_stream_of_a_source_is_named_and_so_is_its_command() -> None:
    with pytest.raises(Refusal, match=r"^stream 'ingest of numbers' is refused: .*`tideline reset ingest --source num"):
        check_start("ingest", None, note(3), {"numbers": TOPIC}, source="numbers")


STOPPED, CRASHED = (progress(3, 3), note(3)), (progress(3, 2), note(2))


@pytest.mark.parametrize(
    ("story", "topic", "reason"),
    [
        (STOPPED, {"topic_id": "t2"}, "'numbers' was re-created (its id is t2, the table was filled from t1)"),
        (STOPPED, {"topic_id": "t2", "latest": {0: 1, 1: 1}}, "was re-created"),
        (STOPPED, {"cluster_id": "c2"}, "this is cluster c2, the table was filled from cluster c1: correct KAFKA_"),
        (STOPPED, {"latest": {0: 399, 1: 900}}, "partition 0 ends at 399, before offset 400 that the stream has"),
        (STOPPED, {"latest": {0: 900}, "earliest": {0: 0}}, "partition 1 ends at 0, before offset 200"),
        (STOPPED, {"earliest": {0: 401, 1: 0}}, "partition 0 begins at 401: its records from 400 on were deleted"),
        (STOPPED, {"earliest": {0: 0, 1: 0, 2: 5}, "latest": {0: 900, 1: 900, 2: 9}}, "partition 2 begins at 5: its"),
        (CRASHED, {"latest": {0: 399, 1: 900}}, "partition 0 ends at 399, before offset 400"),
        (CRASHED, {"earliest": {0: 301, 1: 0}}, "partition 0 begins at 301: its records from 300 on were deleted"),
        ((progress(0, None), None), {"earliest": {0: 11, 1: 0}}, "begins at 11: its records from 10 on were deleted"),
        ((progress(0, None), None), {"latest": {0: 99, 1: 900}}, "ends at 99, before offset 100"),
        ((progress(0, None), None), {"earliest": {0: 0, 1: 0}}, "begins at 0, before offset 10 where the stream began"),
    ],
)
def test_a_topic_that_changed_is_refused(
    story: tuple[CheckpointProgress, Note | None], topic: dict[str, object], reason: str
) -> None:
    assert reason in (refusal(*story, {"numbers": replace(TOPIC, **topic)}) or "")


@pytest.mark.parametrize(
    ("story", "topic"),
    [
        (STOPPED, {"latest": {0: 400, 1: 200}}),
        (STOPPED, {"earliest": {0: 400, 1: 200}}),
        (STOPPED, {"earliest": {0: 0, 1: 0}}),
        (STOPPED, {"partitions": 3, "earliest": {0: 0, 1: 0, 2: 0}, "latest": {0: 900, 1: 900, 2: 7}}),
        (CRASHED, {"earliest": {0: 300, 1: 150}, "latest": {0: 400, 1: 200}}),
        ((progress(3, 2), note(3)), {"earliest": {0: 300, 1: 150}}),
        ((progress(None, None), None), {"earliest": {0: 500, 1: 500}}),
        ((None, None), {"topic_id": "t2", "cluster_id": "c2", "earliest": {0: 500, 1: 500}}),
        ((progress(0, None), None), {"topic_id": "t2"}),
    ],
    ids=[
        "nothing new",
        "retention took what was read",
        "what was read is still there",
        "a new partition",
        "retention took what was committed; the planned batch is there",
        "landed and to be committed",
        "nothing planned yet",
        "new stream, anything goes",
        "re-created before anything was landed: nothing can be mixed",
    ],
)
def test_a_topic_that_only_went_on_is_accepted(
    story: tuple[CheckpointProgress, Note | None], topic: dict[str, object]
) -> None:
    assert refusal(*story, {"numbers": replace(TOPIC, **topic)}) is None


@pytest.mark.parametrize("story", [STOPPED, (progress(0, None), None)])
def test_a_topic_that_is_gone_is_refused(story: tuple[CheckpointProgress, Note | None]) -> None:
    assert "topic 'numbers' does not exist" in (refusal(*story, {}) or "")


path = test_checkpoint.path


def test_progress_is_read_from_the_checkpoint(path: Path) -> None:
    checkpoint = Checkpoint(path)
    planned, committed = ({0: 5400, 1: 6700, 2: 9}, {0: 5300, 1: 6600, 2: 7})
    found = CheckpointProgress.read(checkpoint)
    assert found == CheckpointProgress(
        write_id=test_checkpoint.QUERY_ID,
        planned=2,
        committed=1,
        resume={"numbers": committed},
        reached={"numbers": planned},
        ends={2: {"numbers": planned}, 1: {"numbers": committed}},
        first={"numbers": {0: 10, 1: 0}},
        conf=test_checkpoint.CONF,
    )
    test_checkpoint.commit(path, 2)
    found = CheckpointProgress.read(checkpoint)
    assert found is not None
    assert (found.resume, found.ends) == ({"numbers": planned}, {2: {"numbers": planned}})


def test_progress_of_the_first_batch_goes_on_where_the_query_began(path: Path) -> None:
    for name in ("offsets/1", "offsets/2", "commits/0", "commits/1"):
        (path / name).unlink()
    found = CheckpointProgress.read(Checkpoint(path))
    assert found is not None
    assert (found.planned, found.committed, found.resume) == (0, None, {"numbers": {0: 10, 1: 0}})


def test_a_checkpoint_that_has_only_looked_at_its_topic_says_where_it_begins(path: Path) -> None:
    for name in ("offsets/0", "offsets/1", "offsets/2", "commits/0", "commits/1"):
        (path / name).unlink()
    found = CheckpointProgress.read(Checkpoint(path))
    assert found == CheckpointProgress(write_id=test_checkpoint.QUERY_ID, first={"numbers": {0: 10, 1: 0}})
    (path / "sources" / "0" / "0").unlink()
    assert CheckpointProgress.read(Checkpoint(path)) == CheckpointProgress(write_id=test_checkpoint.QUERY_ID)


def test_no_progress_without_a_checkpoint_and_a_refusal_with_a_damaged_one(path: Path, tmp_path: Path) -> None:
    assert CheckpointProgress.read(Checkpoint(tmp_path / "none")) is None
    (path / "metadata").unlink()
    with pytest.raises(Refusal, match="metadata is damaged"):
        CheckpointProgress.read(Checkpoint(path))
