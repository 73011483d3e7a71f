"""The only place where a SparkSession is built."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from jobs.settings import Settings, spark_conf

log = logging.getLogger(__name__)


@contextmanager
def opened(settings: Settings, name: str) -> Iterator[SparkSession]:
    """The session of this process: one that is already there is used and left, a new one is stopped at the end."""
    there = SparkSession.getActiveSession()
    spark = there or build(settings, name)
    try:
        yield spark
    finally:
        if there is None:
            spark.stop()


def build(settings: Settings, name: str) -> SparkSession:
    """A session for one job. Under `spark-submit` the JVM already runs and its settings stand."""
    # Spark's Python workers otherwise take the first python3 on PATH, which may be another version.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if settings.spark_master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_HOSTNAME", "localhost")
    builder = SparkSession.builder.appName(f"tideline {name}")
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        builder = builder.master(settings.spark_master)
    for key, value in spark_conf(settings).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    log.info("Spark UI of %s: %s", name, spark.sparkContext.uiWebUrl)
    return spark
