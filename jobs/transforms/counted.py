"""Which accepted events a live job counts at all: said once, for the stream and for its account."""

from pyspark.sql import Column
from pyspark.sql import functions as F

from jobs.pipelines.pipeline import Pipeline


def is_ahead(pipeline: Pipeline) -> Column:
    """Whether an event is ahead of its arrival by more than the watermark's delay.

    One fast clock would otherwise drag the watermark along and make everyone else late.
    """
    delay = F.expr(f"INTERVAL {pipeline.watermark_delay_seconds} seconds")
    return F.col("event_time") > F.col("arrival_time") + delay
