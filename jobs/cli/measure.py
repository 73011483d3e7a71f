"""`tideline bench` and `tideline soak`."""

import signal
from typing import Annotated

import typer
from rich.console import Console

from jobs.cli.shared import console_for_tables, steps
from jobs.settings import Settings


def bench(
    records: Annotated[int, typer.Option(min=1_000, help="How many records each measurement reads.")] = 1_000_000,
    rounds: Annotated[
        int, typer.Option(min=1, help="How often each measurement is repeated; the median is reported.")
    ] = 3,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="What to measure; may be repeated: ingest, rolling_sum, word_count, freshness, scale, recompute, "
            "history, publish, reading or year. year takes an hour or longer, and is measured only if it is named."
        ),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="With --only year: how many days are simulated.")] = 365,
) -> None:
    """Measure freshness, and compare the jobs with plain Spark and DuckDB.

    A run without options writes docs/benchmarks.md.
    """
    from local.bench import report as bench_report
    from local.bench import run as measure
    from local.bench.year import report as bench_year_report

    # SIGTERM does the same as Ctrl-C, so that brokers and sessions end with this process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = Settings.from_env()
    wanted = tuple(only or measure.EVERYTHING)
    with steps("bench") as step:
        results = measure.run(settings, records=records, rounds=rounds, only=wanted, report=step, days=days)
    if results.races:
        Console().print(bench_report.table(results))
    if results.freshness:
        print(bench_report.freshness_line(results.freshness))
    if results.scaled:
        Console().print(bench_report.scale_table(results.scaled))
    for table in bench_report.batch_tables(results):
        console_for_tables().print(table)
    for table in bench_year_report.tables(results.year) if results.year else ():
        console_for_tables().print(table)
    if results.year:
        print(bench_year_report.verdict(results.year))
    if not only and records >= measure.WHOLE_RECORDS:
        bench_report.write(results, settings, rounds)
        print(f"written: {bench_report.PAGE}")
    elif wanted == (measure.SCALE,) and records >= measure.WHOLE_RECORDS:
        bench_report.write_scale(results, settings, rounds)
        print(f"written: the part about scale in {bench_report.PAGE}")
    elif results.year and bench_year_report.is_whole(results.year):
        bench_report.write_year(results.year, results, settings)
        print(f"written: the part about the year in {bench_report.PAGE}")


def soak(
    minutes: Annotated[int, typer.Option(min=2, help="How many minutes to measure, once everything runs.")] = 20,
    quota: Annotated[
        int | None, typer.Option(min=50, help="Limit the disk of the lake to so many megabytes; needs root.")
    ] = None,
) -> None:
    """Run three pipelines with recompute on a separate platform; exit code 1 if a goal is missed."""
    from local.soak import report as soak_report
    from local.soak import run as watch

    # SIGTERM does the same as Ctrl-C, so that the platform ends with this process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with steps("soak") as step:
        soaked = watch.run(minutes, step, quota)
    for table in soak_report.tables(soaked):
        console_for_tables().print(table)
    print("\n".join(soak_report.verdict(soaked)))
    if soaked.unmet():
        raise typer.Exit(1)
