"""Per series: total, mean and number of events of each second; tumbling, and sliding by 250 ms."""

from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.shipped.sources import NUMBERS
from jobs.pipelines.window import Check, Measure, Window

_TRANSFORM = "SELECT event_time, key, value FROM {numbers}"
_MEASURES = (
    Measure(name="total", sql="sum(value)", type="DECIMAL(28,6)"),
    Measure(name="mean", sql="sum(value) / count(*)", type="DECIMAL(28,10)"),
    Measure(name="events", sql="count(*)", type="BIGINT"),
)
_CHECKS = (
    Check(column="key"),
    Check(column="total"),
    # A sensor with a mean beyond these bounds is broken.
    Check(column="mean", minimum=-1_000_000_000, maximum=1_000_000_000),
    Check(column="events", minimum=1),
)

ROLLING_SUM = Pipeline(
    name="rolling_sum",
    description="Sum, mean and count of each series per second.",
    source=NUMBERS,
    transform=_TRANSFORM,
    keys=("key",),
    window=Window.tumbling(size_ms=1_000),
    measures=_MEASURES,
    checks=_CHECKS,
    counts="events",
    output="sums",
    slice_seconds=60,
)

ROLLING_SUM_SLIDING = Pipeline(
    name="rolling_sum_sliding",
    description="Sum, mean and count of each series over the last second, every 250 ms.",
    source=NUMBERS,
    transform=_TRANSFORM,
    keys=("key",),
    window=Window.sliding(size_ms=1_000, slide_ms=250),
    measures=_MEASURES,
    checks=_CHECKS,
    counts="events",
    output="sums_sliding",
    slice_seconds=60,
)
