"""The adviser on made-up events: it counts the events that a stream with that delay would count."""

import json
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.lake.delta.manifest import Manifest
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.stream_tables import Note, Ranges, TableWriter
from jobs.pipelines import PIPELINES
from jobs.refusal import Refusal
from jobs.settings import PROJECT
from jobs.streaming.advise import advise
from tests.query.test_query import EVENTS

T0 = 1_790_000_000_000
TRIGGER_MS = 500
TUMBLING, SLIDING = PIPELINES["rolling_sum"], PIPELINES["rolling_sum_sliding"]


def at(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def land(lake_root: Path, events: Iterable[tuple[int, int]]) -> None:
    """Land events, given as (arrival, event time), both in milliseconds after T0."""
    writer = TableWriter.open(lake_root / "events" / "numbers", EVENTS, "hour", epoch=1)
    rows = [
        {"topic": "numbers", "partition": 0, "offset": n, "arrival_time": at(T0 + arrival), "event_time": at(T0 + time)}
        | {"key": "a", "id": n, "value": Decimal(1)}
        for n, (arrival, time) in enumerate(events)
    ]
    file = writer.new_stage() / f"hour={at(T0):%Y-%m-%dT%H}" / "0.parquet"
    file.parent.mkdir(parents=True)
    schema = pa.schema([field for field in EVENTS if field.name in rows[0]])
    pq.write_table(pa.Table.from_pylist(rows, schema), file)
    topics = {"numbers": Ranges(topic_id="t", offsets={0: (0, len(rows))})}
    writer.commit(
        Manifest.of(file.parent.parent),
        Note(job="ingest", write_id="w", batch=0, epoch=1, cluster_id="c", topics=topics),
    )


def test_in_order_nothing_is_late_and_no_delay_is_needed(tmp_path: Path) -> None:
    land(tmp_path, [(n * 100, n * 100) for n in range(200)])
    advice = advise(PipelineLake(tmp_path, TUMBLING), TRIGGER_MS)
    assert advice.events == 200
    assert set(advice.lateness_ms.values()) == {0}
    assert (advice.counted_share, advice.proposed_seconds) == (1.0, 0)
    assert "5 s earlier" in advice.sentence
    assert advice.more_rows is None


def test_the_delay_counts_the_wanted_share_and_one_second_less_does_not(tmp_path: Path) -> None:
    steady = [(n * 100, n * 100) for n in range(400)]
    # Ten events come 12,300 ms or more behind the newest event seen: their window was over 11,400 ms or more before.
    late = [(30_000 + n, 17_000) for n in range(10)]
    land(tmp_path, steady + late)
    advice = advise(PipelineLake(tmp_path, TUMBLING), TRIGGER_MS, share=1)
    # Up to the batch before the last, the newest event seen was that of 29,400 ms; the window ended at 18,000.
    assert advice.lateness_ms["1.0"] == 29_400 - 17_000
    assert advice.counted_share == pytest.approx(400 / 410)
    assert advice.proposed_seconds == (29_400 - 18_000) // 1000 + 1
    assert advice.proposed_share == 1
    assert "a delay of 12 s is needed: windows would stop changing 7 s later" in advice.sentence
    assert advise(PipelineLake(tmp_path, TUMBLING), TRIGGER_MS, share=0.97).proposed_seconds == 0


def test_of_sliding_windows_the_first_that_ends_counts(tmp_path: Path) -> None:
    land(tmp_path, [(20_400, 20_400), (21_000, 20_400), (21_600, 15_100)])
    # Its tumbling window ends at 16,000, and the first of its sliding windows at 15,250.
    assert advise(PipelineLake(tmp_path, TUMBLING), TRIGGER_MS, share=1).proposed_seconds == 5
    assert advise(PipelineLake(tmp_path, SLIDING), TRIGGER_MS, share=1).proposed_seconds == 6


def test_an_event_ahead_needs_a_delay_too(tmp_path: Path) -> None:
    land(tmp_path, [(0, 0), (600, 7_600), (1200, 1200), (1800, 1800)])
    advice = advise(PipelineLake(tmp_path, TUMBLING), TRIGGER_MS, share=1)
    # It is 7,000 ms ahead. A delay of 5 s leaves it out, and it does not move the watermark. One of 7 s just counts it.
    assert (advice.counted_share, advice.proposed_seconds) == (0.75, 7)


def test_only_the_newest_hours_count(tmp_path: Path) -> None:
    land(tmp_path, [(0, 0), (7_200_000, 7_200_000)])
    assert advise(PipelineLake(tmp_path, TUMBLING), TRIGGER_MS, hours=1).events == 1
    assert advise(PipelineLake(tmp_path, TUMBLING), TRIGGER_MS, hours=3).events == 2


def test_more_than_the_allowed_lateness_is_said(tmp_path: Path) -> None:
    land(tmp_path, [(0, 0), (600, 600), (90_000, 90_000), (90_600, 90_600), (91_200, 91_200), (91_800, 10)])
    assert "Raise allowed_lateness_seconds=60" in advise(PipelineLake(tmp_path, TUMBLING), TRIGGER_MS, share=1).sentence


def test_without_events_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="does not exist yet"):
        advise(PipelineLake(tmp_path, TUMBLING), TRIGGER_MS)


@pytest.mark.parametrize("output", ["table", "json"])
def test_the_command(tmp_path: Path, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    land(tmp_path, [(n * 100, n * 100) for n in range(20)])
    monkeypatch.setenv("LAKE_ROOT", str(tmp_path))
    command = [sys.executable, "-m", "jobs", "advise", "rolling_sum", "--format", output]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120, check=True)
    if output == "json":
        assert json.loads(done.stdout)["proposed_seconds"] == 0
    else:
        assert "lateness of 20 events" in done.stdout
        assert "would have counted 100.0000% of the events" in done.stdout
