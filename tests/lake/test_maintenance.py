"""A writer keeps its table small: it merges, deletes and removes while it commits."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

from jobs.lake import stream_tables as tables
from jobs.lake.delta.fenced import OvertakenError
from jobs.lake.delta.log import commit_info
from jobs.lake.delta.manifest import TornStageError
from jobs.lake.delta.reading import files_of
from jobs.lake.delta.retention import Freed, took_turn
from jobs.lake.stream_tables import Note, last_note
from tests.lake.test_stream_tables import WRITE_ID, commit, files_on_disk, note, opened, rows

# -- Tending --


def test_small_files_are_merged_at_their_time_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", 5)
    writer = opened(path)
    writer.maintain()
    for batch in range(4):
        commit(writer, batch)
        writer.maintain()
        assert len(DeltaTable(path).file_uris()) == batch + 1
    commit(writer, 4)
    writer.maintain()
    assert len(DeltaTable(path).file_uris()) == 1
    assert DeltaTable(path).version() == 6
    commit(writer, 5)
    writer.maintain()
    assert len(DeltaTable(path).file_uris()) == 2
    assert (rows(path), last_note(path)) == ([0, 1, 2, 3, 4, 5], note(5))
    assert opened(path).has(WRITE_ID, 5)


def test_the_cadence_goes_on_after_each_merge(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", 5)
    writer = opened(path)
    most = 0
    for batch in range(30):
        commit(writer, batch)
        writer.maintain()
        most = max(most, len(DeltaTable(path).file_uris()))
    assert most <= 6
    assert (rows(path), last_note(path)) == (list(range(30)), note(29))


@pytest.mark.usefixtures("nothing_kept")
def test_files_that_no_reader_needs_are_deleted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", 5)
    monkeypatch.setattr(tables, "DELETE_EVERY_SECONDS", 0)
    writer = opened(path)
    for batch in range(9):
        commit(writer, batch)
        writer.maintain()
    assert DeltaTable(path).version() == 11, "nine commits and two merges; a deletion is no commit"
    for batch in range(9, 30):
        commit(writer, batch)
        writer.maintain()
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
    assert Note.from_json(commit_info(path, version - 1)["userMetadata"]) == note(0)
    commit(opened(path), 2)
    assert DeltaTable(path).version() == version + 1, "it is set once"
    assert (rows(path), last_note(path)) == ([0, 1, 2], note(2))
    with pytest.raises(OvertakenError):
        commit(zombie, 3)
    monkeypatch.delenv("REPLACED_FILES_KEPT_MINUTES")
    opened(path)
    kept = DeltaTable(path).metadata().configuration
    assert [kept[name] for name in names] == ["interval 360 minutes"] * 2, "the default is set again"
    assert last_note(path) == note(2)


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
        writer.maintain()
        assert (json.loads((path / "_freed.json").read_text())["files"] != 7) == bool(turns)


def test_a_merge_that_has_lost_its_stage_takes_no_row_out_of_the_table(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is suspended in its merge. Its successor removes the stage when it starts, and commits nothing yet."""
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", 1)
    suspended, write = opened(path), ds.write_dataset
    for batch in range(3):
        commit(suspended, batch)

    def taken_over(*rows: Any, **options: Any) -> None:
        write(*rows, **options)
        opened(path, epoch=2)

    monkeypatch.setattr(ds, "write_dataset", taken_over)
    with pytest.raises(TornStageError, match=r"3 rows were written into .*, but 0 are there: nothing is committed"):
        suspended.maintain()
    assert (rows(path), last_note(path)) == ([0, 1, 2], note(2))
    commit(opened(path, epoch=2), 3, epoch=2)
    assert rows(path) == [0, 1, 2, 3]


@pytest.mark.usefixtures("nothing_kept")
def test_an_overtaken_writer_deletes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        zombie.maintain()
    assert files_on_disk(path) == before
    with pytest.raises(OvertakenError):
        commit(zombie, 3, 99)
    successor.maintain()
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
    writer.maintain()
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
