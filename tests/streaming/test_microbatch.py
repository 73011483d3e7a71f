"""A micro-batch whose driver is overtaken at the worst moment: it commits, sends and merges nothing more."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from jobs.broker.kafka import TopicState
from jobs.control.checkpoint import Checkpoint
from jobs.control.epochs import Owner, Receipt
from jobs.control.folder import Control
from jobs.control.incident import full_disk_key
from jobs.control.incidents import Incidents
from jobs.control.lease import Lease, LeaseLostError
from jobs.control.room import Room
from jobs.failpoints import FailPoint
from jobs.lake import stream_tables as tables
from jobs.lake.delta.reading import rows_by_partition
from jobs.lake.stream_tables import TableWriter, last_note
from jobs.streaming import microbatch
from jobs.streaming.microbatch import Batch, ClosedError, MicroBatches
from jobs.streaming.start import Start
from tests.control import test_checkpoint
from tests.processes import wait_until

SCHEMA = pa.schema([("number", pa.int64()), ("slice", pa.string())])
NO_FRAME: Any = None
NO_CLIENT: Any = None
TOPIC = TopicState(cluster_id="c1", topic_id="t1", partitions=0, earliest={}, latest={})

checkpoint_path = test_checkpoint.path


@dataclass(kw_only=True)
class Watched(MicroBatches):
    """Micro-batches without Kafka: where they would ask for the topic, the test runs an action instead."""

    while_kafka_answers: Callable[[], None]

    def _check_topic(self) -> None:
        self.while_kafka_answers()


class Scene:
    """One micro-batch of two files that are merged at once, and a successor that takes over at a given moment."""

    def __init__(self, lake_root: Path, checkpoint: Path) -> None:
        self.control = Control.of(lake_root, "rolling_sum")
        self.lease = Lease.acquire(self.control, {})
        self.table = TableWriter.open(lake_root / "table", SCHEMA, "slice", epoch=1)
        self.checkpoint = Checkpoint(checkpoint)
        self.overtaken_at = ""
        self.sent: list[int] = []

    def run(self, room: Room | None = None) -> None:
        self.batches(room)(NO_FRAME, 2)

    def batches(self, room: Room | None) -> MicroBatches:
        return Watched(
            job="rolling_sum",
            topic="numbers",
            lease=self.lease,
            checkpoint=self.checkpoint,
            table=self.table,
            client=NO_CLIENT,
            start=Start(topic=TOPIC, noted_ends={}),
            stage=self._stage,
            announce=self._announce,
            while_kafka_answers=lambda: self.reach("topic"),
            room=room,
        )

    def reach(self, moment: str, _batch: int = 0) -> None:
        if moment == self.overtaken_at:
            self.control.end(self.lease.epoch, Receipt(time=time.time(), clean=False, cause="it slept"))
            self.control.reserve(Owner.this_process())

    def _stage(self, _frame: Any, folder: Path, _batch: Batch) -> int:
        for number in range(2):
            file = folder / "slice=a" / f"{number}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table({"number": [number]}), file)
        return 2

    def _announce(self, files: list[Path], batch: Batch) -> None:
        assert len(files) == 2
        self.sent.append(batch.number)
        self.reach("sent")

    def seen(self) -> tuple[int, int, list[int]]:
        """Rows and files of the table, and the batches that were sent."""
        table = DeltaTable(self.table.path)
        return rows_by_partition(table).total(), len(table.file_uris()), self.sent


@pytest.fixture
def scene(tmp_path: Path, checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", 1)
    scene = Scene(tmp_path / "lake", checkpoint_path)
    for module in (microbatch, tables):
        monkeypatch.setattr(module, "may_fail_at", scene.reach)
    yield scene
    scene.lease.release(Receipt(time=time.time(), clean=True, cause="end of the test"))


def test_undisturbed_it_is_committed_sent_and_merged(scene: Scene) -> None:
    scene.run()
    assert scene.seen() == (2, 1, [2])
    note = last_note(scene.table.path)
    assert note is not None
    assert note.batch == 2


@pytest.mark.parametrize(
    ("moment", "seen"),
    [
        (FailPoint.PLANNED, (0, 0, [])),
        (FailPoint.STAGED, (0, 0, [])),
        ("topic", (0, 0, [])),
        (FailPoint.TABLE_COMMITTED, (2, 2, [])),
        ("sent", (2, 2, [2])),
        (FailPoint.MERGED, (2, 2, [2])),
    ],
)
def test_overtaken_it_does_nothing_more(scene: Scene, moment: str, seen: tuple[int, int, list[int]]) -> None:
    scene.overtaken_at = moment
    with pytest.raises(LeaseLostError, match="epoch 1 of 'rolling_sum' has lost its lease"):
        scene.run()
    assert scene.seen() == seen


def test_overtaken_before_it_begins_it_stages_nothing(scene: Scene) -> None:
    scene.overtaken_at = FailPoint.PLANNED
    with pytest.raises(LeaseLostError):
        scene.run()
    assert list(scene.table.staging.rglob("*.parquet")) == []


# -- The disk is full --

MORE_THAN_ANY_DISK = 10**18


@contextmanager
def waiting(scene: Scene, room: Room) -> Iterator[tuple[MicroBatches, "Future[None]"]]:
    """A micro-batch that has begun to wait for room, and its future."""
    batches = scene.batches(room)
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(batches, NO_FRAME, 2)
        try:
            wait_until(lambda: batches.waits_for_room, "it waits", 10)
            yield batches, under_way
        finally:
            room._reserve = 1


def test_it_waits_for_room_and_is_then_written(scene: Scene, tmp_path: Path) -> None:
    room = Room(tmp_path / "lake", MORE_THAN_ANY_DISK)
    with waiting(scene, room) as (batches, under_way):
        (incident,) = Incidents.of(tmp_path / "lake").still_open("disk.")
        assert incident.key == full_disk_key()
        assert scene.seen() == (0, 0, [])
        assert not under_way.done()
        room._reserve = 1
        under_way.result(20)
    assert scene.seen() == (2, 1, [2])
    assert not batches.waits_for_room
    assert Incidents.of(tmp_path / "lake").still_open("disk.") == []


def test_while_it_waits_it_deletes_what_no_reader_needs(scene: Scene, tmp_path: Path) -> None:
    """So a disk gets room again if the table's own files have filled it."""
    orphan = scene.table.path / "slice=a" / "orphan.parquet"
    orphan.parent.mkdir()
    orphan.write_bytes(b"of a writer that died")
    os.utime(orphan, (0, 0))
    room = Room(tmp_path / "lake", MORE_THAN_ANY_DISK)
    with waiting(scene, room) as (_, under_way):
        wait_until(lambda: not orphan.exists(), "the orphan is gone", 10)
        assert not under_way.done()
        room._reserve = 1
    assert scene.seen() == (2, 1, [2])


def test_while_it_waits_its_driver_can_be_stopped(scene: Scene, tmp_path: Path) -> None:
    with waiting(scene, Room(tmp_path / "lake", MORE_THAN_ANY_DISK)) as (batches, under_way):
        batches.close()
        with pytest.raises(ClosedError, match="batch 2 is left to the next start"):
            under_way.result(20)
    assert (batches.turned_away, batches.failure) == (True, None)
    assert scene.seen() == (0, 0, [])


def test_while_it_waits_it_can_be_overtaken(scene: Scene, tmp_path: Path) -> None:
    with waiting(scene, Room(tmp_path / "lake", MORE_THAN_ANY_DISK)) as (batches, under_way):
        scene.control.end(scene.lease.epoch, Receipt(time=time.time(), clean=False, cause="it slept"))
        with pytest.raises(LeaseLostError):
            under_way.result(20)
    assert isinstance(batches.failure, LeaseLostError)
    assert scene.seen() == (0, 0, [])
