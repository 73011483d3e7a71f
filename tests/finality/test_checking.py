"""The check of served rows, on a lake that the product's own writers have made."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.control.incident import served_key
from jobs.control.incidents import Incidents
from jobs.finality import checking
from jobs.lake.columns import live_schema
from jobs.lake.final import FinalTable
from jobs.lake.pipeline_lake import PipelineLake
from jobs.pipelines import PIPELINES
from jobs.pipelines.slices import Slice, slice_at
from jobs.pipelines.window import Measure
from jobs.query.lake import Lake
from jobs.refusal import Refusal
from tests.lake import test_final as finals
from tests.query.test_query import EVENTS, Table

SUM = PIPELINES["rolling_sum"]
NOW = datetime.now(UTC).replace(microsecond=0)


def event(seconds_ago: float) -> dict[str, Any]:
    at = NOW - timedelta(seconds=seconds_ago)
    happened = {"event_time": at, "arrival_time": at, "hour": at.strftime("%Y-%m-%dT%H")}
    return {"topic": "numbers", "partition": 0, "offset": 0, "key": "k", "id": 1, "value": Decimal(1), **happened}


def live_row(seconds_ago: float, key: str = "k") -> dict[str, Any]:
    start = NOW - timedelta(seconds=seconds_ago)
    slice_ = slice_at(SUM, round(start.timestamp() * 1000)).name
    values = {"key": key, "total": Decimal(1), "mean": Decimal(1), "events": 1}
    window = {"window_start": start, "window_end": start + timedelta(seconds=1), "slice": slice_, "as_of": start}
    return {**window, **values, "epoch": 1, "batch": 1, "fingerprint": SUM.fingerprint}


def batch_row(seconds_ago: float) -> dict[str, Any]:
    as_of = NOW - timedelta(seconds=seconds_ago)
    return {"slice": "batches", "epoch": 1, "batch": 1, "as_of": as_of, "offsets": '{"0":[0,5]}', "watermark": as_of}


@pytest.fixture
def live(tmp_path: Path) -> Table:
    return Table(tmp_path / SUM.live_table, live_schema(SUM), "slice")


@pytest.fixture
def events(tmp_path: Path) -> Table:
    return Table(tmp_path / SUM.source.events_table, EVENTS, "hour")


def failures(lake: Path) -> list[str]:
    return [failure.sentence for failure in checking.check(PipelineLake(lake, SUM), "check").failures]


def test_a_stream_that_died_is_stale_although_none_of_its_windows_is_live_any_more(
    tmp_path: Path, live: Table, events: Table
) -> None:
    live.append(batch_row(900))
    events.append(event(1000))
    assert failures(tmp_path) == []
    events.append(event(10))
    (failure,) = failures(tmp_path)
    assert failure == "rule 'windows are at most 180 s old' failed: 890 s"
    (incident,) = Incidents.of(tmp_path).still_open(served_key(SUM.name))
    assert failure in incident.text
    live.append(batch_row(5))
    assert failures(tmp_path) == []
    assert Incidents.of(tmp_path).still_open(served_key(SUM.name)) == []


def test_a_pipeline_without_a_stream_is_not_stale(tmp_path: Path, events: Table) -> None:
    events.append(event(10))
    assert failures(tmp_path) == []


def test_bad_live_rows_are_named(tmp_path: Path, live: Table) -> None:
    live.append(live_row(30), {**live_row(30, key="other"), "events": 0}, batch_row(1))
    assert failures(tmp_path) == ["rule 'events is at least 1' failed: 1 of 2 values, from 0 to 0"]


def test_a_window_that_is_served_twice_is_counted(tmp_path: Path, live: Table) -> None:
    """The relation never returns a window twice. This test breaks the relation, so that the check finds one."""
    live.append(live_row(30), live_row(30, key="other"), batch_row(1))
    lake = Lake(tmp_path)
    assert checking.repeated_windows(lake, SUM) == 0
    twice = lake._relations[SUM.name]
    object.__setattr__(twice, "sql", twice.sql.replace("WHERE newest = 1", "") + f" UNION ALL {twice.sql}")
    assert checking.repeated_windows(lake, SUM) == 2


def test_final_slices_that_are_not_what_was_published_are_named(tmp_path: Path) -> None:
    final = finals.publish(tmp_path, 1)
    header = final.headers()[finals.FIRST.name]
    assert not checking.is_changed(final, SUM, header)
    overwrite(final, finals.FIRST, by=finals.SECOND)
    assert checking.is_changed(final, SUM, header)


def overwrite(final: FinalTable, slice_: Slice, by: Slice) -> None:
    for file in (final.path / f"slice={slice_.name}").glob("*.parquet"):
        if pq.read_metadata(file).num_rows:
            pq.write_table(finals.windows(by, 1), file)


def test_slices_of_an_older_definition_are_compared_too(tmp_path: Path) -> None:
    final, changed = finals.publish(tmp_path, 1), replace(SUM, watermark_delay_seconds=7)
    assert [checking.is_changed(final, changed, header) for header in final.headers().values()] == [False, False]
    overwrite(final, finals.FIRST, finals.SECOND)
    assert checking.is_changed(final, changed, final.headers()[finals.FIRST.name])


@pytest.mark.parametrize("measures", [SUM.measures[:-1], (*SUM.measures, replace(SUM.measures[0], name="more"))])
def test_rows_with_other_columns_than_now_are_only_counted(tmp_path: Path, measures: tuple[Measure, ...]) -> None:
    finals.publish(tmp_path, 1)
    final = FinalTable.open(tmp_path, replace(SUM, checks=(), counts=None, measures=measures))
    header = final.headers()[finals.FIRST.name]
    assert not checking.is_changed(final, final._pipeline, header)
    assert checking.is_changed(final, final._pipeline, replace(header, rows=7))


def test_old_slices_are_looked_at_in_turns(tmp_path: Path) -> None:
    final = finals.publish(tmp_path, 1)
    day_ms = 24 * 3600 * 1000
    names = {finals.FIRST.name, finals.SECOND.name}
    for after_ms in (0, 2 * day_ms):
        assert {header.slice for header in checking.sample(final, finals.SECOND.end_ms + after_ms)} == names


def test_what_cannot_be_read_is_not_called_right(tmp_path: Path, live: Table, events: Table) -> None:
    live.append(batch_row(900), {**live_row(30), "events": 0})
    events.append(event(10))
    assert failures(tmp_path)
    key = served_key(SUM.name)
    for file in (tmp_path / SUM.live_table).glob("slice=*/*.parquet"):
        file.write_bytes(b"PAR1 and no more")
    with pytest.raises(Refusal, match="the query cannot be answered"):
        checking.check(PipelineLake(tmp_path, SUM), "again")
    assert [incident.key for incident in Incidents.of(tmp_path).still_open(key)] == [key]
