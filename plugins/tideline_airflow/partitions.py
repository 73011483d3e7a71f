"""Slices as partitions of Airflow: when a run is scheduled, for which slice, and how a slice's key reads."""

import time
from collections.abc import Callable
from datetime import UTC, datetime

from airflow.sdk import Asset, CronPartitionTimetable

from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.rules import RefusedDefinitionError
from jobs.pipelines.slices import CLOCK_SKEW_MS, Slice, closes_at, slice_at
from jobs.pipelines.source import CLOCK_TOLERANCE_MS

# What Airflow's own partition mappers read where nothing else is said.
KEY_FORMAT = "%Y-%m-%dT%H:%M:%S"
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def timetable_of(pipeline: Pipeline) -> CronPartitionTimetable:
    """A run for each slice, as soon as the slice is over."""
    return CronPartitionTimetable(
        cron_of(pipeline), timezone="UTC", run_offset=-slices_until_over(pipeline), key_format=KEY_FORMAT
    )


def cron_of(pipeline: Pipeline) -> str:
    """A moment for each beginning of a slice. Slices are counted from 1970, cron counts within the hour or the day."""
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
    """How many slices before the one that begins now the newest lies for which nothing more can come in time.

    But for the few seconds by which two clocks may differ: those the run waits, or it would come a slice later.
    """
    length, wait = pipeline.slice_seconds * 1000, closes_at(pipeline, Slice(0, 0)) - CLOCK_SKEW_MS
    return 1 - (-wait // length)


def wait_until_over(pipeline: Pipeline, key: str | None, clock: Callable[[], float]) -> None:
    """Let the run of a slice begin when the slice is over by the broker's clock; Airflow has started it by its own."""
    while seconds := seconds_until_over(pipeline, key, clock()):
        time.sleep(seconds)


def seconds_until_over(pipeline: Pipeline, key: str | None, now_ms: float) -> float:
    """How long the run of a slice waits for it; one that is not over for longer was not meant to wait.

    The moment is the broker's. By Airflow's clock, which has started the run, it may be that much later.
    """
    wait_ms = closes_at(pipeline, slice_of(pipeline, key)) - now_ms if key else 0.0
    return wait_ms / 1000 if 0 < wait_ms <= CLOCK_SKEW_MS + CLOCK_TOLERANCE_MS else 0.0


def key_of(slice_: Slice) -> str:
    """The partition's key: when the slice begins."""
    return slice_.start.strftime(KEY_FORMAT)


def slice_of(pipeline: Pipeline, key: str) -> Slice:
    """The slice of a partition's key."""
    start = datetime.strptime(key, KEY_FORMAT).replace(tzinfo=UTC)
    return slice_at(pipeline, round(start.timestamp() * 1000))


def asset_of(pipeline: Pipeline) -> Asset:
    """What a pipeline publishes, as Airflow knows it."""
    return Asset(name=pipeline.asset, uri=f"tideline://{pipeline.asset}")
