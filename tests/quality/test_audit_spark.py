"""Spark finds the same as the audit in memory, word for word."""

from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from jobs.pipelines.window import Check, Measure
from jobs.quality.audit import CouldNotCheckError, audit
from tests.quality import made
from tests.quality.made import BILLION, PIPELINE, SLICES, row

pytestmark = pytest.mark.spark


def in_spark(spark: SparkSession, rows: list[dict[str, Any]], types: str = made.SPARK_TYPES) -> DataFrame:
    return spark.createDataFrame([tuple(one[name] for name in made.COLUMNS) for one in rows], types)


def held(spark: SparkSession) -> int:
    """The number of frames that Spark keeps in memory or on disk."""
    return spark.sparkContext._jsc.getPersistentRDDs().size()  # type: ignore[union-attr]


def test_every_failure_is_the_same(spark: SparkSession, tmp_path: Path) -> None:
    bad = [
        row(0, 0),
        row(0, 9, total=None, key=None),
        row(1, 9, mean=Decimal("1000000000.0000000001"), events=0),
        row(1, 10, mean=Decimal("-1000000000.0000000001"), events=101),
        row(2, 9, window_end=made.FIRST),
        row(2, 10, slice=SLICES[0]),
        row(2, 11, slice="20260131T130000Z", window_start=None),
        row(2, 12, slice=None),
    ]
    rows = [*made.rows(), *bad]
    before = held(spark)
    docs = tmp_path / "run.html"
    by_spark = audit(PIPELINE, in_spark(spark, rows), made.slices(rows), run="run", docs=docs)
    in_memory = audit(PIPELINE, made.frame(rows), made.slices(rows), run="run", docs=docs)
    assert by_spark == in_memory
    assert not any(verdict.passed for verdict in by_spark.values())
    assert held(spark) == before


def test_any_rows_and_checks(spark: SparkSession, tmp_path: Path) -> None:
    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(made.ANY_ROW, max_size=8), st.lists(made.ANY_CHECK, max_size=4))
    def judge(rows: list[dict[str, Any]], checks: list[Check]) -> None:
        pipeline = replace(PIPELINE, checks=tuple(checks))
        docs = tmp_path / "run.html"
        by_spark = audit(pipeline, in_spark(spark, rows), made.slices(rows), run="run", docs=docs)
        assert by_spark == audit(pipeline, made.frame(rows), made.slices(rows), run="run", docs=docs)

    judge()


def test_bounds_on_the_widest_decimals_are_exact(spark: SparkSession, tmp_path: Path) -> None:
    pipeline = replace(
        PIPELINE,
        measures=(
            Measure(name="total", sql="sum(value)", type="DECIMAL(38,0)"),
            Measure(name="mean", sql="sum(value)", type="DECIMAL(38,30)"),
            PIPELINE.measures[2],
        ),
        checks=(
            Check(column="total", maximum=2**63 - 1),
            Check(column="mean", minimum=-1, maximum=1),
            # More than such a DECIMAL can hold.
            Check(column="mean", maximum=BILLION),
        ),
    )
    total, mean = Decimal(2**63 - 1), Decimal(1)
    rows = [
        row(0, total=total, mean=mean),
        row(1, total=total + 1, mean=mean),
        row(2, total=total, mean=Decimal("-1." + "0" * 29 + "1")),
    ]
    types = made.SPARK_TYPES.replace("decimal(28,6)", "decimal(38,0)").replace("decimal(28,10)", "decimal(38,30)")
    docs = tmp_path / "run.html"
    by_spark = audit(pipeline, in_spark(spark, rows, types), made.slices(rows), run="run", docs=docs)
    assert [[f.expectation for f in verdict.failures] for verdict in by_spark.values()] == [
        [],
        [f"total is at most {2**63 - 1}"],
        ["mean is between -1 and 1"],
    ]
    assert by_spark == audit(pipeline, made.frame(rows), made.slices(rows), run="run", docs=docs)


def test_what_cannot_be_evaluated_is_no_verdict(spark: SparkSession, tmp_path: Path) -> None:
    before = held(spark)
    rows, docs = made.rows(), tmp_path / "run.html"
    pipeline = replace(PIPELINE, checks=(Check(column="mean", maximum=BILLION),))
    broken = in_spark(spark, rows).withColumn("mean", F.lit("much"))
    with pytest.raises(CouldNotCheckError, match=r"'mean is at most 1000000000' could not be checked: "):
        audit(pipeline, broken, made.slices(rows), run="run", docs=docs)
    with pytest.raises(CouldNotCheckError, match=r"no columns \['mean'\]"):
        audit(PIPELINE, in_spark(spark, rows).drop("mean"), made.slices(rows), run="run", docs=docs)
    assert not docs.exists()
    assert held(spark) == before
