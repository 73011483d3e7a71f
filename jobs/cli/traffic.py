"""`tideline generate`."""

import secrets
from typing import Annotated

import typer

from jobs.cli.shared import progress, stopped_by_signals
from jobs.settings import Settings
from jobs.times import parse_time

_Share = Annotated[float, typer.Option(min=0, max=1, help="A share of all records, e.g. 0.01.")]


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
    """Send made-up traffic to a source's topic: skewed keys, wandering values; late, repeated or broken on request.

    The same seed, count and start give the same records byte for byte; without --start only the times differ.
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
    with stopped_by_signals() as stop, progress(f"{source} →", count) as advance:
        sent = traffic.send(Settings.from_env().kafka, source, stream, rate=rate, stop=stop, progress=advance)
    per_second = sent.count / sent.seconds if sent.seconds else 0
    print(f"sent {sent.count:,} records to {source} in {sent.seconds:.1f} s ({per_second:,.0f}/s), seed {seed}")
