"""Slices as partitions of Airflow: the schedule of a pipeline's runs, the slice of each run, and its key."""

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
    """How far the newest slice that is over lies before the slice that begins now, counted in slices.

    Two clocks may differ by a few seconds. These are left out here, else the run would come a whole slice later. The
    run itself waits these seconds instead.
    """
    length, wait = pipeline.slice_seconds * 1000, over_at(pipeline, Slice(0, 0)) - CLOCK_SKEW_MS
    return 1 - (-wait // length)


def wait_until_over(pipeline: Pipeline, key: str | None, clock: Callable[[], float]) -> None:
    """Wait until the slice is over by the broker's clock. Airflow has started its run by Airflow's own clock."""
    while seconds := seconds_until_over(pipeline, key, clock()):
        time.sleep(seconds)


def seconds_until_over(pipeline: Pipeline, key: str | None, now_ms: float) -> float:
    """How many seconds the run of a slice waits until the slice is over by the broker's clock; 0: it does not wait.

    Airflow starts a run some seconds early: the schedule leaves out the few seconds for clocks that differ, and
    Airflow's clock may be ahead of the broker's. If the slice is over only later than that, the clocks are not the
    cause, and the run does not wait.
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
