"""Streams: `tideline streams`, reset, advise."""

import getpass
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from jobs.cli.shared import Apply, Format, Output, PipelineName, airflow, console_for_tables, errors, lake_of
from jobs.refusal import Refusal
from jobs.settings import Settings, environment

if TYPE_CHECKING:
    from jobs.streaming.fleet import Fleet

app = typer.Typer(no_args_is_help=True, help="Streaming jobs: show their states, start, stop and restart them.")
_Jobs = Annotated[list[str] | None, typer.Argument(help="ingest, rolling_sum, …; without a name, all jobs.")]
_Seconds = Annotated[float | None, typer.Option(min=1, help="How many seconds a driver may take to end.")]


@app.command("status")
def streams_status(jobs: _Jobs = None, output: Format = Output.TABLE) -> None:
    """Show the state of streams; exit code 1 if a wanted stream does not run, or an incident is open."""
    from jobs.query.answers import visible_lines
    from jobs.streaming import fleet

    with _fleet() as streams:
        names = fleet.known_jobs(jobs or ())
        states, incidents = streams.status(names), streams.incidents(names)
    if output is Output.JSON:
        print(json.dumps({"streams": fleet.as_rows(states), "incidents": incidents}))
    else:
        console_for_tables().print(fleet.table(states))
        for incident in incidents:
            print(visible_lines(f"incident: {incident}"))
    if incidents or not all(state.is_well for state in states):
        raise typer.Exit(1)


@app.command("start")
def streams_start(jobs: _Jobs = None, output: Format = Output.TABLE) -> None:
    """Switch streams on; a stream that waits after failures is started at once."""
    _control(output, jobs, lambda streams, names: streams.start(names, by=_who()))


@app.command("stop")
def streams_stop(
    jobs: _Jobs = None,
    drain: Annotated[bool, typer.Option("--drain", help="First read all records that are in the topics now.")] = False,
    seconds: _Seconds = None,
    output: Format = Output.TABLE,
) -> None:
    """Switch streams off: each driver finishes its micro-batch and ends."""
    _control(output, jobs, lambda streams, names: streams.stop(names, by=_who(), drain=drain, seconds=seconds))


@app.command("restart")
def streams_restart(jobs: _Jobs = None, seconds: _Seconds = None, output: Format = Output.TABLE) -> None:
    """End each driver after its micro-batch; its DAG then starts another."""
    _control(output, jobs, lambda streams, names: streams.restart(names, by=_who(), seconds=seconds))


def _control(output: Output, jobs: list[str] | None, act: "Callable[[Fleet, Sequence[str]], None]") -> None:
    from jobs.streaming import fleet

    names = fleet.known_jobs(jobs or ())
    with _fleet() as streams:
        act(streams, names)
        states = streams.status(names)
    if output is Output.JSON:
        print(json.dumps({"streams": fleet.as_rows(states)}))


@contextmanager
def _fleet() -> "Iterator[Fleet]":
    """The streams of this lake. Without an answer of Airflow, only the drivers can be asked, not their DAGs."""
    from jobs.query.answers import visible_lines
    from jobs.streaming.fleet import Fleet

    def tell(line: str) -> None:
        errors.print(Text(visible_lines(line)), highlight=False, soft_wrap=True)

    env = environment()
    if env.get("AIRFLOW_API") and not env.get("LAKE_ROOT"):
        raise Refusal(
            f"AIRFLOW_API={env['AIRFLOW_API']}, and LAKE_ROOT is not set: the states of streams are in the lake, so "
            "set LAKE_ROOT to the lake of that Airflow"
        )
    with airflow() as api:
        if api is None:
            tell("Airflow does not answer: drivers are shown and stopped, but their DAGs are neither read nor paused")
        yield Fleet(lake_root=Settings.from_env().lake_root, api=api, report=tell)


def _who() -> str:
    return f"{getpass.getuser()} (tideline streams)"


def reset(
    job: Annotated[str, typer.Argument(help="A streaming job: ingest, rolling_sum, word_count, …")],
    to: Annotated[str, typer.Option(help="Where to begin: earliest, latest, timestamp or landed.")],
    timestamp: Annotated[str | None, typer.Option(help="With --to timestamp: arrival time, ISO 8601.")] = None,
    source: Annotated[list[str] | None, typer.Option(help="For ingest: only this source; may be repeated.")] = None,
    do: Apply = False,
    output: Format = Output.TABLE,
) -> None:
    """Let a stream begin at other offsets, with a new checkpoint. Live rows are cleared, the old checkpoint is kept.

    `ingest` keeps its rows and only moves forward; an incident lists what it skips. Refused while the job runs.
    """
    from jobs.broker import kafka
    from jobs.streaming import reset as tool
    from jobs.streaming.reset_plan import Request

    request = Request.of(job, to, timestamp, source or ())
    settings = Settings.from_env()
    with kafka.admin(settings.kafka) as client:
        planned = (tool.apply if do else tool.plan)(settings, client, request)
    if output is Output.JSON:
        print(json.dumps(planned.as_rows()))
        return
    Console().print(planned.table())
    print("\n".join(planned.effects()))
    print("Done: now start the stream." if do else f"Nothing is changed. To reset it: {request.command} --apply")


def advise(
    name: PipelineName,
    hours: Annotated[
        float, typer.Option(min=0.01, help="How many hours of arrivals to look at, up to the newest.")
    ] = 24,
    share: Annotated[
        float, typer.Option(min=0, max=1, help="The share of events that the stream should count.")
    ] = 0.999,
    output: Format = Output.TABLE,
) -> None:
    """Propose a watermark delay from the lateness of landed events, and show what it costs."""
    from jobs.streaming import advise as adviser

    settings = Settings.from_env()
    advice = adviser.advise(lake_of(settings, name), settings.trigger_ms, hours=hours, share=share)
    if output is Output.JSON:
        print(advice.to_json())
        return
    Console().print(advice.table())
    print(advice.sentence)
