"""`tideline` and `python -m jobs`: thin commands, one function each. The work is done in the modules they call."""

import json
import logging
import sys
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console

from jobs.pipelines.spec import RefusedDefinitionError
from jobs.refusal import Refusal
from jobs.settings import Settings

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
errors = Console(stderr=True)


@app.callback()
def _configure_logging() -> None:
    """Streaming numbers you can trust: every row says whether it is live or final."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("kafka").setLevel(logging.WARNING)
    logging.getLogger("py4j").setLevel(logging.WARNING)


class Output(StrEnum):
    """How a command prints its answer."""

    TABLE = "table"
    JSON = "json"


topics_app = typer.Typer(
    no_args_is_help=True, help="Topics as code: what the definitions want, against what Kafka has."
)
app.add_typer(topics_app, name="topics")
_Format = Annotated[Output, typer.Option("--format", help="A table for people, JSON for programs.")]


@topics_app.command("plan")
def topics_plan(output: _Format = Output.TABLE) -> None:
    """Show what `apply` would do; exit code 1 if it would refuse."""
    _topics(output, do=False)


@topics_app.command("apply")
def topics_apply(output: _Format = Output.TABLE) -> None:
    """Create, grow and align the topics; nothing at all if a step is refused."""
    _topics(output, do=True)


def _topics(output: Output, *, do: bool) -> None:
    from jobs import pipelines
    from jobs.connectors import kafka, topics

    with kafka.admin(Settings.from_env().kafka) as client:
        steps = topics.survey(client, pipelines.topics())
        if output is Output.JSON:
            print(json.dumps([step.as_row() for step in steps], ensure_ascii=False))
        else:
            Console().print(topics.table(steps))
        topics.require_no_refusal(steps)
        if do:
            topics.apply(client, steps)


def main() -> None:
    """Run the command; a refusal is a sentence on stderr and exit code 1, never a trace."""
    try:
        app()
    except (Refusal, RefusedDefinitionError) as refusal:
        errors.print(f"[red]tideline:[/red] {refusal}", highlight=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
