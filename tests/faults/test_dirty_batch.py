"""Dirty batches with two hundred records of each kind: the stream goes on, and every record is accounted for."""

import time
from collections.abc import Callable

import pytest
from pyspark.sql import SparkSession

from jobs.pipelines import PIPELINES
from jobs.settings import Settings
from jobs.streaming import ingest, live
from tests import dirty
from tests.judges import checker, oracle
from tests.judges.oracle import Record

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


def test_two_hundred_of_each_kind(
    spark: SparkSession, settings: Settings, produce: Callable[[str, list[Record]], None]
) -> None:
    for seed in (1, 2):
        produce("numbers", dirty.records(int(time.time() * 1000), each=200, seed=seed))
        ingest.run(settings, until_caught_up=True)
        live.run(settings, PIPELINES["rolling_sum"], until_caught_up=True)
    records = oracle.read_topic(settings.kafka.bootstrap, "numbers")
    assert len(records) > 9000
    assert checker.landed_defects(settings.lake_root, "numbers", records) == []
    assert checker.live_defects(settings.lake_root, "rolling_sum", records) == []
