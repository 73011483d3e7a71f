"""Slices as partitions of Airflow: the schedule of a pipeline's runs, the slice of each run, and its key.

Airflow may start a run some seconds before its slice is over. Then the run waits, as `wait_until_over` describes.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime

from airflow.sdk import Asset, CronPartitionTimetable

from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.rules import RefusedDefinitionError
from jobs.pipelines.slices import CLOCK_SKEW_MS, Slice, over_at, slice_at
from jobs.pipelines.source import CLOCK_TOLERANCE_MS

# The default format of Airflow's own partition mappers.
KEY_FORMAT = "%Y-%m-%dT%H:%M:%S"
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def timetable_of(pipeline: Pipeline) -> CronPartitionTimetable:
    """A run for each slice, as soon as the slice is over."""
    return CronPartitionTimetable(
        cron_of(pipeline), timezone="UTC", run_offset=-slices_until_over(pipeline), key_format=KEY_FORMAT
    )


def cron_of(pipeline: Pipeline) -> str:
    """The cron expression that fires at the start of each slice.

    Slices are counted from 1970, but cron counts within the hour or the day. So the length must divide one of them.

    >>> from jobs.pipelines import PIPELINES
    >>> cron_of(PIPELINES["rolling_sum"])
    '*/1 * * * *'
    """
    length = pipeline.slice_seconds
    if length % _MINUTE == 0 and _HOUR % length == 0:
        return "0 * * * *" if length == _HOUR else f"*/{length // _MINUTE} * * * *"
    if length % _HOUR == 0 and _DAY % length == 0:
        return "0 0 * * *" if length == _DAY else f"0 */{length // _HOUR} * * *"
    raise RefusedDefinitionError(
        f"pipeline {pipeline.name!r}: Airflow cannot schedule slices of slice_seconds={length}: choose minutes that "
        "divide an hour (60, 300, 900, …), hours that divide a day (3600, 21600, …), or a day (86400)"
    )


def slices_until_over(pipeline: Pipeline) -> int:
    """The time from the begin of a slice to the moment when Airflow starts its run, counted in slices.

    The moment when a slice is over includes 5 s for clocks that differ. These 5 s are left out here. Airflow starts
    runs only at begins of slices, so with these 5 s each run would start a whole slice later. The run waits for 5 s
    instead (`wait_until_over`).

    Example: the slice of 12:00 ends at 12:01:00, its events may come until 12:02:00, and it is over at 12:02:05.
    Airflow starts its run at 12:02:00, and the run waits 5 s. If the 5 s counted here, Airflow would start the run at
    12:03:00.

    >>> from jobs.pipelines import PIPELINES
    >>> slices_until_over(PIPELINES["rolling_sum"])
    2
    """
    length, wait = pipeline.slice_seconds * 1000, over_at(pipeline, Slice(0, 0)) - CLOCK_SKEW_MS
    return 1 - (-wait // length)


def wait_until_over(pipeline: Pipeline, key: str | None, clock: Callable[[], float]) -> None:
    """Wait until the slice is over by the broker's clock. Airflow has started its run by Airflow's own clock."""
    while seconds := seconds_until_over(pipeline, key, clock()):
        time.sleep(seconds)


def seconds_until_over(pipeline: Pipeline, key: str | None, now_ms: float) -> float:
    """How many seconds the run of a slice waits until the slice is over by the broker's clock; 0: it does not wait.

    Airflow may start a run some seconds before the slice is over, for two reasons. `slices_until_over` leaves out 5 s,
    and Airflow's clock may be up to 30 s ahead of the broker's. If more than these 35 s are missing, the clocks are not
    the cause, and the run does not wait. This happens in a backfill of a slice that is not over.

    In the example the slice of 12:00 is over at 12:02:05. Airflow's clock is 3 s ahead, so the run starts at 12:01:57
    by the broker's clock, and waits 8 s. At 12:01:27 it would have to wait 38 s, so it does not wait.

    >>> from jobs.pipelines import PIPELINES
    >>> times = [datetime(2026, 1, 31, 12, 1, second, tzinfo=UTC).timestamp() for second in (57, 27)]
    >>> [seconds_until_over(PIPELINES["rolling_sum"], "2026-01-31T12:00:00", time * 1000) for time in times]
    [8.0, 0.0]
    """
    wait_ms = over_at(pipeline, slice_of(pipeline, key)) - now_ms if key else 0.0
    return wait_ms / 1000 if 0 < wait_ms <= CLOCK_SKEW_MS + CLOCK_TOLERANCE_MS else 0.0


def key_of(slice_: Slice) -> str:
    """The partition's key: the start of the slice."""
    return slice_.start.strftime(KEY_FORMAT)


def slice_of(pipeline: Pipeline, key: str) -> Slice:
    """The slice of a partition's key."""
    start = datetime.strptime(key, KEY_FORMAT).replace(tzinfo=UTC)
    return slice_at(pipeline, round(start.timestamp() * 1000))


def asset_of(pipeline: Pipeline) -> Asset:
    """The asset of Airflow that stands for a pipeline's final slices."""
    return Asset(name=pipeline.asset, uri=f"tideline://{pipeline.asset}")
