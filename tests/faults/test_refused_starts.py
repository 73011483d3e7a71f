"""Starts that must be refused, with the reason: the checkpoint, the table and the topic do not agree.

Every start here is real, and must end before Spark begins its work.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from kafka import TopicPartition
from pyspark.sql import SparkSession

from jobs.broker import kafka
from jobs.pipelines import PIPELINES
from jobs.refusal import Refusal
from jobs.settings import Settings
from jobs.streaming import ingest, live
from tests.conftest import Produce, renew_topics
from tests.integration.test_reset_broker import everything, numbers
from tests.judges import checker, oracle

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

SUM = PIPELINES["rolling_sum"]


@pytest.fixture
def drained(spark: SparkSession, settings: Settings, produce: Produce) -> Settings:
    """`ingest` and `rolling_sum` have read 1,200 records in two batches and stopped."""
    for _ in range(2):
        produce("numbers", numbers(600))
        ingest.run(settings, until_caught_up=True)
        live.run(settings, SUM, until_caught_up=True)
    return settings


def refusal(run: Callable[[], None]) -> str:
    with pytest.raises(Refusal) as raised:
        run()
    return str(raised.value)


def test_refused_with_the_reason_and_nothing_touched(
    spark: SparkSession, drained: Settings, produce: Produce, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    shutil.copytree(drained.lake_root, kept)

    def again(damage: Callable[[Path], object], *wanted: str) -> None:
        """Damage the lake, start both jobs, see both refused, and restore the lake."""
        damage(drained.lake_root)
        before = [everything(drained.lake_root / name) for name in ("events", "live", "checkpoints")]
        said = [
            refusal(lambda: ingest.run(drained, until_caught_up=True)),
            refusal(lambda: live.run(drained, SUM, until_caught_up=True)),
        ]
        for reason in said:
            assert any(text in reason for text in wanted), reason
            assert re.search("`tideline reset (ingest --source numbers|rolling_sum) --to earliest`", reason), reason
        assert before == [everything(drained.lake_root / name) for name in ("events", "live", "checkpoints")]
        shutil.rmtree(drained.lake_root)
        shutil.copytree(kept, drained.lake_root)

    def both(change: Callable[[Path], object]) -> Callable[[Path], None]:
        return lambda lake: [change(lake / "checkpoints" / name) for name in ("ingest/numbers", "rolling_sum")] and None

    again(both(shutil.rmtree), "the checkpoint is gone")
    again(both(lambda path: (path / "metadata").unlink()), "damaged")
    again(both(lambda path: (path / "metadata").write_text("{")), "damaged")
    again(both(lambda path: (path / "offsets" / "1").write_text("v1\n")), "damaged")
    again(both(lambda path: truncate(path / "offsets" / "1")), "damaged")
    again(both(lambda path: flip(path / "offsets" / "1")), "damaged", "do not belong together")
    again(both(lambda path: (path / "offsets" / "1").unlink()), "damaged")
    again(both(lambda path: truncate(path / "commits" / "0")), "damaged")
    again(both(roll_back), "do not belong together")
    again(delete_tables, "the table was deleted")
    again(lambda lake: roll_back_tables(lake), "do not belong together")
    goes_on_without_the_last_commit(drained)
    check_topics_that_changed(drained, kept, produce)
    ends_well(drained, produce)


def goes_on_without_the_last_commit(settings: Settings) -> None:
    """A power cut tears the last commit file: Spark runs the batch again, and finds that the table has it."""
    records = oracle.read_topic(settings.kafka.bootstrap, "numbers")
    for name in ("ingest/numbers", "rolling_sum"):
        truncate(settings.lake_root / "checkpoints" / name / "commits" / "1")
    ingest.run(settings, until_caught_up=True)
    live.run(settings, SUM, until_caught_up=True)
    assert checker.landed_defects(settings.lake_root, "numbers", records) == []
    assert checker.live_defects(settings.lake_root, SUM.name, records) == []


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])
    crc(file)


def flip(file: Path) -> None:
    """Change one digit of an offset and remove the checksum, so that only the table shows the error."""
    text = file.read_text()
    head, _, offsets = text.rstrip().rpartition("\n")
    digit = max(index for index, char in enumerate(offsets) if char.isdigit())
    file.write_text(f"{head}\n{offsets[:digit]}{(int(offsets[digit]) + 1) % 10}{offsets[digit + 1 :]}")
    crc(file)


def crc(file: Path) -> None:
    (file.parent / f".{file.name}.crc").unlink(missing_ok=True)


def roll_back(checkpoint: Path) -> None:
    """Remove the last batch from the checkpoint, as if it were restored from a backup."""
    for folder in ("offsets", "commits"):
        (checkpoint / folder / "1").unlink()


def delete_tables(lake: Path) -> None:
    for name in ("events/numbers", "live/rolling_sum"):
        shutil.rmtree(lake / name)


def roll_back_tables(lake: Path) -> None:
    for name in ("events/numbers", "live/rolling_sum"):
        newest = max((lake / name / "_delta_log").glob("*.json"))
        newest.unlink()


def check_topics_that_changed(settings: Settings, kept: Path, produce: Produce) -> None:
    """Records are deleted before they are read; the topic is re-created, shorter and then longer than our offsets."""
    produce("numbers", numbers(300))
    with kafka.admin(settings.kafka) as client:
        ends = kafka.states(client, ["numbers"])["numbers"].latest
        client.delete_records({TopicPartition("numbers", number): end for number, end in ends.items()})
    for run in (lambda: ingest.run(settings), lambda: live.run(settings, SUM)):
        assert "were deleted before they were read" in refusal(run)
    renew_topics(settings.kafka)
    for count in (10, 5000):
        produce("numbers", numbers(count))
        for run in (lambda: ingest.run(settings), lambda: live.run(settings, SUM)):
            assert "was re-created" in refusal(run)
    assert everything(kept / "events") == everything(settings.lake_root / "events")


def ends_well(settings: Settings, produce: Produce) -> None:
    """A new lake reads the new topic: only the old lake is refused."""
    shutil.rmtree(settings.lake_root)
    ingest.run(settings, until_caught_up=True)
    records = oracle.read_topic(settings.kafka.bootstrap, "numbers")
    assert len(records) == 5010
    assert checker.landed_defects(settings.lake_root, "numbers", records) == []
