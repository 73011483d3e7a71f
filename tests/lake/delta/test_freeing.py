"""Files that no reader needs are deleted from all tables of a lake, without their writers and without harm to them."""

import json
import logging
import shutil
import time
from pathlib import Path

import pytest
from deltalake import DeltaTable

from jobs.lake.delta import fenced, freeing
from jobs.lake.delta.fenced import opened
from jobs.lake.delta.freeing import free_tables, make_room
from jobs.lake.delta.log import entry_of
from jobs.lake.stream_tables import TableWriter
from tests.lake.delta.test_retention import age, kept_for
from tests.lake.test_stream_tables import SCHEMA, commit, files_on_disk, note, rows, stage

AT_ONCE = "interval 0 seconds"


def with_replaced_files(path: Path, interval: str = AT_ONCE) -> TableWriter:
    """Five files, and the file into which they were merged."""
    writer = kept_for(path, interval)
    for batch in range(5):
        commit(writer, batch)
    writer.merge_small_files(note(4).to_json())
    assert len(files_on_disk(path)) == 6
    return writer


def test_tables_of_all_kinds_are_looked_through_and_only_those_of_the_lake(tmp_path: Path) -> None:
    kinds = ("events", "live", "final", "ledger", "drift", "balance")
    for kind in kinds:
        with_replaced_files(tmp_path / kind / "rolling_sum")
    with_replaced_files(tmp_path / "of_others" / "rolling_sum")
    (tmp_path / "live" / "no_table").mkdir()
    make_room(tmp_path)
    for kind in kinds:
        assert len(files_on_disk(tmp_path / kind / "rolling_sum")) == 1
        assert rows(tmp_path / kind / "rolling_sum") == list(range(5))
    assert len(files_on_disk(tmp_path / "of_others" / "rolling_sum")) == 6


def test_what_readers_may_need_stays(tmp_path: Path) -> None:
    with_replaced_files(tmp_path / "live" / "rolling_sum", "interval 6 hours")
    make_room(tmp_path)
    assert len(files_on_disk(tmp_path / "live" / "rolling_sum")) == 6


def test_a_table_that_cannot_be_opened_keeps_no_other_from_being_looked_through(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "events" / "broken" / "_delta_log"
    log.mkdir(parents=True)
    (log / f"{0:020}.json").write_text("no entry of a log")
    with_replaced_files(tmp_path / "live" / "rolling_sum")
    with caplog.at_level(logging.WARNING, freeing.__name__):
        make_room(tmp_path)
    assert len(files_on_disk(tmp_path / "live" / "rolling_sum")) == 1
    assert f"{log.parent} could not be searched for files to delete" in caplog.text


def test_a_writer_that_is_about_to_commit_goes_on(tmp_path: Path) -> None:
    """The writer staged long ago, and placed a file in a new folder; no version names that file yet."""
    path = tmp_path / "live" / "rolling_sum"
    writer = with_replaced_files(path)
    (file,) = stage(writer, 7, partition="b").rglob("*.parquet")
    age(path, 72, file)
    action = writer.place(file)
    make_room(tmp_path)
    assert len(files_on_disk(path)) == 2
    writer.transact([action], note(5).to_json())
    commit(writer, 6)
    assert rows(path) == [0, 1, 2, 3, 4, 6, 7]


def test_a_table_that_is_written_meanwhile_is_left_to_the_next_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "live" / "rolling_sum"
    writer, look = with_replaced_files(path), fenced.unneeded

    def overtaken(*table: object) -> object:
        found = look(*table)  # type: ignore[arg-type]
        commit(writer, 5)
        return found

    with monkeypatch.context() as then:
        then.setattr(fenced, "unneeded", overtaken)
        assert free_tables(tmp_path, 0).files == 0
    assert free_tables(tmp_path, 0).files == 5
    assert rows(path) == list(range(6))


def test_a_table_whose_log_is_torn_is_left_to_its_writer(tmp_path: Path) -> None:
    """The torn commit has a checkpoint, and by it the replaced files are not needed. Without that commit they are."""
    path = tmp_path / "live" / "rolling_sum"
    opened(path, SCHEMA, "slice", {"delta.deletedFileRetentionDuration": AT_ONCE, "delta.checkpointInterval": "1"})
    writer = with_replaced_files(path)
    entry = entry_of(path, writer.version)
    assert entry.with_name(f"{writer.version:020}.checkpoint.parquet").is_file()
    entry.write_text(entry.read_text()[:100])
    assert DeltaTable(path).version() == writer.version
    make_room(tmp_path)
    assert len(files_on_disk(path)) == 6
    mended = TableWriter.open(path, SCHEMA, "slice", epoch=2)
    assert mended.version < writer.version
    assert rows(path) == list(range(5))


def test_a_table_is_looked_through_once_in_a_while_whoever_asks(tmp_path: Path) -> None:
    path = tmp_path / "live" / "rolling_sum"
    writer = with_replaced_files(path)
    make_room(tmp_path)
    for batch in range(5, 10):
        commit(writer, batch)
    writer.merge_small_files(note(9).to_json())
    there = files_on_disk(path)
    make_room(tmp_path)
    assert files_on_disk(path) == there
    (path / "_freed.json").write_text(json.dumps({"time": time.time() - 60}))
    make_room(tmp_path)
    assert len(there) - len(files_on_disk(path)) >= 5


def test_a_stage_that_ends_at_this_moment_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "live" / "rolling_sum"
    writer, look = with_replaced_files(path), fenced.last_written
    ends = path / "_staging" / ("a" * 32)
    ends.mkdir(parents=True)

    def late(folder: Path) -> float:
        shutil.rmtree(folder)
        return look(folder)

    monkeypatch.setattr(fenced, "last_written", late)
    assert writer.delete_what_no_reader_needs().files == 5
    assert not ends.exists()
