"""Rows about micro-batches: old ones are removed; the others are complete and show where the stream began."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from jobs.finality import account
from jobs.lake import stream_tables as tables
from jobs.lake.delta.manifest import Manifest
from jobs.lake.delta.reading import files_with_sizes, rows_by_partition
from jobs.lake.live import Live
from jobs.lake.stream_tables import TableWriter, note_at
from jobs.pipelines import PIPELINES
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import slice_at
from jobs.streaming import live
from tests.lake.test_stream_tables import note

SCHEMA = pa.schema(
    [
        ("batch", pa.int64()),
        ("as_of", pa.timestamp("us", tz="UTC")),
        ("offsets", pa.string()),
        ("watermark", pa.timestamp("us", tz="UTC")),
        ("slice", pa.string()),
    ]
)
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
KEPT = timedelta(days=4)
STEP = timedelta(hours=2)
A_DAY = 12

Commit = Callable[..., Live]


@pytest.fixture
def commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commit:
    """Commit a batch at a moment and maintain the table; return the table as a reader then sees it."""
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", 5)
    path = tmp_path / "live" / "rolling_sum"
    writer = TableWriter.open(path, SCHEMA, "slice", epoch=1)

    def at(batch: int, now: datetime, *, ahead: timedelta = timedelta()) -> Live:
        monkeypatch.setattr(tables, "_now", lambda: now + ahead)
        file = writer.new_stage() / "slice=batches" / "batch.parquet"
        file.parent.mkdir(parents=True)
        offsets = json.dumps({0: (100 + batch, 101 + batch)})
        row = {"batch": batch, "as_of": now + ahead, "offsets": offsets, "watermark": now}
        pq.write_table(pa.Table.from_pylist([row], SCHEMA.remove(4)), file)
        writer.commit(Manifest.of(file.parent.parent), note(batch))
        writer.maintain(batches_kept=KEPT)
        table = DeltaTable(path)
        return Live(path=path, table=table, note=note_at(path, table.version()))

    return at


def taken(live: Live, since: datetime) -> list[int]:
    return sorted(taken.start - 100 for taken in live.batch_ranges(since))


def test_rows_about_batches_are_bounded_and_complete_for_as_long_as_they_are_needed(commit: Commit) -> None:
    for batch in range(20 * A_DAY):
        now = BEGAN + batch * STEP
        seen = commit(batch, now)
        assert seen.table is not None
        assert rows_by_partition(seen.table)["batches"] <= 7 * A_DAY
        assert len(files_with_sizes(seen.table)) <= 30
        assert seen.begins("numbers") == {0: 100}, "where the stream truly began"
        needed = max(0, batch - 4 * A_DAY)
        assert taken(seen, BEGAN + needed * STEP) == list(range(needed, batch + 1))
        since = seen.complete_since()
        assert since is None or since <= now - KEPT
        assert taken(seen, since or BEGAN) == list(range(round(((since or BEGAN) - BEGAN) / STEP), batch + 1))
    assert since is not None
    assert since > BEGAN + timedelta(days=13)


def test_after_a_long_outage_the_slices_of_that_time_are_still_complete(commit: Commit) -> None:
    for batch in range(3 * A_DAY):
        commit(batch, BEGAN + batch * STEP)
    stopped = BEGAN + timedelta(days=3)
    for batch in range(3 * A_DAY, 4 * A_DAY):
        seen = commit(batch, stopped + timedelta(days=30) + (batch - 3 * A_DAY) * STEP)
    since = seen.complete_since()
    assert since is not None
    assert since < stopped
    assert taken(seen, since)[-A_DAY - 1 :] == list(range(3 * A_DAY - 1, 4 * A_DAY))
    assert seen.begins("numbers") == {0: 100}


@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=PIPELINES)
def test_rows_are_kept_for_the_account_of_every_slice_that_an_event_can_reopen(pipeline: Pipeline) -> None:
    """The account of such a slice may be most of a day late."""
    now = round(BEGAN.timestamp() * 1000)
    oldest = slice_at(pipeline, now - pipeline.source.horizon_hours * 3_600_000)
    account_ms = now + 22 * 3_600_000
    needed = oldest.start_ms - pipeline.source.max_ahead_seconds * 1000 - account._CLOCKS / timedelta(milliseconds=1)
    assert account_ms - live._batches_kept(pipeline) / timedelta(milliseconds=1) <= needed


def test_a_clock_that_is_set_far_ahead_removes_no_young_rows(commit: Commit) -> None:
    for batch in range(2 * A_DAY):
        commit(batch, BEGAN + batch * STEP)
    for batch in range(2 * A_DAY, 3 * A_DAY):
        seen = commit(batch, BEGAN + batch * STEP, ahead=timedelta(days=500))
    assert seen.complete_since() is None
    assert taken(seen, BEGAN) == list(range(3 * A_DAY))


def test_young_rows_are_kept(commit: Commit) -> None:
    for batch in range(4 * A_DAY):
        seen = commit(batch, BEGAN + batch * STEP)
    assert seen.complete_since() is None
    assert taken(seen, BEGAN) == list(range(4 * A_DAY))
