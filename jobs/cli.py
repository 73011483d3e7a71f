"""`tideline` and `python -m jobs`: thin commands, one function each. The work is done in the modules they call."""

import getpass
import json
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from jobs.pipelines.spec import RefusedDefinitionError
from jobs.refusal import Refusal
from jobs.settings import QueryLimits, Settings, environment
from jobs.times import parse_time

if TYPE_CHECKING:
    from jobs.airflow_api.client import AirflowApi
    from jobs.pipelines.spec import Pipeline
    from jobs.streaming.fleet import Fleet
    from local.platform.stack import Stack

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
errors = Console(stderr=True)
# How long a command follows the run that it has started.
_RUN_SECONDS = 3600.0
_JOBS = [[name] for name in ("ingest", "live", "recompute", "audit", "account")]


@app.callback()
def _configure_logging() -> None:
    """Streaming numbers you can trust: every row says whether it is live or final."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("kafka").setLevel(logging.WARNING)
    # It warns of every pause over 0.1 s, and a busy machine has many.
    logging.getLogger("kafka.net.selector").setLevel(logging.ERROR)
    logging.getLogger("py4j").setLevel(logging.WARNING)


class Output(StrEnum):
    """How a command prints its answer."""

    TABLE = "table"
    JSON = "json"


class QueryOutput(StrEnum):
    """How `query` prints its answer."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


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


_Share = Annotated[float, typer.Option(min=0, max=1, help="A share of all records, e.g. 0.01.")]


@app.command()
def generate(
    source: Annotated[str, typer.Argument(help="Which source's traffic: numbers, lines, clicks, orders, …")],
    rate: Annotated[float, typer.Option(min=0, help="Records per second; 0: as fast as possible.")] = 1000,
    count: Annotated[int | None, typer.Option(min=0, help="How many; without it until stopped.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same records; drawn if not given.")] = None,
    late: _Share = 0.0,
    duplicate: _Share = 0.0,
    corrupt: _Share = 0.0,
    keys: Annotated[int, typer.Option(min=1, help="How many series, users, customers or devices.")] = 100,
    start: Annotated[str | None, typer.Option(help="First event time, ISO 8601; without it events happen now.")] = None,
    step_ms: Annotated[int, typer.Option(min=1, help="Event time between two records, with --start.")] = 1,
) -> None:
    """Send made-up traffic to a source's topic: skewed, wandering, on demand late, repeated or broken.

    The same seed, count and start give the same records byte for byte; without --start all but the times.
    """
    from jobs.traffic import generator as traffic

    seed = secrets.randbits(32) if seed is None else seed
    stream = traffic.records(
        source,
        seed=seed,
        count=count,
        start_ms=parse_time(start) if start else None,
        step_ms=step_ms,
        late=late,
        duplicate=duplicate,
        corrupt=corrupt,
        keys=keys,
    )
    with _stopped_by_signals() as stop, _progress(f"{source} →", count) as advance:
        sent = traffic.send(Settings.from_env().kafka, source, stream, rate=rate, stop=stop, progress=advance)
    per_second = sent.count / sent.seconds if sent.seconds else 0
    print(f"sent {sent.count:,} records to {source} in {sent.seconds:.1f} s ({per_second:,.0f}/s), seed {seed}")


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM set the event once; a second signal does what it always did."""
    stop = threading.Event()
    before: dict[int, Any] = {}

    def request_stop(number: int, _frame: object) -> None:
        stop.set()
        signal.signal(number, before[number])

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, request_stop)
    try:
        yield stop
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


@contextmanager
def _progress(title: str, total: int | None) -> Iterator[Callable[[int], object]]:
    """A bar on stderr, on a terminal only."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f}"), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda completed: bar.update(task, completed=completed)


@contextmanager
def _steps(title: str) -> Iterator[Callable[[str], None]]:
    """What is being done: a spinner on a terminal, lines elsewhere."""
    if not errors.is_terminal:
        yield lambda step: errors.print(f"{title}: {step}", highlight=False)
        return
    with errors.status(title) as status:
        yield lambda step: status.update(f"{title}: {step}")


def _stack() -> "Stack":
    from local.platform.settings import StackSettings
    from local.platform.stack import Stack

    return Stack(StackSettings.from_env())


@app.command()
def up() -> None:
    """Start the platform: broker and Airflow. Harmless when it runs, heals it when a part died."""
    from local.platform.report import addresses

    stack = _stack()
    with _steps("starting") as step:
        stack.up(step)
    Console().print(addresses(stack))


@app.command()
def down() -> None:
    """Stop the platform and everything it started; data stays."""
    with _steps("stopping") as step:
        killed = _stack().down(step)
    print(f"stopped; {killed} processes had to be killed" if killed else "stopped")


@app.command()
def status(output: _Format = Output.TABLE) -> None:
    """Show the parts of the platform, their health and memory; exit code 1 unless all of them are healthy."""
    from local.platform.report import as_rows, status_table

    parts = _stack().status()
    if output is Output.JSON:
        print(json.dumps(as_rows(parts)))
    else:
        Console().print(status_table(parts))
    if not all(part.good for part in parts):
        raise typer.Exit(1)


@app.command()
def doctor() -> None:
    """Check the environment: Python, Spark, Java, disk, ports, lake, jars; exit code 1 if something is wrong."""
    from local.platform.doctor import checks
    from local.platform.settings import StackSettings

    wrong = 0
    for name, check in checks(StackSettings.from_env()).items():
        try:
            print(f"ok    {name}: {check()}")
        except Refusal as refusal:
            wrong += 1
            print(f"WRONG {name}: {refusal}")
    if wrong:
        raise typer.Exit(1)


@app.command()
def demo(
    broken: Annotated[bool, typer.Option("--break", help="Then send a bad batch, and show how it is blocked.")] = False,
) -> None:
    """Start everything, feed it, and show live windows turn final; leaves the platform running."""
    from local.demo import mad_sensor as demo_break
    from local.demo import run as shows

    shows.run(_stack(), Console())
    if broken:
        demo_break.run(_stack(), Console())


@app.command()
def jars(
    verify: Annotated[bool, typer.Option("--verify", help="Only check what is there; fetch nothing.")] = False,
) -> None:
    """Fetch the jars that Spark and the broker need, once, and check their sums."""
    from local.jars import classes
    from local.jars import fetch as declared
    from local.platform.settings import StackSettings

    settings = StackSettings.from_env()
    folder = settings.jobs.jars
    if verify:
        declared.verify(folder)
    else:
        with _steps("fetching jars") as step:
            step(str(folder))
            declared.fetch(folder, mirror=settings.maven_url)
            step("Spark's classes, once for all starts")
            classes.prepare(folder)
    print(f"{len(declared.declared())} jars in {folder}, every sum as declared")


@app.command()
def clean(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete the platform's data: lake, topics, Airflow's database, logs. Jars stay; refused while it runs."""
    stack = _stack()
    if not yes:
        typer.confirm(f"Delete lake, topics, Airflow's database and logs below {stack.settings.home}?", abort=True)
    for folder in stack.clean():
        print(f"deleted {folder}")


streams_app = typer.Typer(no_args_is_help=True, help="Streaming jobs: how they do, on, off, and again.")
app.add_typer(streams_app, name="streams")
_Jobs = Annotated[list[str] | None, typer.Argument(help="ingest, rolling_sum, …; none means all.")]
_Seconds = Annotated[float | None, typer.Option(min=1, help="How long a driver may take for its micro-batch.")]


@streams_app.command("status")
def streams_status(jobs: _Jobs = None, output: _Format = Output.TABLE) -> None:
    """Show how streams do; exit code 1 if one that is wanted does not run, or an incident is open."""
    from jobs.streaming import fleet

    with _fleet() as streams:
        names = fleet.known_jobs(jobs or ())
        states, incidents = streams.status(names), streams.incidents(names)
    if output is Output.JSON:
        print(json.dumps({"streams": fleet.as_rows(states), "incidents": incidents}))
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(fleet.table(states))
        for incident in incidents:
            print(f"incident: {incident}")
    if incidents or not all(state.is_well for state in states):
        raise typer.Exit(1)


@streams_app.command("start")
def streams_start(jobs: _Jobs = None, output: _Format = Output.TABLE) -> None:
    """Switch streams on; one that waits after failures is started at once."""
    _control(output, jobs, lambda streams, names: streams.start(names, by=_who()))


@streams_app.command("stop")
def streams_stop(
    jobs: _Jobs = None,
    drain: Annotated[bool, typer.Option("--drain", help="First read what is in the topics now.")] = False,
    seconds: _Seconds = None,
    output: _Format = Output.TABLE,
) -> None:
    """Switch streams off: each driver finishes its micro-batch and ends."""
    _control(output, jobs, lambda streams, names: streams.stop(names, by=_who(), drain=drain, seconds=seconds))


@streams_app.command("restart")
def streams_restart(jobs: _Jobs = None, seconds: _Seconds = None, output: _Format = Output.TABLE) -> None:
    """End drivers after their micro-batch, and let others begin."""
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
    """The streams of this lake, with Airflow if it answers."""
    from jobs.streaming.fleet import Fleet

    def tell(line: str) -> None:
        errors.print(line, highlight=False, soft_wrap=True)

    env = environment()
    if env.get("AIRFLOW_API") and not env.get("LAKE_ROOT"):
        raise Refusal(f"AIRFLOW_API={env['AIRFLOW_API']}: streams are asked through their lake, so set LAKE_ROOT to it")
    with _airflow() as api:
        if api is None:
            tell("Airflow does not answer: drivers can be asked, their DAGs cannot")
        yield Fleet(lake_root=Settings.from_env().lake_root, api=api, report=tell)


@contextmanager
def _airflow() -> "Iterator[AirflowApi | None]":
    """The Airflow of `AIRFLOW_API`, or else that of the embedded platform; none if it does not answer."""
    from jobs.airflow_api.client import AirflowApi

    env = environment()
    if env.get("AIRFLOW_API"):
        with AirflowApi.from_env(env) as api:
            yield api if api.health() else None
        return
    with _stack().running_api() as api:
        yield api


def _who() -> str:
    return f"{getpass.getuser()} (tideline streams)"


_UntilCaughtUp = Annotated[bool, typer.Option("--until-caught-up", help="End when the topics are drained.")]


@app.command()
def ingest(until_caught_up: _UntilCaughtUp = False) -> None:
    """Run the job that lands every source topic in the lake, until stopped."""
    from jobs.streaming import ingest as job

    job.run(Settings.from_env(), until_caught_up=until_caught_up)


@app.command()
def live(
    name: Annotated[str, typer.Argument(help="A pipeline: rolling_sum, word_count, …")],
    until_caught_up: _UntilCaughtUp = False,
) -> None:
    """Run the streaming job of a pipeline, until stopped."""
    from jobs.streaming import live as job

    job.run(Settings.from_env(), _pipeline(name), until_caught_up=until_caught_up)


_Run = Annotated[str, typer.Option("--run", help="The run that was planned.")]


@app.command(hidden=True)
def recompute(
    name: str,
    run: _Run,
    try_name: Annotated[str | None, typer.Option("--try", help="Which try of the task; none: by hand.")] = None,
) -> None:
    """Compute the windows that a run's plan asks for: what the task `recompute` submits."""
    from jobs.finality import recompute as job

    job.run(Settings.from_env(), _pipeline(name), run, try_name)


_Link = Annotated[str | None, typer.Option(help="Where people read about it.")]


@app.command(hidden=True)
def audit(name: str, run: _Run, link: _Link = None) -> None:
    """Judge by Spark what a run has staged: what the task `audit` submits when there are many rows."""
    from jobs import session
    from jobs.finality import gate
    from jobs.finality.tries import stop_when_task_ends

    settings = Settings.from_env()
    with stop_when_task_ends(), session.opened(settings, f"audit {name}") as spark:
        gate.examine(settings.lake_root, _pipeline(name), run, spark=spark, link=link)


@app.command(hidden=True)
def account(
    name: str, run: Annotated[str, typer.Option("--run", help="What to call this run.")], link: _Link = None
) -> None:
    """Explain how far live was from final, slice by slice: what the task `account` submits."""
    from jobs.finality import account as job
    from jobs.finality.tries import stop_when_task_ends

    with stop_when_task_ends():
        job.run(Settings.from_env(), _pipeline(name), run, link)


@app.command()
def advise(
    name: Annotated[str, typer.Argument(help="A pipeline: rolling_sum, word_count, …")],
    hours: Annotated[float, typer.Option(min=0.01, help="How far back to look, by arrival.")] = 24,
    share: Annotated[float, typer.Option(min=0, max=1, help="The share of events that should count in time.")] = 0.999,
    output: _Format = Output.TABLE,
) -> None:
    """Propose a watermark delay from the lateness that was seen, with its price in freshness and state."""
    from jobs.streaming import advise as adviser

    settings = Settings.from_env()
    advice = adviser.advise(settings.lake_root, _pipeline(name), settings.trigger_ms, hours=hours, share=share)
    if output is Output.JSON:
        print(advice.to_json())
        return
    Console().print(advice.table())
    print(advice.sentence)


def _pipeline(name: str) -> "Pipeline":
    from jobs.pipelines import PIPELINES

    if name not in PIPELINES:
        raise Refusal(f"there is no pipeline {name!r}: choose one of {', '.join(PIPELINES)}")
    return PIPELINES[name]


@app.command()
def reset(
    job: Annotated[str, typer.Argument(help="A streaming job: ingest, rolling_sum, word_count, …")],
    to: Annotated[str, typer.Option(help="Where to begin: earliest, latest, timestamp or tide-line.")],
    timestamp: Annotated[str | None, typer.Option(help="With --to timestamp: arrival time, ISO 8601.")] = None,
    source: Annotated[list[str] | None, typer.Option(help="For ingest: only this source; may be repeated.")] = None,
    do: Annotated[bool, typer.Option("--apply", help="Do it; without it only show what it would do.")] = False,
    output: _Format = Output.TABLE,
) -> None:
    """Begin a stream anew from other offsets: a new checkpoint, live rows cleared, the old checkpoint put aside.

    `ingest` keeps its rows and only moves forward; what it passes over is booked as lost. Refused while the job runs.
    """
    from jobs.broker import kafka
    from jobs.streaming import reset as tool

    request = tool.Request(
        job=job,
        to=tool.target(to),
        timestamp_ms=parse_time(timestamp) if timestamp else None,
        sources=tuple(source or ()),
    )
    settings = Settings.from_env()
    with kafka.admin(settings.kafka) as client:
        planned = (tool.apply if do else tool.plan)(settings, client, request)
    if output is Output.JSON:
        print(json.dumps(planned.as_rows()))
        return
    Console().print(planned.table())
    print("\n".join(planned.effects()))
    print("Done: start the stream." if do else f"Nothing is changed. To do it: {request.command} --apply")


_Reason = Annotated[str | None, typer.Option("--reason", help="Why; the ledger keeps it.")]
_Apply = Annotated[bool, typer.Option("--apply", help="Do it; without it only show what it would do.")]
_From = Annotated[str | None, typer.Option("--from", help="Event time at which the first slice begins, ISO 8601.")]
_To = Annotated[str | None, typer.Option("--to", help="Event time at which the last slice ends, ISO 8601.")]


@app.command()
def plan(
    name: Annotated[str, typer.Argument(help="A pipeline: rolling_sum, word_count, …")],
    from_: _From = None,
    to: _To = None,
    output: _Format = Output.TABLE,
) -> None:
    """Show which slices a recompute would make final now, and why; or those of an interval."""
    _recompute_run(name, {"from": from_, "to": to, "dry_run": True}, output)


@app.command()
def restate(
    name: Annotated[str, typer.Argument(help="A pipeline: rolling_sum, word_count, …")],
    from_: _From = None,
    to: _To = None,
    outdated: Annotated[bool, typer.Option("--outdated", help="All slices of an older definition instead.")] = False,
    reason: _Reason = None,
    do: _Apply = False,
    output: _Format = Output.TABLE,
) -> None:
    """Compute, audit and publish the slices of an interval again."""
    if not outdated and not (from_ and to):
        raise Refusal("say which slices: --from and --to, or --outdated")
    asked = {"from": from_, "to": to, "outdated": outdated, "dry_run": not do, "reason": reason}
    _recompute_run(name, asked, output)


@app.command()
def rollback(
    name: Annotated[str, typer.Argument(help="A pipeline: rolling_sum, word_count, …")],
    slice_: Annotated[str, typer.Option("--slice", help="Its name, or a time in it: 20260131T120000Z.")],
    to_version: Annotated[int, typer.Option("--to-version", min=1, help="Which version to serve again.")],
    reason: _Reason = None,
    do: _Apply = False,
    output: _Format = Output.TABLE,
) -> None:
    """Serve an earlier version of a slice again, as a version of its own."""
    from jobs.pipelines.slices import slice_at

    pipeline = _pipeline(name)
    conf = {
        "pipeline": pipeline.name,
        "slice": slice_at(pipeline, parse_time(slice_)).name,
        "to_version": to_version,
        "reason": reason,
        "apply": do,
    }
    said = _dag_run("rollback_slice", conf, "roll_back")
    print(json.dumps(said) if output is Output.JSON else "\n".join(said["said"]))


def _recompute_run(name: str, asked: dict[str, Any], output: Output) -> None:
    from jobs.finality import plans

    for time_ in (asked["from"], asked["to"]):
        if time_:
            parse_time(time_)
    said = _dag_run(_pipeline(name).recompute_job, asked, "plan")
    if output is Output.JSON:
        print(json.dumps(said))
        return
    if said["slices"]:
        Console(width=None if sys.stdout.isatty() else 160).print(plans.table(said["slices"]))
    print("\n".join(said["said"]))
    if not said["dry_run"]:
        print("Done: what the audit has passed is final.")


def _dag_run(dag_id: str, conf: dict[str, Any], task_id: str) -> dict[str, Any]:
    """Start a DAG run, follow it, and give what one of its tasks has to say."""
    from jobs.airflow_api import dag_runs

    with _airflow() as api, _steps(dag_id) as step:
        if api is None:
            raise Refusal("Airflow does not answer: `tideline up` starts the embedded one, AIRFLOW_API names another")
        run_id = dag_runs.run(api, dag_id, conf, step, _RUN_SECONDS)
        return dict(api.xcom(dag_id, run_id, task_id))


@app.command()
def query(
    sql: Annotated[str, typer.Argument(help='One SELECT, e.g. "select * from rolling_sum limit 5".')],
    output: Annotated[QueryOutput, typer.Option("--format", help="How to print the answer.")] = QueryOutput.TABLE,
    seconds: Annotated[int | None, typer.Option(min=1, help="How long it may take; by default QUERY_SECONDS.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="How many rows it may have; by default QUERY_ROWS.")] = None,
) -> None:
    """Ask the lake: PIPELINE, slices_, ledger_, drift_, balance_PIPELINE, events_, quarantine_SOURCE, incidents."""
    from jobs.lake import answers
    from jobs.lake.query import Lake

    # The lake is only read: there is nothing to tidy up, and no function of a query can hold it up.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    limits = QueryLimits.from_env()
    limits = replace(limits, seconds=seconds or limits.seconds, rows=rows or limits.rows)
    out, safe = sys.stdout, sys.stdout.isatty()
    with Lake(Settings.from_env().lake_root, limits, _end).ask(sql) as answer:
        if output is QueryOutput.JSON:
            answers.write_json(answer.schema.names, answer.batches, out, safe=safe)
        elif output is QueryOutput.CSV:
            answers.write_csv(answer.schema.names, answer.batches, out, safe=safe)
        else:
            answers.write_table(answer.schema.names, answer.batches, out)


def _end(sentence: str) -> None:
    """End the process from another thread than the one that is stuck."""
    _say(sentence)
    os._exit(1)


@app.command()
def bench(
    records: Annotated[int, typer.Option(min=1_000, help="How many each measured drain reads.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(min=1, help="How many measured drains each side has; the median counts.")] = 3,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="ingest, rolling_sum, word_count, freshness, scale, recompute, history, publish or reading; or year, "
            "which takes up to an hour and is no part of a run without --only."
        ),
    ] = None,
    days: Annotated[
        int, typer.Option(min=1, help="How many days the simulated year has; fewer are a quick look.")
    ] = 365,
) -> None:
    """Measure our jobs beside plain Spark and DuckDB, and freshness; a whole run writes docs/benchmarks.md."""
    from local.bench import report as bench_report
    from local.bench import run as measure
    from local.bench import year_report as bench_year_report

    # As Ctrl-C does, so that brokers and sessions end with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = Settings.from_env()
    wanted = tuple(only or measure.EVERYTHING)
    with _steps("bench") as step:
        results = measure.run(settings, records=records, rounds=rounds, only=wanted, report=step, days=days)
    if results.races:
        Console().print(bench_report.table(results))
    if results.freshness:
        print(bench_report.freshness_line(results.freshness))
    if results.scaled:
        Console().print(bench_report.scale_table(results.scaled))
    for table in bench_report.batch_tables(results):
        Console(width=None if sys.stdout.isatty() else 160).print(table)
    for table in bench_year_report.tables(results.year) if results.year else ():
        Console(width=None if sys.stdout.isatty() else 160).print(table)
    if results.year:
        print(bench_year_report.verdict(results.year))
    if not only and records >= measure.WHOLE_RECORDS:
        bench_report.write(results, settings, rounds)
        print(f"written: {bench_report.PAGE}")
    elif wanted == (measure.SCALE,) and records >= measure.WHOLE_RECORDS:
        bench_report.write_scale(results, settings, rounds)
        print(f"written: its part of {bench_report.PAGE}")
    elif results.year and bench_year_report.is_whole(results.year):
        bench_report.write_year(results.year, results, settings)
        print(f"written: its part of {bench_report.PAGE}")


@app.command()
def soak(
    minutes: Annotated[int, typer.Option(min=2, help="How long, once everything runs.")] = 20,
    quota: Annotated[
        int | None, typer.Option(min=50, help="Megabytes that the disk of the lake has; needs root.")
    ] = None,
) -> None:
    """Run three pipelines with recompute on a platform of its own; exit code 1 if the tide line falls behind."""
    from local.soak import report as soak_report
    from local.soak import run as watch

    # As Ctrl-C does, so that the platform ends with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _steps("soak") as step:
        soaked = watch.run(minutes, step, quota)
    for table in soak_report.tables(soaked):
        Console(width=None if sys.stdout.isatty() else 160).print(table)
    print("\n".join(soak_report.verdict(soaked)))
    if soaked.unmet():
        raise typer.Exit(1)


def main() -> None:
    """Run the command; a refusal is a sentence on stderr and exit code 1, never a trace."""
    try:
        app()
    except (Refusal, RefusedDefinitionError) as refusal:
        _refuse(str(refusal))
    except Exception as error:
        root = environment().get("LAKE_ROOT") or ""
        # A job is tried again, and its log has all of it.
        if not root.startswith(("s3://", "s3a://")) or sys.argv[1:2] in _JOBS:
            raise
        from jobs.storage.bucket import cannot_be_used, reason_of

        if (reason := reason_of(error)) is None:
            raise
        _refuse(cannot_be_used(root, reason))


def _refuse(sentence: str) -> None:
    _say(sentence)
    sys.exit(1)


def _say(sentence: str) -> None:
    from jobs.lake.answers import visible_lines

    # A sentence may quote data or a query.
    errors.print("[red]tideline:[/red]", Text(visible_lines(sentence)), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
