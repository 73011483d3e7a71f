"""Tables with one writer: a commit is whole or not there and happens once, and an overtaken writer commits nothing."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from multiprocessing.synchronize import Barrier
from pathlib import Path
from queue import Queue
from threading import Event, local
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jobs.lake import stream_tables as tables
from jobs.lake.delta.fenced import OvertakenError
from jobs.lake.delta.manifest import Manifest, TornStageError
from jobs.lake.delta.reading import files_of, rows_by_partition
from jobs.lake.stream_tables import Note, Ranges, TableWriter, last_note
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
    assert kept["delta.logRetentionDuration"] == "interval 360 minutes"
    assert kept["delta.deletedFileRetentionDuration"] == "interval 360 minutes"
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


def reset_note() -> Note:
    """Partition 0 was read to 30, and its next record is 50; the other partition goes on where it was."""
    ranges = Ranges(topic_id="t1", offsets={0: (30, 50), 11: (2, 2)})
    return replace(note(0, 2), batch=None, topics={"numbers": ranges})


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


@pytest.mark.usefixtures("nothing_kept")
def test_a_reset_survives_a_merge_and_the_files_it_took_away_are_deleted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", 5)
    monkeypatch.setattr(tables, "DELETE_EVERY_SECONDS", 0)
    writer = opened(path)
    for batch in range(3):
        commit(writer, batch)
    taken = files_on_disk(path)
    opened(path).reset(reset_note(), clear=True)
    writer = opened(path)
    for batch in range(12):
        writer.commit(Manifest.of(stage(writer, batch)), note(batch, epoch=3, write_id="new"))
        writer.maintain()
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
    assert DeltaTable(path).metadata().configuration == tables._PROPERTIES | tables._kept()
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
        successor.maintain()
    with pytest.raises(OvertakenError):
        zombie.maintain()
    assert rows(path) == [0, 1, 2, 3, 4]
    assert last_note(path) == note(4, epoch=2)
    again = opened(path)
    assert again.has(WRITE_ID, 4)
    commit(again, 5, epoch=3)
    assert (rows(path), last_note(path)) == ([0, 1, 2, 3, 4, 5], note(5, epoch=3))


class Killed(BaseException):
    """The process of a suspended merge was killed."""


class Merge:
    """`maintain` of a writer, in a thread. It is suspended after it has written a merged file, until it is woken."""

    def __init__(self, writer: TableWriter, pool: ThreadPoolExecutor) -> None:
        self._reached, self._wake, self._is_killed = Event(), Event(), False
        self._work = pool.submit(self._run, writer)
        assert self._reached.wait(60)

    def suspend(self) -> None:
        """Be called by the thread of this merge."""
        self._reached.set()
        self._wake.wait(60)
        if self._is_killed:
            raise Killed

    def go_on(self) -> None:
        """Let `maintain` end. An overtaken writer may find no files to merge, and then it is not refused."""
        self._wake.set()
        with suppress(OvertakenError, TornStageError):
            self._work.result(60)

    def kill(self) -> None:
        self._is_killed = True
        self._wake.set()
        with suppress(Killed, OvertakenError, TornStageError):
            self._work.result(60)

    def _run(self, writer: TableWriter) -> None:
        _merging.merge = self
        try:
            writer.maintain()
        finally:
            self._reached.set()


# The merge of the current thread.
_merging = local()


def write_and_suspend(*rows: Any, write: Callable[..., None] = ds.write_dataset, **options: Any) -> None:
    """`pyarrow.dataset.write_dataset`, for the threads of `Merge`."""
    write(*rows, **options)
    _merging.merge.suspend()


@dataclass
class Actor:
    """A process that takes a lease, opens the table, stages and commits; others may act between any two steps."""

    epoch: int = 0
    writer: TableWriter | None = None
    seen: int = -1
    staged: Path | None = None
    merge: Merge | None = None

    def kill(self) -> None:
        if self.merge:
            self.merge.kill()

    def commit(self, writer: TableWriter, staged: Path, batch: int, newest: int, *, whole: bool) -> int:
        """Commit what is staged; return how many batches are committed then. ``whole``: the stage is still there."""
        if self.seen != newest or not whole:
            with pytest.raises((OvertakenError, TornStageError)):
                writer.commit(Manifest.of(staged, 1), note(batch, self.epoch))
            return batch
        writer.commit(Manifest.of(staged, 1), note(batch, self.epoch))
        self.seen = newest + 1
        return batch + 1


STEPS = st.tuples(
    st.sampled_from(["lease", "open", "open", "stage", "stage", "commit", "commit", "write merge", "commit merge"]),
    st.integers(0, 2),
)
# Three batches of one writer: there are files to merge.
THREE_BATCHES = [("lease", 0), ("open", 0), *[("stage", 0), ("commit", 0)] * 3]


# An actor is suspended between its lease and its look at the table, for example while Spark starts.
@example(steps=[("lease", 0), ("lease", 1), ("open", 1), ("stage", 1), ("open", 0), ("commit", 1)])
# An actor is suspended while it merges, and its successor has not committed yet when it goes on.
@example(steps=[*THREE_BATCHES, ("write merge", 0), ("lease", 1), ("open", 1), ("commit merge", 0)])
# An actor is suspended after its last look at its lease. Its successor has opened the table, and has staged the batch.
@example(steps=[*[(step, who) for who in (0, 1) for step in ("lease", "open", "stage")], ("commit", 0), ("commit", 1)])
# Or it has opened the table after its successor, so that its stage is still there.
@example(
    steps=[
        *[("lease", 0), ("lease", 1)],
        *[(step, who) for step in ("open", "stage") for who in (1, 0)],
        *[("commit", 0), ("commit", 1), ("open", 1), ("stage", 1), ("commit", 1)],
    ]
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=6, max_size=24))
def test_whatever_three_writers_do_each_batch_is_there_once(
    steps: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order of steps, each batch is there once, and no actor commits after another one without looking.

    An actor of an older lease may still commit if it has seen the newest version: it was suspended after it looked at
    its lease, and nobody has committed since. Its batch is the one that comes next. The holder of the newest lease then
    commits nothing, opens the table again and finds the batch there. If the holder has opened the table before, it has
    removed the older stages, so nothing is committed.
    """
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", 1)
    monkeypatch.setattr(ds, "write_dataset", write_and_suspend)
    path = tmp_path_factory.mktemp("interleaved")
    actors, epoch, newest_opened, committed = [Actor() for _ in range(3)], 0, 0, 0
    opened(path, epoch=0)
    with ThreadPoolExecutor(3) as pool, ExitStack() as stack:
        stack.callback(lambda: [actor.kill() for actor in actors])
        for step, who in steps:
            actor, newest = actors[who], DeltaTable(path).version()
            if step == "lease":
                epoch += 1
                actor.kill()
                actors[who] = Actor(epoch=epoch)
            elif step == "commit merge" and actor.merge:
                actor.merge.go_on()
                actor.merge = None
                assert actor.seen == newest or DeltaTable(path).version() == newest
                actor.seen = DeltaTable(path).version() if actor.seen == newest else actor.seen
            elif actor.merge:
                pass  # It is suspended.
            elif step == "open" and actor.epoch:
                actor.writer, actor.seen, actor.staged = opened(path, actor.epoch), newest, None
                newest_opened = max(newest_opened, actor.epoch)
                assert not committed or actor.writer.has(WRITE_ID, committed - 1)
            elif step == "stage" and actor.writer:
                actor.staged = stage(actor.writer, committed)
            elif step == "commit" and actor.writer and actor.staged:
                whole = actor.epoch == newest_opened or bool(list(actor.staged.rglob("*.parquet")))
                committed = actor.commit(actor.writer, actor.staged, committed, newest, whole=whole)
                actor.staged = None
            elif step == "write merge" and actor.writer:
                actor.merge = Merge(actor.writer, pool)
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
