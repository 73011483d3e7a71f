"""Checkpoints as Spark 4.2 writes them, sound and damaged in every way."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.control.checkpoint import Checkpoint
from jobs.refusal import Refusal
from jobs.streaming.start import CheckpointProgress

QUERY_ID = "f0d56b73-584e-4a44-aec5-39765d39db41"
CONF = {
    "spark.sql.streaming.stateStore.rocksdb.formatVersion": "5",
    "spark.sql.streaming.multipleWatermarkPolicy": "min",
    "spark.sql.shuffle.partitions": "2",
}


def write(file: Path, content: str) -> None:
    """Write a file and its checksums, as Hadoop's local file system writes both."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    data = content.encode()
    sums = b"".join(zlib.crc32(data[at : at + 512]).to_bytes(4, "big") for at in range(0, len(data), 512))
    file.with_name(f".{file.name}.crc").write_bytes(b"crc\0\0\0\x02\0" + sums)


def plan(path: Path, batch: int, ends: dict[str, int]) -> None:
    head = {"batchWatermarkMs": batch * 1000, "batchTimestampMs": 1_795_003_524_439 + batch, "conf": CONF}
    offsets = json.dumps({"numbers": ends}, separators=(",", ":"))
    write(path / "offsets" / str(batch), f"v1\n{json.dumps(head, separators=(',', ':'))}\n{offsets}")


def commit(path: Path, batch: int) -> None:
    write(path / "commits" / str(batch), 'v1\n{"nextBatchWatermarkMs":1795003378534}')


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two batches are committed, a third one is planned; a partition was added before the second."""
    write(tmp_path / "metadata", f'{{"id":"{QUERY_ID}"}}')
    write(tmp_path / "sources" / "0" / "0", '\0v1\n{"numbers":{"0":10,"1":0}}')
    plan(tmp_path, 0, {"0": 5212, "1": 6529})
    plan(tmp_path, 1, {"0": 5300, "1": 6600, "2": 7})
    plan(tmp_path, 2, {"0": 5400, "1": 6700, "2": 9})
    commit(tmp_path, 0)
    commit(tmp_path, 1)
    return tmp_path


def forget_checksum(file: Path) -> None:
    file.with_name(f".{file.name}.crc").unlink()


def test_what_spark_wrote_is_read(path: Path) -> None:
    checkpoint = Checkpoint(path)
    checkpoint.check()
    assert checkpoint.exists()
    assert checkpoint.query_id() == QUERY_ID
    assert (checkpoint.last_planned(), checkpoint.last_committed()) == (2, 1)
    planned = checkpoint.planned(1)
    assert (planned.watermark_ms, planned.timestamp_ms) == (1000, 1_795_003_524_440)
    assert planned.ends == {"numbers": {0: 5300, 1: 6600, 2: 7}}
    assert planned.conf == CONF
    assert checkpoint.first() == {"numbers": {0: 10, 1: 0}}


def test_a_batch_starts_where_the_one_before_ended(path: Path) -> None:
    checkpoint = Checkpoint(path)
    assert checkpoint.starts(0) == {"numbers": {0: 10, 1: 0}}, "the first one where the query began"
    assert checkpoint.starts(1) == {"numbers": {0: 5212, 1: 6529}}, "a new partition has no start yet"
    assert checkpoint.starts(2) == checkpoint.planned(1).ends


def test_what_is_not_there_does_not_exist(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "never"):
        checkpoint = Checkpoint(folder)
        assert not checkpoint.exists()
        assert (checkpoint.last_planned(), checkpoint.last_committed(), checkpoint.first()) == (None, None, None)


@pytest.mark.parametrize("name", ["sources", "state"])
def test_what_is_left_of_one_is_damaged(tmp_path: Path, name: str) -> None:
    """A bucket's folder looks like this when a process was killed while it removed the folder."""
    (tmp_path / name / "0").mkdir(parents=True)
    assert Checkpoint(tmp_path).exists()
    with pytest.raises(Refusal, match="is damaged"):
        CheckpointProgress.read(Checkpoint(tmp_path))


def test_a_damaged_one_names_the_command_that_begins_anew(path: Path, tmp_path: Path) -> None:
    (path / "metadata").write_text("{")
    with pytest.raises(
        Refusal, match=r"metadata is damaged .* begin a new checkpoint with `tideline reset JOB --to ea"
    ):
        Checkpoint(path).check()
    checkpoint = Checkpoint.of(tmp_path, "ingest", "numbers")
    assert checkpoint.path == tmp_path / "checkpoints" / "ingest" / "numbers"
    assert checkpoint.way_out == "`tideline reset ingest --source numbers --to earliest`"
    assert Checkpoint.of(tmp_path, "word_count").way_out == "`tideline reset word_count --to earliest`"


def test_metadata_alone_is_a_checkpoint_that_planned_nothing(tmp_path: Path) -> None:
    write(tmp_path / "metadata", f'{{"id":"{QUERY_ID}"}}')
    checkpoint = Checkpoint(tmp_path)
    checkpoint.check()
    assert checkpoint.exists()
    assert checkpoint.last_planned() is None


def test_what_a_crash_leaves_beside_the_files_is_no_batch(path: Path) -> None:
    for name in (".3.0d1c.tmp", "..3.0d1c.tmp.crc", "3.tmp"):
        (path / "offsets" / name).write_text("")
    Checkpoint(path).check()
    assert Checkpoint(path).last_planned() == 2


FILES = ("metadata", "offsets/0", "offsets/2", "commits/1")


@pytest.mark.parametrize("checksum", ["with its checksum", "without"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_short_anywhere_is_refused(path: Path, name: str, checksum: str) -> None:
    file = path / name
    whole = file.read_bytes()
    if checksum == "without":
        forget_checksum(file)
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(Refusal, match=rf"checkpoint file .*{name} is damaged .*nothing was read or written"):
            Checkpoint(path).check()


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_refused_by_its_checksum(path: Path, name: str) -> None:
    file = path / name
    whole = file.read_bytes()
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        with pytest.raises(Refusal, match="is damaged"):
            Checkpoint(path).check()


@pytest.mark.parametrize("name", FILES)
def test_without_its_checksum_a_flipped_byte_is_refused_or_another_value(path: Path, name: str) -> None:
    """There is never a traceback. If a digit became another digit, only the table can show it (see test_start)."""
    file = path / name
    whole = file.read_bytes()
    forget_checksum(file)
    refused = 0
    for at in range(len(whole)):
        for bit in (0, 4, 7):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
            try:
                Checkpoint(path).check()
            except Refusal:
                refused += 1
    assert refused > len(whole) / 4, "the loop flips something"


def test_the_first_offsets_are_checked_as_long_as_they_count(tmp_path: Path) -> None:
    write(tmp_path / "metadata", f'{{"id":"{QUERY_ID}"}}')
    write(tmp_path / "sources" / "0" / "0", '\0v1\n{"numbers":{"0":10,"1":0}}')
    plan(tmp_path, 0, {"0": 12, "1": 1})
    checkpoint = Checkpoint(tmp_path)
    checkpoint.check()
    file = tmp_path / "sources" / "0" / "0"
    whole = file.read_bytes()
    for checksum in (True, False):
        for length in range(len(whole)):
            file.write_bytes(whole[:length])
            with pytest.raises(Refusal, match="is damaged"):
                checkpoint.check()
        if checksum:
            forget_checksum(file)
    file.unlink()
    with pytest.raises(Refusal, match="is damaged"):
        checkpoint.check()


OFFSETS = '{"batchWatermarkMs":0,"batchTimestampMs":1,"conf":{}}'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metadata", "[]"),
        ("metadata", "null"),
        ("metadata", '{"id":null}'),
        ("metadata", '{"id":""}'),
        ("metadata", '{"name":"x"}'),
        ("metadata", "\udcff"),
        ("offsets/2", f"v2\n{OFFSETS}\n" + '{"numbers":{"0":1}}'),
        ("offsets/2", f"v1\n{OFFSETS}"),
        ("offsets/2", f"v1\n{OFFSETS}\n-"),
        ("offsets/2", f"v1\n{OFFSETS}\n" + "{}"),
        ("offsets/2", f"v1\n{OFFSETS}\n" + '{"numbers":5}'),
        ("offsets/2", f"v1\n{OFFSETS}\n" + "[1]"),
        ("offsets/2", f"v1\n{OFFSETS}\n" + '{"numbers":{"0":-1}}'),
        ("offsets/2", f"v1\n{OFFSETS}\n" + '{"numbers":{"0":1.5}}'),
        ("offsets/2", f"v1\n{OFFSETS}\n" + '{"numbers":{"0":Infinity}}'),
        ("offsets/2", f"v1\n{OFFSETS}\n" + '{"numbers":{"0":true}}'),
        ("offsets/2", f"v1\n{OFFSETS}\n" + '{"numbers":{"zero":1}}'),
        ("offsets/2", "v1\n[]\n" + '{"numbers":{"0":1}}'),
        ("offsets/2", "v1\n{}\n" + '{"numbers":{"0":1}}'),
        ("offsets/2", 'v1\n{"batchWatermarkMs":"0","batchTimestampMs":1}\n' + '{"numbers":{"0":1}}'),
        ("commits/1", "v1\n[]"),
        ("commits/1", "v1\n{}"),
        ("commits/1", 'v3\n{"nextBatchWatermarkMs":0}'),
        ("commits/1", 'v1\n{"nextBatchWatermarkMs":0}\nmore'),
    ],
)
def test_a_file_that_says_something_else_is_refused(path: Path, name: str, content: str) -> None:
    forget_checksum(path / name)
    (path / name).write_text(content, errors="surrogateescape")
    with pytest.raises(Refusal, match=rf"{name} is damaged"):
        Checkpoint(path).check()


def delete(*names: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        for name in names:
            (path / name).unlink()

    return damage


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (delete("metadata"), "metadata is damaged"),
        (delete("offsets/2", "offsets/1"), "last planned batch is 0, its last committed batch 1"),
        (delete("offsets/0", "offsets/1", "offsets/2"), "last planned batch is None, its last committed batch 1"),
        (delete("commits/1"), "last planned batch is 2, its last committed batch 0"),
        (delete("commits/0", "commits/1"), "last planned batch is 2, its last committed batch None"),
        (delete("offsets/1"), "offsets/1 is damaged"),
        (
            lambda path: plan(path, 4, {"0": 9999, "1": 9999, "2": 9999}),
            "last planned batch is 4, its last committed batch 1",
        ),
    ],
)
def test_files_that_are_gone_are_missed(path: Path, damage: Callable[[Path], None], reason: str) -> None:
    damage(path)
    with pytest.raises(Refusal, match=reason):
        Checkpoint(path).check()


@pytest.mark.parametrize("name", ["metadata", "offsets/2", "commits/1"])
def test_what_the_disk_does_not_give_is_no_damage(path: Path, name: str) -> None:
    """The way out of damage would clear the rows that are served; here the operator must repair the disk instead."""
    (path / name).unlink()
    (path / name).mkdir()
    with pytest.raises(Refusal, match=rf"{name} cannot be read \(Is a directory\): repair the disk"):
        Checkpoint(path).check()


def test_what_spark_purged_is_not_missed(path: Path) -> None:
    """Spark keeps the newest hundred batches. Of two that remain, the older only says where the newer one begins."""
    delete("offsets/0", "commits/0")(path)
    Checkpoint(path).check()
    assert Checkpoint(path).starts(2) == {"numbers": {0: 5300, 1: 6600, 2: 7}}
