"""The live job reports that its table grows because no account lets it remove rows."""

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.control.folder import Control
from jobs.lake.live import PruneRequest
from jobs.lake.stream_tables import Manifest, TableWriter
from jobs.pipelines import PIPELINES
from jobs.pipelines.slices import slice_at
from jobs.settings import Settings
from jobs.streaming import live
from tests.lake.test_stream_tables import note

PIPELINE = PIPELINES["rolling_sum"]
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
SCHEMA = pa.schema([("key", pa.string()), ("slice", pa.string())])


class Stream:
    """A live table, and the function that the job calls when it maintains the table."""

    def __init__(self, lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.documents = Control.of(lake, PIPELINE.name).documents
        self.writer = TableWriter.open(lake / PIPELINE.live_table, SCHEMA, "slice", epoch=1)
        self.seconds = 0.0
        monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: self.seconds))
        settings = replace(Settings.from_env({}), lake_root=lake, live_kept_seconds=3600)
        self.superseded: Callable[[], Collection[str]] = live._superseded(settings, PIPELINE, self.documents)

    def counts(self, *ages: timedelta) -> None:
        """Write rows of the slices that begin so long after the first."""
        stage = self.writer.new_stage()
        for age in ages:
            file = stage / f"slice={name_at(age)}" / "rows.parquet"
            file.parent.mkdir(parents=True)
            pq.write_table(pa.table({"key": ["a"]}), file)
        self.writer.commit(Manifest.of(stage), note(round(ages[0] / HOUR)))

    def asks(self, before: timedelta, *ages: timedelta) -> None:
        PruneRequest(before=name_at(before), slices=tuple(map(name_at, ages))).write(self.documents)


def name_at(age: timedelta) -> str:
    return slice_at(PIPELINE, round((BEGAN + age).timestamp() * 1000)).name


@pytest.fixture
def stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stream:
    return Stream(tmp_path, monkeypatch)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings since the last call."""

    def taken() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        caplog.clear()
        return found

    return taken


def test_rows_that_no_account_releases_are_reported_once_a_day(
    stream: Stream, warnings: Callable[[], list[str]]
) -> None:
    stream.counts(0 * HOUR)
    stream.counts(25 * HOUR)
    assert stream.superseded() == ()
    assert warnings() == [], "they are not late yet"
    stream.counts(26 * HOUR)
    for hours in (12, 25, 30, 48, 50):
        stream.seconds = hours * 3600.0
        assert stream.superseded() == ()
        found = warnings()
        assert len(found) == (hours in (25, 50)), hours
        if found:
            assert found[0].startswith("live rows of rolling_sum from slice 20260101T000000Z on are not removed, so ")
            assert "unpause the DAGs recompute_rolling_sum and account_rolling_sum" in found[0]


def test_rows_that_wait_as_long_as_they_should_are_not_reported(
    stream: Stream, warnings: Callable[[], list[str]]
) -> None:
    """The first slice can never become final: its events were removed. The second is removed next."""
    for hours in (0, 100, 200):
        stream.counts(hours * HOUR)
    stream.asks(200 * HOUR, 100 * HOUR)
    assert stream.superseded() == (name_at(100 * HOUR),)
    assert warnings() == []
