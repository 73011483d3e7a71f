"""A driver that loses its lease while it starts, for example while Spark starts, writes nothing into its table."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from jobs.broker.kafka import TopicState
from jobs.control.epochs import Receipt
from jobs.control.folder import Control
from jobs.control.lease import Lease, LeaseLostError
from jobs.lake.delta.log import entry_of
from jobs.lake.stream_tables import TableWriter
from jobs.pipelines import INGEST, PIPELINES, SOURCES
from jobs.settings import Settings
from jobs.streaming import ingest, live
from jobs.streaming.start import Start
from tests.lake.test_stream_tables import commit, opened

SUM = PIPELINES["rolling_sum"]
NO_CLIENT: Any = None
# The frames of Spark are not reached: the lease is looked at before them.
NO_SPARK: Any = SimpleNamespace(conf=SimpleNamespace(set=lambda *_: None))
TOPIC = TopicState(cluster_id="c1", topic_id="t1", partitions=1, earliest={0: 0}, latest={0: 0})


def overtaken(lake: Path, job: str) -> Lease:
    lease = Lease.acquire(Control.of(lake, job), {})
    lease.release(Receipt(time=time.time(), clean=False, cause="it slept"))
    return lease


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.from_env({"LAKE_ROOT": str(tmp_path / "lake")})


@pytest.fixture(autouse=True)
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.streams, "read", lambda *_, **__: None)
    monkeypatch.setattr(live.streams, "arrow_schema", lambda _: pa.schema([("hour", pa.string())]))
    monkeypatch.setattr(ingest, "landed", lambda *_: None)
    for name in ("events_that_count", "aggregate", "check_clock"):
        monkeypatch.setattr(live, name, lambda *_: None)


def test_a_live_job_does_not_open_its_table(settings: Settings) -> None:
    lease, start = overtaken(settings.lake_root, SUM.name), Start(topic=TOPIC, noted_ends={})
    with pytest.raises(LeaseLostError):
        live._run_query(NO_SPARK, settings, SUM, lease, NO_CLIENT, start, threading.Event(), True)
    assert not (settings.lake_root / SUM.live_table).exists()


def test_ingest_does_not_open_its_tables(settings: Settings) -> None:
    lease, starts = overtaken(settings.lake_root, INGEST), dict.fromkeys(SOURCES, Start(topic=TOPIC, noted_ends={}))
    with pytest.raises(LeaseLostError):
        ingest._run_queries(NO_SPARK, settings, lease, NO_CLIENT, starts, threading.Event(), True)
    assert not any((settings.lake_root / source.events_table).exists() for source in SOURCES.values())


def test_a_live_job_does_not_repair_the_log_of_its_table(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    lease, path = overtaken(settings.lake_root, SUM.name), settings.lake_root / SUM.live_table
    writer: TableWriter = opened(path)
    commit(writer, 0)
    torn = entry_of(path, writer.version)
    torn.write_text(torn.read_text()[:100])
    monkeypatch.setattr(live, "require", lambda _, names: dict.fromkeys(names, TOPIC))
    with pytest.raises(LeaseLostError):
        live._check(settings, SUM, NO_CLIENT, lease)
    assert torn.exists()
