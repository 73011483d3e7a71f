"""The commands that a driver runs: ingest, live, recompute, audit, account."""

from typing import Annotated

import typer

from jobs.cli.shared import PipelineName, lake_of, pipeline_named
from jobs.settings import Settings

_UntilCaughtUp = Annotated[
    bool, typer.Option("--until-caught-up", help="Read the records that are in the topics now, then end.")
]
_Run = Annotated[str, typer.Option("--run", help="The id of the planned run.")]
_Link = Annotated[str | None, typer.Option(help="The address of a page about this run; incidents link to it.")]


def ingest(until_caught_up: _UntilCaughtUp = False) -> None:
    """Run the job that lands every source topic in the lake, until stopped."""
    from jobs.streaming import ingest as job

    job.run(Settings.from_env(), until_caught_up=until_caught_up)


def live(name: PipelineName, until_caught_up: _UntilCaughtUp = False) -> None:
    """Run the streaming job of a pipeline, until stopped."""
    from jobs.streaming import live as job

    job.run(Settings.from_env(), pipeline_named(name), until_caught_up=until_caught_up)


def recompute(
    name: str,
    run: _Run,
    try_name: Annotated[
        str | None, typer.Option("--try", help="The try that the task has begun; leave it out by hand.")
    ] = None,
) -> None:
    """Compute the windows of the slices in a run's plan. The task `recompute` submits this command."""
    from jobs.finality import recompute as job

    settings = Settings.from_env()
    job.run(lake_of(settings, name), settings, run, try_name)


def audit(
    name: str,
    run: _Run,
    link: _Link = None,
    now_ms: Annotated[int | None, typer.Option(help="The broker's time; without it the broker is asked.")] = None,
) -> None:
    """Audit the staged rows of a run with Spark. The task `audit` submits this command when there are many rows."""
    from jobs import session
    from jobs.broker.clock import broker_now_ms
    from jobs.finality import auditing
    from jobs.finality.run.tries import stop_when_task_ends

    settings = Settings.from_env()
    now_ms = broker_now_ms(settings.kafka) if now_ms is None else now_ms
    with stop_when_task_ends(), session.opened(settings, f"audit {name}") as spark:
        auditing.examine(lake_of(settings, name), run, now_ms=now_ms, spark=spark, link=link)


def account(
    name: str,
    run: Annotated[str, typer.Option("--run", help="A name for this run; its rows keep it.")],
    link: _Link = None,
) -> None:
    """Explain how the live rows of each slice differ from its final rows. The task `account` submits this command."""
    from jobs.finality import account as job
    from jobs.finality.run.tries import stop_when_task_ends

    settings = Settings.from_env()
    with stop_when_task_ends():
        job.run(lake_of(settings, name), settings, run, link)
