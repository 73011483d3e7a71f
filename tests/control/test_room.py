"""The room on the disk of a lake: too little of it is one incident, which is over when there is room again."""

import os
import shutil
import time
from pathlib import Path

import pyarrow as pa
import pytest

from jobs.control.epochs import Beat, Owner, Phase, Receipt
from jobs.control.folder import Control
from jobs.control.incident import Incident, full_disk_key
from jobs.control.incidents import Incidents
from jobs.control.room import Room
from jobs.lake.delta.log import entry_of
from jobs.lake.delta.manifest import Manifest
from jobs.lake.stream_tables import Note, Ranges, TableWriter
from jobs.storage.folders import folder_at
from jobs.storage.parquet import write
from tests.small_disk import can_mount, fill, small_disk

MORE_THAN_ANY_DISK = 10**18
SCHEMA = pa.schema([("slice", pa.string()), ("value", pa.int64())])
needs_a_small_disk = pytest.mark.skipif(not can_mount(), reason="only root can mount a disk that is to be filled")


def incidents(lake: Path) -> list[Incident]:
    return [found for found in Incidents.of(lake).all() if found.key == full_disk_key()]


def test_too_little_room_is_one_incident_and_enough_of_it_is_its_end(tmp_path: Path) -> None:
    assert not Room(tmp_path, 1).is_short()
    assert incidents(tmp_path) == []
    for _ in range(2):
        another_process = Room(tmp_path, MORE_THAN_ANY_DISK)
        assert another_process.is_short()
        assert another_process.is_short()
    (opened,) = incidents(tmp_path)
    assert not opened.closed
    assert f"the disk of the lake ({tmp_path}) has " in opened.text
    assert "LAKE_RESERVE_MB keeps 1,000,000,000,000 MB free" in opened.text
    assert not Room(tmp_path, 1).is_short()
    (closed,) = incidents(tmp_path)
    assert closed.closed


def test_the_next_shortage_is_an_incident_of_its_own(tmp_path: Path) -> None:
    room = Room(tmp_path, 1)
    for _ in range(2):
        assert not room.is_short()
        assert Room(tmp_path, MORE_THAN_ANY_DISK).is_short()
    assert [found.closed for found in incidents(tmp_path)] == [False, True]


def test_work_goes_on_only_when_there_is_more_than_the_reserve(tmp_path: Path) -> None:
    """Between the two limits the earlier state stays, for every process."""
    reserve = round(shutil.disk_usage(tmp_path).free / 1.1)
    assert not Room(tmp_path, 1).is_short()
    assert not Room(tmp_path, reserve).is_short()
    assert Room(tmp_path, MORE_THAN_ANY_DISK).is_short()
    assert Room(tmp_path, reserve).is_short()
    assert not Room(tmp_path, round(reserve / 1.5)).is_short()


def test_a_lake_without_a_shortage_before_waits_only_below_the_reserve(tmp_path: Path) -> None:
    """A lake that is new, or that an earlier version made, is in this state: it has no spare yet."""
    reserve = round(shutil.disk_usage(tmp_path).free / 1.1)
    assert not Room(tmp_path, reserve).is_short()
    assert incidents(tmp_path) == []
    assert (tmp_path / "control" / "_spare").is_file()


def test_an_incident_that_stayed_open_is_closed_by_the_first_look_that_finds_room(tmp_path: Path) -> None:
    """A power cut may restore the spare that was deleted after the incident was opened."""
    assert not Room(tmp_path, 1).is_short()
    Incidents.of(tmp_path).open(full_disk_key(), "the disk is full")
    assert not Room(tmp_path, 1).is_short()
    assert incidents(tmp_path)[0].closed


def test_a_bucket_and_a_lake_that_is_not_there_yet_have_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    assert not Room(folder_at("s3a://bucket/lake"), MORE_THAN_ANY_DISK).is_short()
    assert not Room(tmp_path / "lake", MORE_THAN_ANY_DISK).is_short()
    assert not (tmp_path / "lake").exists()


@needs_a_small_disk
def test_without_a_free_byte_the_incident_is_opened_and_drivers_can_beat_and_end(tmp_path: Path) -> None:
    with small_disk(tmp_path / "lake", 4) as lake:
        room, control = Room(lake, 500_000), Control.of(lake, "rolling_sum")
        assert not room.is_short()
        number = control.reserve(Owner.this_process())
        beat = Beat(time=time.time(), owner=Owner.this_process(), phase=Phase.RUNNING)
        ballast = fill(lake)
        with pytest.raises(OSError, match="No space left"):
            control.beat(number, beat)
        assert room.is_short()
        control.beat(number, beat)
        assert control.end(number, Receipt(time=time.time(), clean=True, cause="the end"))
        (opened,) = incidents(lake)
        assert "of 4 MB left" in opened.text
        ballast.unlink()
        assert not room.is_short()
        assert incidents(lake)[0].closed


@needs_a_small_disk
def test_what_could_not_be_told_is_told_with_the_next_look(tmp_path: Path) -> None:
    """The disk was never checked while it had room, so there is no spare for this moment."""
    with small_disk(tmp_path / "lake", 4) as lake:
        room, ballast = Room(lake, 500_000), fill(lake)
        assert room.is_short()
        assert incidents(lake) == []
        os.truncate(ballast, ballast.stat().st_size - 100_000)
        assert room.is_short()
        assert not incidents(lake)[0].closed


def note(batch: int) -> Note:
    ranges = {"numbers": Ranges(topic_id="t", offsets={0: (batch, batch + 1)})}
    return Note(job="rolling_sum", write_id="w", batch=batch, epoch=1, cluster_id="c", topics=ranges)


@needs_a_small_disk
def test_a_commit_counts_though_there_is_no_room_for_the_checkpoint_after_it(tmp_path: Path) -> None:
    with small_disk(tmp_path / "lake", 4) as lake:
        writer = TableWriter.open(lake / "live", SCHEMA, "slice", epoch=1)
        for batch in range(writer.version, 51):
            stage = writer.new_stage()
            write(pa.table({"value": [batch]}), stage / "slice=a" / "f.parquet")
            staged = Manifest.of(stage, 1)
            # One page is left: it takes the entry of the log, and no more.
            ballast = fill(lake)
            os.truncate(ballast, ballast.stat().st_size - 4096)
            writer.commit(staged, note(batch))
            ballast.unlink()
            writer.discard_stages()
        assert writer.version == 51
        assert not list(entry_of(lake / "live", 0).parent.glob("*.checkpoint.parquet"))
        assert TableWriter.open(lake / "live", SCHEMA, "slice", epoch=2).has("w", 50)
