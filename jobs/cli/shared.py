"""Shared by all commands: printing, progress, and the way to the platform."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from jobs.refusal import Refusal
from jobs.settings import Settings, environment

if TYPE_CHECKING:
    from jobs.airflow_api.client import AirflowApi
    from jobs.lake.pipeline_lake import PipelineLake
    from jobs.pipelines.pipeline import Pipeline
    from local.platform.stack import Stack

errors = Console(stderr=True)


class Output(StrEnum):
    """How a command prints its answer."""

    TABLE = "table"
    JSON = "json"


Format = Annotated[Output, typer.Option("--format", help="A table for people, JSON for programs.")]
PipelineName = Annotated[str, typer.Argument(help="A pipeline: rolling_sum, word_count, …")]
Apply = Annotated[bool, typer.Option("--apply", help="Make the change; without --apply it is only shown.")]


def console_for_tables() -> Console:
    """A console with the width of the terminal; in a file or a pipe, tables are wide enough for all columns."""
    return Console(width=None if sys.stdout.isatty() else 160)


@contextmanager
def progress(title: str, total: int | None) -> Iterator[Callable[[int], object]]:
    """A bar on stderr, on a terminal only."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f}"), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda completed: bar.update(task, completed=completed)


@contextmanager
def steps(title: str) -> Iterator[Callable[[str], None]]:
    """Show the current step: a spinner on a terminal, lines elsewhere."""
    if not errors.is_terminal:
        yield lambda step: errors.print(f"{title}: {step}", highlight=False)
        return
    with errors.status(title) as status:
        yield lambda step: status.update(f"{title}: {step}")


def lake_of(settings: Settings, name: str) -> "PipelineLake":
    """The lake of the pipeline of this name; refused if there is none."""
    from jobs.lake.pipeline_lake import PipelineLake

    return PipelineLake(settings.lake_root, pipeline_named(name))


def pipeline_named(name: str) -> "Pipeline":
    """The pipeline of this name; refused if there is none."""
    from jobs.pipelines import PIPELINES

    if name not in PIPELINES:
        raise Refusal(f"there is no pipeline {name!r}: choose one of {', '.join(PIPELINES)}")
    return PIPELINES[name]


def embedded_stack() -> "Stack":
    """The platform that `tideline up` starts."""
    from local.platform.settings import StackSettings
    from local.platform.stack import Stack

    return Stack(StackSettings.from_env())


@contextmanager
def airflow() -> "Iterator[AirflowApi | None]":
    """The Airflow of `AIRFLOW_API`, or else of the embedded platform; None if it does not answer."""
    from jobs.airflow_api.client import AirflowApi

    env = environment()
    if env.get("AIRFLOW_API"):
        with AirflowApi.from_env(env) as api:
            yield api if api.health() else None
        return
    with embedded_stack().running_api() as api:
        yield api


def say(sentence: str) -> None:
    """Print a refusal, or why something has ended."""
    from jobs.query.answers import visible_lines

    # A sentence may quote data or a query, so control characters in it are made visible.
    errors.print("[red]tideline:[/red]", Text(visible_lines(sentence)), highlight=False, soft_wrap=True)
