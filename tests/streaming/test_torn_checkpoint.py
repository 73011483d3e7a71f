"""A file of a checkpoint that a power cut tears is repaired or refused, and no other file of it can be torn."""

from pathlib import Path

import pytest

from jobs.control.checkpoint import Checkpoint
from jobs.refusal import Refusal
from jobs.streaming.start import CheckpointProgress
from jobs.streaming.torn_checkpoint import CheckpointFiles, mend
from tests.control import test_checkpoint as checkpoints
from tests.judges.power_cut import watched
from tests.lake.test_stream_tables import note

path = checkpoints.path
TORN = {"empty": "", "half": "v1\n", "zeros": "\0" * 40}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def tear(file: Path, content: str) -> None:
    file.write_text(content)
    checkpoints.forget_checksum(file)


@pytest.mark.parametrize("content", TORN.values(), ids=TORN)
def test_a_torn_plan_is_made_anew_if_the_table_has_nothing_of_it(path: Path, content: str) -> None:
    tear(path / "offsets" / "2", content)
    mend(Checkpoint(path), note(1))
    progress = CheckpointProgress.read(Checkpoint(path))
    assert progress is not None
    assert (progress.planned, progress.committed) == (1, 1)
    (aside,) = (path / "_aside").iterdir()
    assert aside.read_text() == content


@pytest.mark.parametrize("content", TORN.values(), ids=TORN)
def test_a_torn_commit_lets_the_batch_be_run_again(path: Path, content: str) -> None:
    checkpoints.commit(path, 2)
    tear(path / "commits" / "2", content)
    mend(Checkpoint(path), note(2))
    progress = CheckpointProgress.read(Checkpoint(path))
    assert progress is not None
    assert (progress.planned, progress.committed) == (2, 1)


def test_a_plan_that_the_table_relies_on_is_refused(path: Path) -> None:
    tear(path / "offsets" / "2", "")
    mend(Checkpoint(path, "`tideline reset rolling_sum`"), note(2))
    with pytest.raises(Refusal, match=r"offsets/2 is damaged .*begin a new checkpoint with `tideline reset"):
        CheckpointProgress.read(Checkpoint(path, "`tideline reset rolling_sum`"))


@pytest.mark.parametrize("file", ["offsets/1", "commits/0", "metadata"])
def test_older_damage_is_refused(path: Path, file: str) -> None:
    tear(path / file, "")
    mend(Checkpoint(path), note(1))
    with pytest.raises(Refusal, match="is damaged"):
        CheckpointProgress.read(Checkpoint(path))


def test_what_is_whole_is_left_alone(path: Path) -> None:
    before = contents(path)
    mend(Checkpoint(path), note(1))
    assert contents(path) == before


def test_all_that_spark_has_written_is_durable_before_the_table_takes_a_batch(tmp_path: Path) -> None:
    with watched(tmp_path / "disk") as disk:
        checkpoint, files = tmp_path / "disk", CheckpointFiles(tmp_path / "disk")
        written = []
        for batch in range(3):
            checkpoints.plan(checkpoint, batch, {"0": batch})
            state = checkpoint / "state" / "0" / str(batch % 2) / f"{batch + 1}.changelog"
            state.parent.mkdir(parents=True, exist_ok=True)
            state.write_text("rows")
            if batch:
                checkpoints.commit(checkpoint, batch - 1)
            files.make_durable()
            disk.done(f"batch {batch}")
            written.append(contents(checkpoint))
    # The first state with each number of reported steps.
    kept = {len(cut.reported): cut for cut in reversed(disk.cuts) if cut.reported}
    assert len(kept) == 3
    for batch, cut in enumerate(kept[number] for number in sorted(kept)):
        left = tmp_path / f"left-{batch}"
        cut.leave_what_was_durable(left)
        assert contents(left) == written[batch]
