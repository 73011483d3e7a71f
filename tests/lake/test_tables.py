"""Tables with one writer: a commit is whole or not there and happens once, and an overtaken writer commits nothing."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from multiprocessing.synchronize import Barrier
from pathlib import Path
from queue import Queue
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jobs.lake import tables
from jobs.lake.delta.fenced import OvertakenError
from jobs.lake.delta.log import said_at
from jobs.lake.delta.reading import files_of, rows_by_partition
from jobs.lake.delta.retention import Freed, took_turn
from jobs.lake.tables import Manifest, Note, Ranges, TableWriter, TornStageError, last_note
from jobs.refusal import Refusal
from tests import processes

SCHEMA = pa.schema([("number", pa.int64()), ("text", pa.string()), ("slice", pa.string())])
WRITE_ID = "f0d56b73-584e-4a44-aec5-39765d39db41"


def note(batch: int, epoch: int = 1, write_id: str = WRITE_ID) -> Note:
    ranges = Ranges(topic_id="t1", offsets={0: (batch * 10, batch * 10 + 10), 11: (0, batch)})
    return Note(
        job="rolling_sum",
        write_id=write_id,
        batch=batch,
        epoch=epoch,
        cluster_id="c1",
        topics={"numbers": ranges},
        fingerprint="6f71d21e3c10",
    )


def stage(writer: TableWriter, *numbers: int, partition: str = "a") -> Path:
    """Stage a file for each number, laid out as Spark does it."""
    folder = writer.new_stage()
    for number in numbers:
        file = folder / f"slice={partition}" / f"part-{number}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        text = None if number % 3 == 0 else f"text {number}"
        pq.write_table(pa.table({"number": [number], "text": pa.array([text], pa.string())}), file)
    return folder


def commit(writer: TableWriter, batch: int, *numbers: int, epoch: int = 1) -> list[Path]:
    return writer.commit(Manifest.of(stage(writer, *(numbers or (batch,)))), note(batch, epoch))


def rows(path: Path) -> list[int]:
    return sorted(files_of(DeltaTable(path), path).to_table()["number"].to_pylist())


def files_on_disk(path: Path) -> set[Path]:
    return {file.relative_to(path) for file in path.glob("slice=*/*.parquet")}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "live" / "rolling_sum"


def opened(path: Path, epoch: int = 1) -> TableWriter:
    return TableWriter.open(path, SCHEMA, "slice", epoch=epoch)


def test_a_new_table_is_empty_and_says_nothing(path: Path) -> None:
    assert last_note(path) is None
    writer = opened(path)
    assert last_note(path) is None
    assert rows(path) == []
    assert not writer.has(WRITE_ID, 0)


def test_a_table_keeps_hours_of_its_log_and_not_a_month(path: Path) -> None:
    opened(path)
    kept = DeltaTable(path).metadata().configuration
    assert kept["delta.logRetentionDuration"] == "interval 6 hours"
    assert kept["delta.deletedFileRetentionDuration"] == "interval 6 hours"
    assert int(kept["delta.checkpointInterval"]) == 50


def test_a_commit_is_in_the_table_with_its_note_and_says_where_its_files_are(path: Path) -> None:
    writer = opened(path)
    placed = commit(writer, 0, 1, 2, 3)
    assert rows(path) == [1, 2, 3]
    assert last_note(path) == note(0)
    assert sorted(pq.ParquetFile(file).read()["number"].to_pylist()[0] for file in placed) == [1, 2, 3]
    assert {file.relative_to(path) for file in placed} == files_on_disk(path)


def test_a_batch_without_rows_is_noted_too(path: Path) -> None:
    writer = opened(path)
    assert writer.commit(Manifest.of(writer.new_stage()), note(0)) == []
    assert (rows(path), last_note(path)) == ([], note(0))
    assert opened(path).has(WRITE_ID, 0)


def test_a_batch_is_there_once_it_is_committed_for_its_own_checkpoint_only(path: Path) -> None:
    writer = opened(path)
    for batch in range(3):
        assert not writer.has(WRITE_ID, batch)
        commit(writer, batch)
        for again in (writer, opened(path)):
            assert [again.has(WRITE_ID, n) for n in range(batch + 2)] == [True] * (batch + 1) + [False]
            assert not again.has("another checkpoint", 0)


def test_notes_are_read_back_as_they_were_written() -> None:
    written = note(7, epoch=3)
    assert Note.from_json(written.to_json()) == written
    assert "\n" not in written.to_json()
    assert written.ends == {"numbers": {0: 80, 11: 7}}
    assert written.topics["numbers"].to_json() == '{"0":[70,80],"11":[0,7]}'


def test_after_a_reset_the_new_checkpoint_s_note_counts(path: Path) -> None:
    writer = opened(path)
    for batch in range(3):
        commit(writer, batch)
    renewed = opened(path)
    renewed.commit(Manifest.of(stage(renewed, 9)), note(0, epoch=2, write_id="new"))
    assert last_note(path) == note(0, epoch=2, write_id="new")
    assert renewed.has("new", 0)


# -- Resets, and tables without rows --

OTHER = pa.schema([("amount", pa.decimal128(18, 6)), ("at", pa.timestamp("us", tz="UTC")), ("slice", pa.string())])


def reset_note(epoch: int = 2) -> Note:
    """Partition 0 was read to 30, and its next record is 50; the other partition goes on where it was."""
    ranges = Ranges(topic_id="t1", offsets={0: (30, 50), 11: (2, 2)})
    return replace(note(0, epoch), batch=None, topics={"numbers": ranges})


@pytest.mark.parametrize("clear", [False, True])
def test_a_reset_keeps_the_rows_or_takes_them_all_in_one_commit(path: Path, clear: bool) -> None:
    writer = opened(path)
    for batch in range(3):
        commit(writer, batch)
    before = DeltaTable(path).version()
    TableWriter.open(path, None, "slice", epoch=1).reset(reset_note(), clear=clear)
    assert DeltaTable(path).version() == before + 1
    assert rows(path) == ([] if clear else [0, 1, 2])
    assert rows_by_partition(DeltaTable(path)) == ({} if clear else {"a": 3})
    assert last_note(path) == reset_note()
    assert Note.from_json(reset_note().to_json()).ends == {"numbers": {0: 50, 11: 2}}
    with pytest.raises(OvertakenError):
        commit(writer, 3, 99)
    successor = opened(path)
    assert successor.has(WRITE_ID, 2), "what a checkpoint wrote it has written, so it must not come back"
    successor.commit(Manifest.of(stage(successor, 7)), note(0, epoch=3, write_id="new"))
    assert rows(path) == ([7] if clear else [0, 1, 2, 7])
    assert last_note(path) == note(0, epoch=3, write_id="new")


def test_a_reset_that_was_overtaken_changes_nothing(path: Path) -> None:
    commit(opened(path), 0)
    late = TableWriter.open(path, None, "slice", epoch=1)
    commit(opened(path), 1)
    with pytest.raises(OvertakenError):
        late.reset(reset_note(), clear=True)
    assert (rows(path), last_note(path)) == ([0, 1], note(1))


def test_a_reset_survives_a_merge_and_the_files_it_took_away_are_deleted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", 5)
    monkeypatch.setattr(tables, "DELETE_EVERY_SECONDS", 0)
    at_once = {**tables._PROPERTIES, "delta.deletedFileRetentionDuration": "interval 0 seconds"}
    monkeypatch.setattr(tables, "_PROPERTIES", at_once)
    writer = opened(path)
    for batch in range(3):
        commit(writer, batch)
    taken = files_on_disk(path)
    opened(path).reset(reset_note(), clear=True)
    writer = opened(path)
    for batch in range(12):
        writer.commit(Manifest.of(stage(writer, batch)), note(batch, epoch=3, write_id="new"))
        writer.tend()
        assert rows(path) == list(range(batch + 1))
    assert not taken & files_on_disk(path)


@pytest.mark.parametrize("cleared", [False, True])
def test_a_table_without_rows_takes_the_columns_of_its_first_commit(path: Path, cleared: bool) -> None:
    reader = None
    if cleared:
        commit(opened(path), 0)
        reader = DeltaTable(path)
        TableWriter.open(path, None, "slice", epoch=1).reset(reset_note(), clear=True)
    else:
        TableWriter.open(path, None, "slice", epoch=1).reset(reset_note(), clear=True)
        assert [field.name for field in DeltaTable(path).schema().fields] == ["slice"]
    for batch in range(2):
        # It is opened again before the first commit, and nothing changes until then.
        TableWriter.open(path, OTHER, "slice", epoch=1)
        writer = TableWriter.open(path, OTHER, "slice", epoch=1)
        folder = writer.new_stage()
        file = folder / "slice=a" / "part.parquet"
        file.parent.mkdir(parents=True)
        row = {"amount": Decimal(batch), "at": datetime(2026, 1, 1, tzinfo=UTC)}
        pq.write_table(pa.Table.from_pylist([row], schema=OTHER.remove(2)), file)
        writer.commit(Manifest.of(folder), note(batch, epoch=3, write_id="new"))
        assert writer.has("new", batch)
        assert [field.name for field in DeltaTable(path).schema().fields] == OTHER.names
    assert sorted(files_of(DeltaTable(path), path).to_table()["amount"].to_pylist()) == [0, 1]
    assert DeltaTable(path).metadata().configuration == tables._PROPERTIES
    assert DeltaTable(path).metadata().partition_columns == ["slice"]
    if reader:
        reader.update_incremental()
        amounts = files_of(reader, path).to_table()["amount"].to_pylist()
        assert sorted(amounts) == [0, 1], "a reader that was there before"


def test_a_column_of_the_same_name_takes_its_new_type(path: Path) -> None:
    opened(path)
    wider = pa.schema([("number", pa.decimal128(28, 0)), ("text", pa.string()), ("slice", pa.string())])
    writer = TableWriter.open(path, wider, "slice", epoch=1)
    writer.commit(Manifest.of(writer.new_stage()), note(0))
    assert str(DeltaTable(path).schema().fields[0].type) == 'PrimitiveType("decimal(28,0)")'


def test_a_table_with_rows_keeps_its_columns(path: Path) -> None:
    commit(opened(path), 0)
    with pytest.raises(
        Refusal, match=r"has the columns .* the definition has changed; take the change back .* `tideline reset"
    ):
        TableWriter.open(path, OTHER, "slice", epoch=1)
    assert rows(path) == [0]


NESTED = pa.struct([("key", pa.string()), ("value", pa.int32())])


def wide(number: pa.DataType, nested: pa.DataType, *, nullable: bool = True) -> pa.Schema:
    return pa.schema(
        [pa.field("number", number, nullable), pa.field("nested", pa.list_(nested)), ("slice", pa.string())]
    )


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (wide(pa.float64(), NESTED), "number was long, is double: the definition"),
        (wide(pa.decimal128(28, 0), NESTED), r"number was long, is decimal\(28,0\): the definition"),
        (
            wide(pa.int64(), pa.struct([("key", pa.string()), ("value", pa.int64())])),
            "nested was .*integer.* is .*long.*: ",
        ),
        (
            wide(pa.int64(), NESTED).remove(1),
            r"the columns \['number', 'nested', 'slice'\], the job writes \['number', 's",
        ),
    ],
)
def test_a_table_with_rows_keeps_its_types(path: Path, schema: pa.Schema, words: str) -> None:
    writer = TableWriter.open(path, wide(pa.int64(), NESTED), "slice", epoch=1)
    commit_number(writer)
    with pytest.raises(Refusal, match=words):
        TableWriter.open(path, schema, "slice", epoch=1)


def test_what_may_be_null_may_change(path: Path) -> None:
    commit_number(TableWriter.open(path, wide(pa.int64(), NESTED, nullable=False), "slice", epoch=1))
    strict = pa.struct([pa.field("key", pa.string(), nullable=False), ("value", pa.int32())])
    commit_number(TableWriter.open(path, wide(pa.int64(), strict), "slice", epoch=1), batch=1)
    assert rows(path) == [0, 1]


def commit_number(writer: TableWriter, batch: int = 0) -> None:
    folder = writer.new_stage()
    file = folder / "slice=a" / "part.parquet"
    file.parent.mkdir(parents=True)
    pq.write_table(
        pa.table({"number": pa.array([batch], pa.int64()), "nested": pa.array([[]], pa.list_(NESTED))}), file
    )
    writer.commit(Manifest.of(folder), note(batch))


# -- Crashes: the steps before a crash stay, the steps after it never happen --


def test_crash_before_the_files_are_placed(path: Path) -> None:
    commit(opened(path), 0)
    left = stage(opened(path), 7)
    assert rows(path) == [0]
    successor = opened(path, epoch=2)
    assert not left.exists(), "what a dead driver staged is cleared away"
    assert not successor.has(WRITE_ID, 1)
    commit(successor, 1, 7)
    assert rows(path) == [0, 7]


def test_crash_between_the_files_and_the_commit(path: Path) -> None:
    dying = opened(path)
    commit(dying, 0)
    for file in stage(dying, 7, 8).rglob("*.parquet"):
        dying.place(file)
    assert len(files_on_disk(path)) == 3
    assert (rows(path), last_note(path)) == ([0], note(0)), "no reader sees files that no commit names"
    successor = opened(path)
    assert not successor.has(WRITE_ID, 1)
    commit(successor, 1, 7, 8)
    assert rows(path) == [0, 7, 8]


def test_crash_in_the_middle_of_writing_the_log(path: Path) -> None:
    """The library writes an entry beside the log and links it, so a partial entry never becomes its next version."""
    commit(opened(path), 0)
    (path / "_delta_log" / "_commit_0d1c.json.tmp").write_text('{"commitInfo":{"ti')
    (path / "_delta_log" / "00000000000000000002.json#1").write_text("")
    successor = opened(path)
    commit(successor, 1)
    assert (rows(path), last_note(path)) == ([0, 1], note(1))


def test_crash_after_the_commit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = opened(path)
    monkeypatch.setattr(dying, "_see_own_commit", lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        commit(dying, 0)
    assert (rows(path), last_note(path)) == ([0], note(0))
    assert opened(path).has(WRITE_ID, 0), "so the batch that Spark runs again is not written again"


# -- Fencing --


def test_an_overtaken_writer_commits_nothing(path: Path) -> None:
    zombie = opened(path)
    commit(zombie, 0)
    successor = opened(path)
    commit(successor, 1, epoch=2)
    for _ in range(2):
        with pytest.raises(OvertakenError, match="another writer has committed"):
            commit(zombie, 1, 99)
    commit(successor, 2, epoch=2)
    assert (rows(path), last_note(path)) == ([0, 1, 2], note(2, epoch=2))


def test_a_successor_between_commit_and_look_is_noticed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = opened(path)
    look = writer._see_own_commit

    def overtaken() -> None:
        commit(opened(path), 1, epoch=2)
        look()

    monkeypatch.setattr(writer, "_see_own_commit", overtaken)
    with pytest.raises(OvertakenError, match="went from version 0 to 2 in one commit"):
        commit(writer, 0)
    assert (rows(path), last_note(path)) == ([0, 1], note(1, epoch=2))


@pytest.mark.parametrize("successor_compacts", [False, True])
def test_an_overtaken_writer_that_compacts_ends_and_hides_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, successor_compacts: bool
) -> None:
    """The Delta library's own compaction would merge files that were merged already, and double every row."""
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", 1)
    zombie = opened(path)
    for batch in range(4):
        commit(zombie, batch)
    successor = opened(path)
    commit(successor, 4, epoch=2)
    if successor_compacts:
        successor.tend()
    with pytest.raises(OvertakenError):
        zombie.tend()
    assert rows(path) == [0, 1, 2, 3, 4]
    assert last_note(path) == note(4, epoch=2)
    again = opened(path)
    assert again.has(WRITE_ID, 4)
    commit(again, 5, epoch=3)
    assert (rows(path), last_note(path)) == ([0, 1, 2, 3, 4, 5], note(5, epoch=3))


@dataclass
class Actor:
    """A process that takes a lease, opens the table, stages and commits; others may act between any two steps."""

    epoch: int = 0
    writer: TableWriter | None = None
    seen: int = -1
    staged: Path | None = None


STEPS = st.tuples(
    st.sampled_from(["lease", "open", "open", "stage", "stage", "commit", "commit", "tend"]), st.integers(0, 2)
)


# An actor is suspended between its lease and its look at the table, for example while Spark starts.
@example(steps=[("lease", 0), ("lease", 1), ("open", 1), ("stage", 1), ("open", 0), ("commit", 1)])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=6, max_size=24))
def test_whatever_three_writers_do_each_batch_is_there_once(
    steps: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order of steps, the holder of the newest lease loses nothing, and a suspended actor commits nothing."""
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", 1)
    path = tmp_path_factory.mktemp("interleaved")
    actors, epoch, committed = [Actor() for _ in range(3)], 0, 0
    opened(path, epoch=0)
    for step, who in steps:
        actor, newest = actors[who], DeltaTable(path).version()
        if step == "lease":
            epoch += 1
            actors[who] = Actor(epoch=epoch)
        elif step == "open" and actor.epoch:
            actor.writer, actor.seen, actor.staged = opened(path, actor.epoch), newest, None
        elif step == "stage" and actor.writer:
            actor.staged = stage(actor.writer, committed)
        elif step == "commit" and actor.writer and actor.staged:
            if actor.seen != newest:
                with pytest.raises((OvertakenError, TornStageError)):
                    actor.writer.commit(Manifest.of(actor.staged, 1), note(committed, actor.epoch))
            elif actor.epoch == epoch:
                actor.writer.commit(Manifest.of(actor.staged, 1), note(committed, actor.epoch))
                committed, actor.seen = committed + 1, newest + 1
            actor.staged = None
        elif step == "tend" and actor.writer:
            with suppress(OvertakenError):  # It may find no files to merge.
                actor.writer.tend()
            assert actor.seen == newest or DeltaTable(path).version() == newest
            actor.seen = DeltaTable(path).version() if actor.seen == newest else actor.seen
        assert rows(path) == list(range(committed))
        told = last_note(path)
        assert (told.batch if told else -1) == committed - 1
    shutil.rmtree(path)


def test_a_stage_from_which_a_file_is_gone_is_not_committed(path: Path) -> None:
    writer = opened(path)
    commit(writer, 0)
    for taken_before in (True, False):
        staged = stage(writer, 7, 8)
        found = Manifest.of(staged, 2)
        next(staged.rglob("*.parquet")).unlink()
        with pytest.raises(TornStageError, match=r"2 rows were written|a staged file is gone"):
            writer.commit(Manifest.of(staged, 2) if taken_before else found, note(1))
    assert (rows(path), last_note(path)) == ([0], note(0))


ROUNDS, RACERS = 8, 2


def race(root: str, start: Barrier, results: "Queue[tuple[int, str]]") -> None:
    """Commit to each round's table at the same moment as the others, all from the same version."""
    who = os.getpid()
    for number in range(ROUNDS):
        writer = opened(Path(root) / str(number))
        start.wait(60)
        staged = stage(writer, who)
        start.wait(60)
        try:
            writer.commit(Manifest.of(staged), note(0))
            results.put((number, str(who)))
        except OvertakenError:
            results.put((number, "refused"))
        except Exception as error:
            results.put((number, repr(error)))
        start.wait(60)


def test_of_processes_that_commit_at_the_same_moment_one_succeeds(tmp_path: Path) -> None:
    for number in range(ROUNDS):
        opened(tmp_path / str(number))
    found = processes.race(race, tmp_path, racers=RACERS, answers=ROUNDS * RACERS)
    for number in range(ROUNDS):
        winners = [int(answer) for at, answer in found if at == number and answer != "refused"]
        assert len(winners) == 1, winners
        assert rows(tmp_path / str(number)) == winners


# -- Tending --


def test_small_files_are_merged_at_their_time_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", 5)
    writer = opened(path)
    writer.tend()
    for batch in range(4):
        commit(writer, batch)
        writer.tend()
        assert len(DeltaTable(path).file_uris()) == batch + 1
    commit(writer, 4)
    writer.tend()
    assert len(DeltaTable(path).file_uris()) == 1
    assert DeltaTable(path).version() == 6
    commit(writer, 5)
    writer.tend()
    assert len(DeltaTable(path).file_uris()) == 2
    assert (rows(path), last_note(path)) == ([0, 1, 2, 3, 4, 5], note(5))
    assert opened(path).has(WRITE_ID, 5)


def test_the_cadence_goes_on_after_each_merge(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", 5)
    writer = opened(path)
    most = 0
    for batch in range(30):
        commit(writer, batch)
        writer.tend()
        most = max(most, len(DeltaTable(path).file_uris()))
    assert most <= 6
    assert (rows(path), last_note(path)) == (list(range(30)), note(29))


def test_files_that_no_reader_needs_are_deleted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", 5)
    monkeypatch.setattr(tables, "DELETE_EVERY_SECONDS", 0)
    at_once = {**tables._PROPERTIES, "delta.deletedFileRetentionDuration": "interval 0 seconds"}
    monkeypatch.setattr(tables, "_PROPERTIES", at_once)
    writer = opened(path)
    for batch in range(9):
        commit(writer, batch)
        writer.tend()
    assert DeltaTable(path).version() == 11, "nine commits and two merges; a deletion is no commit"
    for batch in range(9, 30):
        commit(writer, batch)
        writer.tend()
        assert rows(path) == list(range(batch + 1))
        assert last_note(path) == note(batch)
    assert len(files_on_disk(path)) < 20
    assert opened(path).has(WRITE_ID, 29)


def test_how_long_replaced_files_are_kept_can_be_set_for_a_table_that_exists(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zombie = opened(path)
    commit(zombie, 0)
    monkeypatch.setenv("REPLACED_FILES_KEPT_MINUTES", "5")
    commit(opened(path), 1)
    there = DeltaTable(path)
    names = ("delta.logRetentionDuration", "delta.deletedFileRetentionDuration")
    assert [there.metadata().configuration[name] for name in names] == ["interval 5 minutes"] * 2
    version = there.version()
    # The commit that sets it allows the deletion of all entries before it.
    assert Note.from_json(said_at(path, version - 1)["userMetadata"]) == note(0)
    commit(opened(path), 2)
    assert DeltaTable(path).version() == version + 1, "it is set once"
    assert (rows(path), last_note(path)) == ([0, 1, 2], note(2))
    with pytest.raises(OvertakenError):
        commit(zombie, 3)


def test_files_are_deleted_several_times_within_the_time_for_which_they_are_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last turn was two minutes ago; with the default the next one would come in an hour."""
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", 1)
    for minutes, turns in (("", 0), ("5", 1)):
        monkeypatch.setenv("REPLACED_FILES_KEPT_MINUTES", minutes)
        writer = opened(path)
        took_turn(path, Freed(files=7))
        last = json.loads((path / "_freed.json").read_text())
        (path / "_freed.json").write_text(json.dumps({**last, "time": last["time"] - 120}))
        commit(writer, turns)
        writer.tend()
        assert (json.loads((path / "_freed.json").read_text())["files"] != 7) == bool(turns)


def test_an_overtaken_writer_deletes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = {**tables._PROPERTIES, "delta.deletedFileRetentionDuration": "interval 0 seconds"}
    monkeypatch.setattr(tables, "_PROPERTIES", at_once)
    zombie = opened(path)
    for batch in range(3):
        commit(zombie, batch)
    zombie.merge_small_files(note(2).to_json())
    assert len(DeltaTable(path).file_uris()) == 1
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", 1)
    monkeypatch.setattr(tables, "DELETE_EVERY_SECONDS", 0)
    successor = opened(path)
    commit(successor, 3, epoch=2)
    before = files_on_disk(path)
    assert len(before) == 5
    with pytest.raises(OvertakenError, match="deletes nothing"):
        zombie.tend()
    assert files_on_disk(path) == before
    with pytest.raises(OvertakenError):
        commit(zombie, 3, 99)
    successor.tend()
    assert len(files_on_disk(path)) < 5
    assert (rows(path), last_note(path)) == ([0, 1, 2, 3], note(3, epoch=2))


def test_what_readers_may_still_need_is_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", 5)
    monkeypatch.setattr(tables, "DELETE_EVERY_SECONDS", 0)
    writer = opened(path)
    for batch in range(4):
        commit(writer, batch)
    reader = DeltaTable(path)
    commit(writer, 4)
    writer.tend()
    assert sorted(files_of(reader, path).to_table()["number"].to_pylist()) == [0, 1, 2, 3]
    assert rows(path) == [0, 1, 2, 3, 4]


def test_a_long_history_keeps_its_last_note_and_what_was_done(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This goes past two checkpoints of the log, and past the removal of the entries before them."""
    writer = opened(path)
    for batch in range(120):
        commit(writer, batch)
        if batch in (48, 49, 50, 98, 99, 100, 119):
            assert last_note(path) == note(batch)
            assert opened(path).has(WRITE_ID, batch)
    log = path / "_delta_log"
    for entry in log.glob("*.json"):
        os.utime(entry, (0, 0))
    DeltaTable(path).cleanup_metadata()
    assert not (log / f"{0:020}.json").exists()
    assert last_note(path) == note(119)
    successor = opened(path)
    assert [successor.has(WRITE_ID, batch) for batch in (0, 119, 120)] == [True, True, False]
    commit(successor, 120)
    assert (rows(path), last_note(path)) == (list(range(121)), note(120))


# -- Statistics: readers pass over files by them, so a wrong one loses rows --

WIDE = pa.schema(
    [
        ("number", pa.int64()),
        ("text", pa.string()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("amount", pa.decimal128(18, 6)),
        ("raw", pa.binary()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        ("slice", pa.string()),
    ]
)
TEXTS = ["", "a", "b", "reason", "x" * 32, "x" * 33, "x" * 40, "ä", "\U0001f30a", "z" * 100]
TIMES = [datetime(1969, 12, 31, 23, 59, 59, 999999, UTC), datetime(2026, 11, 18, tzinfo=UTC)]
ROW = st.fixed_dictionaries(
    {
        "number": st.none() | st.sampled_from([-(2**63), -5, -1, 0, 1, 2**53 + 1, 2**63 - 1]),
        "text": st.none() | st.sampled_from(TEXTS),
        "at": st.none() | st.sampled_from([time + timedelta(microseconds=n) for time in TIMES for n in (0, 1, 999)]),
        "amount": st.none() | st.sampled_from([Decimal(n) for n in ("-0.000001", "0", "0.1", "999999999999.999999")]),
        "raw": st.none() | st.sampled_from([b"", b"\xff", b"text"]),
        "headers": st.none() | st.just([]) | st.just([{"key": "k", "value": None}]),
    }
)


def write_rows(path: Path, files: list[list[dict[str, Any]]]) -> None:
    writer = TableWriter.open(path, WIDE, "slice", epoch=1)
    columns = WIDE.remove(WIDE.get_field_index("slice"))
    for batch, file_rows in enumerate(files):
        folder = writer.new_stage()
        file = folder / "slice=a" / "part.parquet"
        file.parent.mkdir(parents=True)
        # Two rows a group: bounds and nulls must be combined over the groups of a file.
        pq.write_table(pa.Table.from_pylist(file_rows, schema=columns), file, row_group_size=2)
        writer.commit(Manifest.of(folder), note(batch))


def conditions(row: dict[str, Any]) -> Iterator[tuple[str, pc.Expression, Any]]:
    """Questions about a row's values, each as an Arrow expression and as a plain function."""
    for name in ("number", "text", "at", "amount", "raw"):
        field, value = pc.field(name), row[name]
        yield name, field.is_null(), lambda v: v is None
        yield name, field.is_valid(), lambda v: v is not None
        if value is not None:
            scalar = pa.scalar(value, WIDE.field(name).type)
            yield name, field == scalar, lambda v, value=value: v == value
            if name != "raw":
                yield name, field < scalar, lambda v, value=value: v is not None and v < value
                yield name, field >= scalar, lambda v, value=value: v is not None and v >= value


@settings(max_examples=25, deadline=None)
@given(
    files=st.lists(st.lists(ROW, min_size=1, max_size=5), min_size=1, max_size=3),
    asked=ROW,
)
def test_statistics_lose_no_row(
    files: list[list[dict[str, Any]]], asked: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("statistics")
    write_rows(path, files)
    dataset = files_of(DeltaTable(path), path)
    everything = [row for rows_of_file in files for row in rows_of_file]
    with duckdb.connect() as database:
        database.execute("SET TimeZone = 'UTC'")
        database.register("lake", dataset)
        for name, expression, holds in conditions(asked):
            wanted = sum(holds(row[name]) for row in everything)
            assert dataset.count_rows(filter=expression) == wanted, str(expression)
        for name in ("number", "text", "at", "amount", "raw", "headers"):
            nulls = sum(row[name] is None for row in everything)
            for condition, wanted in (("IS NULL", nulls), ("IS NOT NULL", len(everything) - nulls)):
                found = database.execute(f'SELECT count(*) FROM lake WHERE "{name}" {condition}').fetchone()
                assert found == (wanted,), f"{name} {condition}"
            if name != "headers" and asked[name] is not None:
                for sign, holds in (("=", lambda v, a: v == a), ("<=", lambda v, a: v <= a), (">", lambda v, a: v > a)):
                    wanted = sum(row[name] is not None and holds(row[name], asked[name]) for row in everything)
                    query = f'SELECT count(*) FROM lake WHERE "{name}" {sign} ?'
                    value = [asked[name]]
                    assert database.execute(query, value).fetchone() == (wanted,), f"{name} {sign} {asked[name]!r}"
    shutil.rmtree(path)


def test_statistics_say_what_is_known_and_nothing_else(path: Path) -> None:
    low, high = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
    write_rows(
        path,
        [
            [
                {"number": 3, "text": "b", "at": high, "amount": Decimal(1), "raw": b"x", "headers": []},
                {"number": None, "text": "x" * 33, "at": None, "amount": None, "raw": None, "headers": None},
                {"number": -1, "text": None, "at": low, "amount": None, "raw": None, "headers": None},
            ]
        ],
    )
    (entry,) = [json.loads(line) for line in (path / "_delta_log" / f"{1:020}.json").read_text().splitlines()][1:2]
    stats = json.loads(entry["add"]["stats"])
    assert stats == {
        "numRecords": 3,
        "minValues": {"number": -1, "text": "b", "at": "2026-01-01T00:00:00.000000Z"},
        "maxValues": {"number": 3, "at": "2026-01-02T00:00:00.000000Z"},
        "nullCount": {"number": 1, "text": 1, "at": 1, "amount": 2, "raw": 2},
    }


def test_statistics_survive_a_merge(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", 9)
    writer = opened(path)
    for batch in range(9):
        commit(writer, batch)
    writer.tend()
    assert len(DeltaTable(path).file_uris()) == 1
    dataset = files_of(DeltaTable(path), path)
    assert dataset.count_rows(filter=pc.field("text").is_null()) == 3
    assert dataset.count_rows(filter=pc.field("text").is_valid()) == 6
    assert dataset.count_rows(filter=pc.field("number") >= 7) == 2
