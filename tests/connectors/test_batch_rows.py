"""Rows about micro-batches: old ones are removed; what is left is complete and says where the stream began."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from jobs.connectors import tables
from jobs.connectors.drift import Live
from jobs.connectors.fenced import files_with_sizes, rows_by_partition
from jobs.connectors.tables import TableWriter, note_at
from tests.connectors.test_tables import note

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

Commit = Callable[[int, datetime], Live]


@pytest.fixture
def commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commit:
    """Commit a batch at a moment and tend; what a reader then sees."""
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", 5)
    path = tmp_path / "live" / "rolling_sum"
    writer = TableWriter.open(path, SCHEMA, "slice")

    def at(batch: int, now: datetime) -> Live:
        monkeypatch.setattr(tables, "_now", lambda: now)
        file = writer.new_stage() / "slice=batches" / "batch.parquet"
        file.parent.mkdir(parents=True)
        offsets = json.dumps({0: (100 + batch, 101 + batch)})
        row = {"batch": batch, "as_of": now, "offsets": offsets, "watermark": now}
        pq.write_table(pa.Table.from_pylist([row], SCHEMA.remove(4)), file)
        writer.commit(file.parent.parent, note(batch))
        writer.tend(batches_kept=KEPT)
        table = DeltaTable(path)
        return Live(path=path, table=table, note=note_at(path, table.version()))

    return at


def taken(live: Live, since: datetime) -> list[int]:
    return sorted(taken.start - 100 for taken in live.taken(since))


def test_rows_about_batches_are_bounded_and_complete_for_as_long_as_they_are_needed(commit: Commit) -> None:
    for batch in range(20 * A_DAY):
        now = BEGAN + batch * STEP
        live = commit(batch, now)
        assert live.table is not None
        assert rows_by_partition(live.table)["batches"] <= 7 * A_DAY
        assert len(files_with_sizes(live.table)) <= 30
        assert live.begins("numbers") == {0: 100}, "where the stream truly began"
        needed = max(0, batch - 4 * A_DAY)
        assert taken(live, BEGAN + needed * STEP) == list(range(needed, batch + 1))
        since = live.complete_since()
        assert since is None or since <= now - KEPT
        assert taken(live, since or BEGAN) == list(range(round(((since or BEGAN) - BEGAN) / STEP), batch + 1))
    assert since is not None
    assert since > BEGAN + timedelta(days=13)


def test_after_a_long_outage_the_slices_of_that_time_are_still_complete(commit: Commit) -> None:
    for batch in range(3 * A_DAY):
        commit(batch, BEGAN + batch * STEP)
    stopped = BEGAN + timedelta(days=3)
    for batch in range(3 * A_DAY, 4 * A_DAY):
        live = commit(batch, stopped + timedelta(days=30) + (batch - 3 * A_DAY) * STEP)
    since = live.complete_since()
    assert since is not None
    assert since < stopped
    assert taken(live, since)[-A_DAY - 1 :] == list(range(3 * A_DAY - 1, 4 * A_DAY))
    assert live.begins("numbers") == {0: 100}


def test_young_rows_are_kept(commit: Commit) -> None:
    for batch in range(4 * A_DAY):
        live = commit(batch, BEGAN + batch * STEP)
    assert live.complete_since() is None
    assert taken(live, BEGAN) == list(range(4 * A_DAY))
