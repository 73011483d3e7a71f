"""`events/<source>` as recompute reads it: the records after the offsets that were counted."""

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from jobs.finality.recompute import read_events
from jobs.lake import stream_tables as tables
from jobs.lake.delta.manifest import Manifest
from jobs.lake.events import Landed
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.stream_tables import Note, Ranges, TableWriter
from jobs.pipelines import PIPELINES
from jobs.pipelines.slices import slice_at
from jobs.refusal import Refusal
from jobs.settings import Settings
from tests.query.test_query import EVENTS

PIPELINE = PIPELINES["rolling_sum"]
NUMBERS = PIPELINE.source
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
AFTER_MS = round(NOON.timestamp() * 1000) + 1
NOON_SLICE = slice_at(PIPELINE, AFTER_MS)


def event(partition: int, offset: int) -> dict[str, Any]:
    happened = {"event_time": NOON, "arrival_time": NOON, "hour": "2026-01-31T12"}
    return {
        **happened,
        "topic": "numbers",
        "partition": partition,
        "offset": offset,
        "key": "k",
        "id": 1,
        "value": Decimal(1),
    }


def land(lake: Path, *files: list[dict[str, Any]], batch: int = 0) -> Landed:
    """Land one micro-batch; Spark writes a file for each partition."""
    writer = TableWriter.open(lake / NUMBERS.events_table, EVENTS, "hour", epoch=1)
    stage, schema = writer.new_stage(), EVENTS.remove(EVENTS.get_field_index("hour"))
    for number, rows in enumerate(files):
        file = stage / f"hour={rows[0]['hour']}" / f"{number}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows, schema), file)
    ranges = {row["partition"]: (0, row["offset"] + 1) for rows in files for row in rows}
    topics = {"numbers": Ranges(topic_id="t1", offsets=ranges)}
    writer.commit(
        Manifest.of(stage), Note(job="ingest", write_id="w", batch=batch, epoch=1, cluster_id="c", topics=topics)
    )
    landed = Landed.at(lake, NUMBERS)
    assert landed is not None
    return landed


def test_an_older_version_says_what_was_landed_then(tmp_path: Path) -> None:
    """With the newest version's offsets, final rows would claim records that landed after their own."""
    for batch, offset in enumerate((4, 9)):
        land(tmp_path, [event(0, offset)], batch=batch)
    then, now = (Landed.at(tmp_path, NUMBERS, version) for version in (1, 2))
    assert then is not None
    assert now is not None
    assert (then.ends("numbers", "t1"), now.ends("numbers", "t1")) == ({0: 5}, {0: 10})


def merged_away(lake: Path, monkeypatch: pytest.MonkeyPatch) -> TableWriter:
    """Version 1 has two files that a merge has replaced."""
    monkeypatch.setattr(tables, "_kept", lambda: {"delta.deletedFileRetentionDuration": "interval 0 seconds"})
    land(lake, [event(0, 4)], [event(1, 4)])
    writer = TableWriter.open(lake / NUMBERS.events_table, EVENTS, "hour", epoch=1)
    assert writer.note
    writer.merge_small_files(writer.note.to_json())
    return writer


NO_SPARK: Any = None


@pytest.mark.parametrize("log_is_gone", [False, True])
def test_a_run_whose_version_of_the_events_is_gone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_is_gone: bool
) -> None:
    """For example, the run was planned a day ago, and an operator clears its recompute."""
    writer = merged_away(tmp_path, monkeypatch)
    if log_is_gone:
        DeltaTable(writer.path).create_checkpoint()
        for version in (0, 1):
            (tmp_path / NUMBERS.events_table / "_delta_log" / f"{version:020}.json").unlink()
    else:
        writer.delete_what_no_reader_needs()
    with pytest.raises(Refusal, match=r"version 1 of events/numbers, on which the run was planned, is gone: .* plan"):
        read_events(NO_SPARK, PipelineLake(tmp_path, PIPELINE), 1, [NOON_SLICE])


def test_events_that_are_not_there_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="events/numbers is gone: restore it"):
        read_events(NO_SPARK, PipelineLake(tmp_path, PIPELINE), 1, [NOON_SLICE])


def test_a_version_is_whole_until_its_files_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = merged_away(tmp_path, monkeypatch)
    landed = Landed.at(tmp_path, NUMBERS, 1)
    assert landed is not None
    files = landed.files([(0, AFTER_MS)])
    assert (len(files), landed.deleted(files)) == (2, [])
    writer.delete_what_no_reader_needs()
    assert sorted(landed.deleted(files)) == sorted(files)


def settings_of(lake: Path) -> Settings:
    return replace(Settings.from_env({}), lake_root=lake)


def behind(landed: Landed, ends: dict[int, int]) -> list[tuple[int, int]]:
    rows = landed.since(ends, 0, AFTER_MS).to_pylist()
    return sorted((row["partition"], row["offset"]) for row in rows)


def test_files_before_all_offsets_are_not_read(tmp_path: Path) -> None:
    landed = land(tmp_path, [event(0, 50_000)], [event(1, 200)])
    assert behind(landed, {0: 50_000, 1: 201}) == [(0, 50_000)]
    assert len(landed._holding_offsets_from(201)) == 1


def test_a_partition_that_is_new_begins_at_its_first_offset(tmp_path: Path) -> None:
    """Its file has only offsets that the other partitions passed long ago."""
    landed = land(tmp_path, [event(0, 50_001)], [event(3, 0), event(3, 200)])
    assert behind(landed, {0: 50_000}) == [(0, 50_001), (3, 0), (3, 200)]
    assert behind(landed, {0: 50_002}) == [(3, 0), (3, 200)]
