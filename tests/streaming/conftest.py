"""A control folder, a lease, and a query that always has more to do."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from jobs.control import lease as lease_module
from jobs.control.epochs import Receipt
from jobs.control.folder import Control
from jobs.control.lease import Lease
from jobs.streaming import driver
from tests.streaming.counting import JOB, Counting


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Control:
    """A control folder into which drivers look often."""
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(driver, "BEAT_SECONDS", 0.05)
    return Control.of(tmp_path, JOB)


@pytest.fixture
def lease(control: Control) -> Iterator[Lease]:
    lease = Lease.acquire(control, {})
    yield lease
    lease.release(Receipt(time=time.time(), clean=True, cause="end of the test"))


@pytest.fixture
def busy(spark: SparkSession, tmp_path: Path) -> Callable[..., tuple[StreamingQuery, Counting]]:
    """Start a query that always has more to do, with one record in each batch."""

    def start(stop: threading.Event, topic: str = "numbers", **options: Any) -> tuple[StreamingQuery, Counting]:
        batches = Counting.new(stop, tmp_path / topic, **options)
        records = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
        query = records.writeStream.foreachBatch(batches).option("checkpointLocation", str(tmp_path / topic)).start()
        return query, batches

    return start
