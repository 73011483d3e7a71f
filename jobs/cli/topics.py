"""`tideline topics`: compare Kafka's topics with the definitions, and change them to match."""

import json

import typer
from rich.console import Console

from jobs.cli.shared import Format, Output
from jobs.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Compare Kafka's topics with their definitions, and make them match.")


@app.command("plan")
def topics_plan(output: Format = Output.TABLE) -> None:
    """Show what `apply` would do; exit code 1 if a step is refused."""
    _topics(output, do=False)


@app.command("apply")
def topics_apply(output: Format = Output.TABLE) -> None:
    """Create topics, add partitions and set configs. If one step is refused, nothing is changed."""
    _topics(output, do=True)


def _topics(output: Output, *, do: bool) -> None:
    from jobs import pipelines
    from jobs.broker import kafka, topics

    with kafka.admin(Settings.from_env().kafka) as client:
        steps = topics.survey(client, pipelines.topics())
        if output is Output.JSON:
            print(json.dumps([step.as_row() for step in steps], ensure_ascii=False))
        else:
            Console().print(topics.table(steps))
        topics.require_no_refusal(steps)
        if do:
            topics.apply(client, steps)
