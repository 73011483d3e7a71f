"""The commands that a driver runs: ingest, live, recompute, audit, account."""

from typing import Annotated

import typer

from jobs.cli.shared import pipeline_named
from jobs.settings import Settings

_UntilCaughtUp = Annotated[bool, typer.Option("--until-caught-up", help="End when the topics are drained.")]
_Run = Annotated[str, typer.Option("--run", help="The run that was planned.")]
_Link = Annotated[str | None, typer.Option(help="Where people read about it.")]


def ingest(until_caught_up: _UntilCaughtUp = False) -> None:
    """Run the job that lands every source topic in the lake, until stopped."""
    from jobs.streaming import ingest as job

    job.run(Settings.from_env(), until_caught_up=until_caught_up)


def live(
    name: Annotated[str, typer.Argument(help="A pipeline: rolling_sum, word_count, …")],
    until_caught_up: _UntilCaughtUp = False,
) -> None:
    """Run the streaming job of a pipeline, until stopped."""
    from jobs.streaming import live as job

    job.run(Settings.from_env(), pipeline_named(name), until_caught_up=until_caught_up)


def recompute(
    name: str,
    run: _Run,
    try_name: Annotated[str | None, typer.Option("--try", help="Which try of the task; none: by hand.")] = None,
) -> None:
    """Compute the windows that a run's plan asks for. The task `recompute` submits this command."""
    from jobs.finality import recompute as job
    from jobs.lake.pipeline_lake import PipelineLake

    settings = Settings.from_env()
    job.run(PipelineLake(settings.lake_root, pipeline_named(name)), settings, run, try_name)


def audit(name: str, run: _Run, link: _Link = None) -> None:
    """Audit the staged rows of a run with Spark. The task `audit` submits this command when there are many rows."""
    from jobs import session
    from jobs.finality import auditing
    from jobs.finality.run.tries import stop_when_task_ends
    from jobs.lake.pipeline_lake import PipelineLake

    settings = Settings.from_env()
    with stop_when_task_ends(), session.opened(settings, f"audit {name}") as spark:
        auditing.examine(PipelineLake(settings.lake_root, pipeline_named(name)), run, spark=spark, link=link)


def account(
    name: str, run: Annotated[str, typer.Option("--run", help="What to call this run.")], link: _Link = None
) -> None:
    """Explain for each slice how far live was from final. The task `account` submits this command."""
    from jobs.finality import account as job
    from jobs.finality.run.tries import stop_when_task_ends
    from jobs.lake.pipeline_lake import PipelineLake

    settings = Settings.from_env()
    with stop_when_task_ends():
        job.run(PipelineLake(settings.lake_root, pipeline_named(name)), settings, run, link)
