"""No stream changes the rows of a final slice for readers, even if it becomes final during a read."""

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from jobs.lake.columns import live_schema
from jobs.pipelines.slices import Slice
from jobs.query.lake import Lake
from tests.lake.test_final import FIRST, SECOND, SUM, publish
from tests.query.test_query import Table

QUESTION = "SELECT strftime(window_start, '%H:%M:%S') AS second, finality, total FROM rolling_sum"
FINAL = [("23:59:00", "final", 1), ("00:00:00", "final", 1)]


def live_row(slice_: Slice, batch: int) -> dict[str, Any]:
    start = datetime.fromtimestamp(slice_.start_ms / 1000, UTC)
    return {
        "window_start": start,
        "window_end": datetime.fromtimestamp(slice_.start_ms / 1000 + 1, UTC),
        "key": "k",
        "total": Decimal(77),
        "mean": Decimal(77),
        "events": 1,
        "slice": slice_.name,
        "epoch": 1,
        "batch": batch,
        "as_of": start,
        "fingerprint": SUM.fingerprint,
    }


@pytest.fixture
def live(tmp_path: Path) -> Table:
    table = Table(tmp_path / SUM.live_table, live_schema(SUM), "slice")
    table.append(live_row(FIRST, 0), live_row(SECOND, 0))
    return table


def served(lake: Lake) -> list[tuple[str, str, int]]:
    return sorted((row["second"], row["finality"], int(row["total"])) for row in lake.query(QUESTION).to_pylist())


def test_live_rows_of_a_final_slice_are_not_served(live: Table, tmp_path: Path) -> None:
    publish(tmp_path, 1)
    assert served(Lake(tmp_path)) == sorted(FINAL)
    live.append(live_row(FIRST, 1))
    assert served(Lake(tmp_path)) == sorted(FINAL)


def test_a_slice_is_served_that_turns_final_and_loses_its_live_rows_between_two_reads(
    live: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, seen = Lake._rows, list[str]()

    def read_and_publish(self: Lake, name: str) -> Any:
        found = read(self, name)
        if not seen:
            publish(tmp_path, 1)
            live.writer.prune([FIRST.name, SECOND.name])
        seen.append(name)
        return found

    monkeypatch.setattr(Lake, "_rows", read_and_publish)
    assert served(Lake(tmp_path)) == sorted(FINAL)
    assert len(seen) == 2
