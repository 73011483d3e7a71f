"""Runs a recompute as Airflow does, step after step, in this process."""

import time
from collections.abc import Sequence

from jobs.broker import kafka
from jobs.finality import auditing, planning, publishing, recompute
from jobs.finality.due import Request
from jobs.finality.planning import Planned
from jobs.finality.publishing import Published
from jobs.finality.run.folder import RunFolder
from jobs.lake.pipeline_lake import PipelineLake
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import Slice
from jobs.settings import Settings

# After this time every slice of events that happen now is over, for tumbling windows of at most a minute.
LATER_SECONDS = 240.0


def lake_of(settings: Settings, pipeline: Pipeline) -> PipelineLake:
    """The part of the lake that belongs to a pipeline."""
    return PipelineLake(settings.lake_root, pipeline)


def plan(
    settings: Settings,
    pipeline: Pipeline,
    run: str,
    *,
    slices: Sequence[Slice] = (),
    reason: str = "asked for",
    later_seconds: float = LATER_SECONDS,
    at: float | None = None,
) -> Planned:
    """Plan as if the broker's time were later than now, or than ``at``: no test waits for a slice to be over."""
    request = Request(slices=tuple(slices), reason=reason) if slices else None
    with kafka.admin(settings.kafka) as client:
        clock = lambda: round(((time.time() if at is None else at) + later_seconds) * 1000)  # noqa: E731
        return planning.Planner(lake=lake_of(settings, pipeline), client=client, clock=clock).plan(run, request)


def stage(settings: Settings, pipeline: Pipeline, run: str) -> None:
    """Stage the rows: the only task that needs Spark."""
    recompute.run(lake_of(settings, pipeline), settings, run)


def audit(settings: Settings, pipeline: Pipeline, run: str) -> None:
    """Judge the rows with Great Expectations, in memory."""
    auditing.examine(lake_of(settings, pipeline), run, now_ms=planned_ms(settings, pipeline, run))


def publish(settings: Settings, pipeline: Pipeline, run: str) -> Published:
    """Publish as of the plan's moment: commit, send to the topic, add to the ledger."""
    now_ms = planned_ms(settings, pipeline, run)
    return publishing.publish(lake_of(settings, pipeline), settings.kafka, run, now_ms=now_ms)


def planned_ms(settings: Settings, pipeline: Pipeline, run: str) -> int:
    """The moment of a run's plan: a run without a request makes all slices final that were over by then."""
    return RunFolder.of(lake_of(settings, pipeline), run).plan().as_of_ms


def whole(settings: Settings, pipeline: Pipeline, run: str, **request: object) -> Published:
    """Run all four steps."""
    plan(settings, pipeline, run, **request)  # type: ignore[arg-type]
    stage(settings, pipeline, run)
    audit(settings, pipeline, run)
    return publish(settings, pipeline, run)
