"""`events/<source>` as recompute reads it: what came behind the offsets that were counted."""

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.connectors.events import Landed
from jobs.connectors.tables import Manifest, Note, Ranges, TableWriter
from jobs.pipelines import PIPELINES
from tests.test_query import EVENTS

NUMBERS = PIPELINES["rolling_sum"].source
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
AFTER_MS = round(NOON.timestamp() * 1000) + 1


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
    """One micro-batch; Spark writes a file for each partition."""
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
    """Not what the newest says: final rows would claim offsets that were landed after the rows they are made of."""
    for batch, offset in enumerate((4, 9)):
        land(tmp_path, [event(0, offset)], batch=batch)
    then, now = (Landed.at(tmp_path, NUMBERS, version) for version in (1, 2))
    assert then is not None
    assert now is not None
    assert (then.ends("numbers", "t1"), now.ends("numbers", "t1")) == ({0: 5}, {0: 10})


def behind(landed: Landed, ends: dict[int, int]) -> list[tuple[int, int]]:
    rows = landed.since(ends, 0, AFTER_MS).to_pylist()
    return sorted((row["partition"], row["offset"]) for row in rows)


def test_files_before_all_offsets_are_not_read(tmp_path: Path) -> None:
    landed = land(tmp_path, [event(0, 50_000)], [event(1, 200)])
    assert behind(landed, {0: 50_000, 1: 201}) == [(0, 50_000)]
    assert len(landed._holding_offsets_from(201)) == 1


def test_a_partition_that_is_new_begins_at_its_first_offset(tmp_path: Path) -> None:
    """Its file has only offsets that the others passed long ago."""
    landed = land(tmp_path, [event(0, 50_001)], [event(3, 0), event(3, 200)])
    assert behind(landed, {0: 50_000}) == [(0, 50_001), (3, 0), (3, 200)]
    assert behind(landed, {0: 50_002}) == [(3, 0), (3, 200)]
