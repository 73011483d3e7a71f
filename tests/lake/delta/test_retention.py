"""Files that no version can need any more are deleted, and no others, whichever writer is suspended meanwhile."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from jobs.lake import stream_tables as tables
from jobs.lake.delta import fenced, retention
from jobs.lake.delta.fenced import OvertakenError, opened
from jobs.lake.delta.freeing import free_tables
from jobs.lake.delta.log import entry_of
from jobs.lake.delta.manifest import Manifest
from jobs.lake.delta.reading import files_of, files_with_sizes
from jobs.lake.ledger import Ledger
from jobs.lake.stream_tables import TableWriter
from jobs.pipelines import PIPELINES
from tests.lake.test_stream_tables import SCHEMA, commit, files_on_disk, note, rows, stage

HOURS = 3600.0
SUM = PIPELINES["rolling_sum"]


def kept_for(path: Path, interval: str) -> TableWriter:
    """A table that keeps removed files, and its log, for so long."""
    kept = {"delta.deletedFileRetentionDuration": interval, "delta.logRetentionDuration": interval}
    opened(path, SCHEMA, "slice", {**tables._PROPERTIES, **kept})
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise the product would set the properties of the settings.
        patch.setattr(tables, "_kept", dict)
        return TableWriter.open(path, SCHEMA, "slice", epoch=1)


def age(path: Path, hours: float, *files: Path) -> None:
    """Make all files, or only these, look so many hours older."""
    for file in files or [file for file in path.rglob("*") if file.is_file()]:
        modified = file.stat().st_mtime - hours * HOURS
        os.utime(file, (modified, modified))


def plant(file: Path, hours: float = 0) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"nobody names this file")
    age(file.parent, hours, file)
    return file


def work(writer: TableWriter, batches: range) -> None:
    """Commit batches, and merge small files now and then."""
    for batch in batches:
        commit(writer, batch)
        if batch % 5 == 4:
            writer.merge_small_files(note(batch).to_json())


def test_a_table_does_not_grow_beyond_what_its_versions_need(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This goes past several checkpoints of the log, which drop removed files before their deletion from the disk."""
    writer = kept_for(path, "interval 6 hours")
    eight_hours_ago = SimpleNamespace(time=lambda: time.time() - 8 * HOURS, monotonic=time.monotonic)
    with monkeypatch.context() as then:
        then.setattr(fenced, "time", eight_hours_ago)
        work(writer, range(130))
    age(path, 8)
    first = writer.version
    work(writer, range(130, 250))
    orphan = plant(path / "slice=a" / "crashed.parquet", hours=8)
    (path / "slice=gone").mkdir()
    left_alone = [
        plant(path / "slice=a" / "placed-a-moment-ago.parquet"),
        plant(path / "_staging" / "run" / "slice=a" / "staged.parquet", hours=8),
        plant(path / "_aside" / "slice=a" / "kept.parquet", hours=8),
        plant(path / "copy" / "by-hand.parquet", hours=8),
    ]
    there, on_disk = files_on_disk(path), sum(file.stat().st_size for file in path.glob("slice=*/*"))
    freed = writer.delete_what_no_reader_needs()
    needed = {file for version in range(first, writer.version + 1) for file in named_at(path, version)}
    assert {str(file) for file in files_on_disk(path)} == {*needed, "slice=a/placed-a-moment-ago.parquet"}
    assert len(there) - freed.files == len(needed) + 1
    assert freed.files > 130
    assert freed.bytes == on_disk - sum(file.stat().st_size for file in path.glob("slice=*/*"))
    assert not orphan.exists()
    assert all(file.exists() for file in left_alone)
    assert not (path / "slice=gone").exists()
    assert not (path / "_delta_log" / f"{0:020}.json").exists(), "the library cleans the log by itself"
    for version in range(first, writer.version + 1):
        found = files_of(DeltaTable(path, version=version), path).to_table()["number"].to_pylist()
        assert sorted(found) == list(range(len(found)))
    assert rows(path) == list(range(250))
    assert writer.delete_what_no_reader_needs().files == 0


def named_at(path: Path, version: int) -> set[str]:
    return set(files_with_sizes(DeltaTable(path, version=version)))


def test_folders_of_partitions_that_are_empty_are_removed(path: Path) -> None:
    writer = kept_for(path, "interval 0 seconds")
    for batch, slice_ in enumerate(("old", "new")):
        writer.commit(Manifest.of(stage(writer, batch, partition=slice_)), note(batch))
    writer.prune(["old"])
    freed = writer.delete_what_no_reader_needs()
    assert (freed.files, freed.folders) == (1, 1)
    assert [folder.name for folder in path.glob("slice=*")] == ["slice=new"]


# -- A file that is placed and not committed yet --


@pytest.mark.parametrize("keep", [False, True])
def test_a_file_that_was_staged_long_ago_is_not_deleted_before_its_commit(path: Path, keep: bool) -> None:
    """A writer that lost its lease deletes, while its successor, which has not committed yet, places such a file."""
    commit(kept_for(path, "interval 0 seconds"), 0)
    suspended, successor = (TableWriter.open(path, SCHEMA, "slice", epoch=1) for _ in range(2))
    (file,) = stage(successor, 7).rglob("*.parquet")
    age(path, 72, file)
    action = successor.place(file, keep=keep)
    assert suspended.delete_what_no_reader_needs().files == 0
    successor.transact([action], note(1).to_json())
    assert rows(path) == [0, 7]


def test_what_an_overtaken_writer_has_placed_is_deleted_and_its_commit_fails(path: Path) -> None:
    suspended = kept_for(path, "interval 0 seconds")
    (file,) = stage(suspended, 7).rglob("*.parquet")
    action = suspended.place(file)
    successor = TableWriter.open(path, SCHEMA, "slice", epoch=1)
    commit(successor, 0)
    assert successor.delete_what_no_reader_needs().files == 1
    with pytest.raises(OvertakenError):
        suspended.transact([action], note(1).to_json())
    assert rows(path) == [0]


def test_no_young_file_is_deleted_while_the_newest_commit_is_in_the_future(tmp_path: Path) -> None:
    """The clock was set back by an hour. A writer places a file, and another process deletes before its commit."""
    path = tmp_path / "live" / "rolling_sum"
    writer = kept_for(path, "interval 0 seconds")
    commit(writer, 0)
    crashed = plant(path / "slice=a" / "crashed.parquet", hours=2)
    age(path, -1, entry_of(path, writer.version))
    (file,) = stage(writer, 7).rglob("*.parquet")
    action = writer.place(file)
    assert free_tables(tmp_path, 0).files == 1
    assert not crashed.exists()
    writer.transact([action], note(1).to_json())
    assert rows(path) == [0, 7]


def test_a_file_is_placed_also_if_its_folder_is_deleted_at_this_moment(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, place, deleted = kept_for(path, "interval 0 seconds"), fenced.place, list[Path]()

    def late(file: Path, placed: Path, *, keep: bool = False) -> None:
        if not deleted:
            placed.parent.rmdir()
            deleted.append(placed.parent)
        place(file, placed, keep=keep)

    monkeypatch.setattr(fenced, "place", late)
    commit(writer, 0)
    assert deleted == [path / "slice=a"]
    assert rows(path) == [0]


def test_a_staged_file_that_is_gone_is_still_an_error(path: Path) -> None:
    writer = kept_for(path, "interval 0 seconds")
    with pytest.raises(FileNotFoundError):
        writer.place(writer.new_stage() / "slice=a" / "gone.parquet")


# -- When --


def test_a_table_is_looked_through_once_an_hour_whichever_process_writes_it(path: Path) -> None:
    assert kept_for(path, "interval 0 seconds").delete_now_and_then() is not None
    assert TableWriter.open(path, SCHEMA, "slice", epoch=1).delete_now_and_then() is None
    said = path / retention._LAST
    for hours, is_due in ((0.9, False), (1.1, True), (-5, True)):
        said.write_text(json.dumps({"time": time.time() - hours * HOURS}))
        assert (TableWriter.open(path, SCHEMA, "slice", epoch=1).delete_now_and_then() is not None) is is_due, hours
    said.write_text("torn")
    assert TableWriter.open(path, SCHEMA, "slice", epoch=1).delete_now_and_then() is not None


def test_a_long_list_is_deleted_in_several_turns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MOST_FILES", 2)
    writer = kept_for(path, "interval 0 seconds")
    for number in range(5):
        plant(path / f"slice=s{number}" / "crashed.parquet", hours=1)
    commit(writer, 0)
    turns = []
    while (freed := writer.delete_now_and_then()) is not None:
        turns.append((freed.files, freed.left, freed.folders))
    assert turns == [(2, 3, 2), (2, 1, 2), (1, 0, 1)]
    assert rows(path) == [0]


# -- How much a merge rewrites --


def test_a_table_of_many_commits_is_rewritten_a_few_times_only(path: Path) -> None:
    writer, numbers = TableWriter.open(path, SCHEMA, "slice", epoch=1), 400
    text = {number: os.urandom(8000).hex() for number in range(numbers)}
    for batch in range(numbers):
        file = writer.new_stage() / "slice=batches" / "rows.parquet"
        file.parent.mkdir(parents=True)
        pq.write_table(pa.table({"number": [batch], "text": [text[batch]]}), file)
        writer.commit(Manifest.of(file.parent.parent), note(batch))
        if batch % 10 == 9:
            writer.merge_small_files(note(batch).to_json())
    sizes = {True: 0, False: 0}
    for entry in (path / "_delta_log").glob("*.json"):
        for line in entry.read_text().splitlines():
            if line.startswith('{"add"'):
                add = json.loads(line)["add"]
                sizes[add["dataChange"]] += add["size"]
    assert sizes[False] < 7 * sizes[True]
    assert len(files_with_sizes(DeltaTable(path))) < 10
    assert rows(path) == list(range(numbers))


def test_what_a_writer_that_died_has_staged_goes_a_day_later(tmp_path: Path) -> None:
    """This is for batch tables. Stages of streams bear their epoch, and the driver of the next epoch removes them."""
    ledger = Ledger.open(tmp_path, SUM)
    old, new, run = (ledger.staging / name for name in ("a" * 32, "b" * 32, f"scheduled-{'c' * 32}"))
    for folder in (old, new, run):
        plant(folder / "day=2026-01-31" / "rows.parquet")
    age(old, 25, old)
    age(run, 25, run)
    age(new, 23, new)
    ledger.delete_what_no_reader_needs()
    assert sorted(ledger.staging.iterdir()) == [new, run]
