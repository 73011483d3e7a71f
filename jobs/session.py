"""The only place where a SparkSession is built."""

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from jobs.scratch import Scratch, take_scratch
from jobs.settings import DRIVER_OPTIONS, Settings, spark_conf

log = logging.getLogger(__name__)


@contextmanager
def opened(settings: Settings, name: str) -> Iterator[SparkSession]:
    """The session of this process. An existing session is used and left open; a new one is stopped at the end."""
    there = SparkSession.getActiveSession()
    spark = there or build(settings, name)
    try:
        yield spark
    finally:
        if there is None:
            spark.stop()


def build(settings: Settings, name: str) -> SparkSession:
    """A session for one job. Under `spark-submit` the JVM already runs, and its settings stay."""
    # Spark's Python workers otherwise take the first python3 on PATH, which may be another version.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if settings.spark_master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_HOSTNAME", "localhost")
    builder = SparkSession.builder.appName(f"tideline {name}")
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        builder = builder.master(settings.spark_master)
    for key, value in _conf(settings).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    log.info("Spark UI of %s: %s", name, ui_of(spark))
    return spark


def _conf(settings: Settings) -> dict[str, str]:
    """Spark's settings, and a temporary folder for the JVM if this process starts it."""
    conf = spark_conf(settings)
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return conf
    return conf | {DRIVER_OPTIONS: f"{conf[DRIVER_OPTIONS]} {_scratch_of_this_process(settings.scratch).java_option}"}


@cache
def _scratch_of_this_process(root: Path) -> Scratch:
    """One folder, since all sessions of a process use the same JVM."""
    return take_scratch(root)


def small_frame(spark: SparkSession, columns: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> DataFrame:
    """A frame of a few rows. It goes through Arrow: executors read a list with Python, which they may not have."""
    return spark.createDataFrame(pa.Table.from_pylist(list(rows), columns))


def ui_of(spark: SparkSession) -> str | None:
    """The address of the session's pages. If the cluster has a reverse proxy, the address is below the proxy's."""
    context = spark.sparkContext
    proxy = spark.conf.get("spark.ui.reverseProxyUrl", None)
    return f"{proxy}/proxy/{context.applicationId}/" if proxy else context.uiWebUrl
