"""`tideline generate`."""

import secrets
from typing import Annotated

import typer

from jobs.cli.shared import progress
from jobs.settings import Settings
from jobs.signals import stop_on_signal
from jobs.times import parse_time

_Late = Annotated[float, typer.Option(min=0, max=1, help="Share of records that are late, e.g. 0.01.")]
_Duplicate = Annotated[float, typer.Option(min=0, max=1, help="Share of records that repeat an earlier one.")]
_Corrupt = Annotated[float, typer.Option(min=0, max=1, help="Share of records that cannot be parsed.")]


def generate(
    source: Annotated[str, typer.Argument(help="The source: numbers, lines, clicks, orders, …")],
    rate: Annotated[float, typer.Option(min=0, help="Records per second; 0: as fast as possible.")] = 1000,
    count: Annotated[int | None, typer.Option(min=0, help="How many records; without it, until stopped.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same records; random by default.")] = None,
    late: _Late = 0.0,
    duplicate: _Duplicate = 0.0,
    corrupt: _Corrupt = 0.0,
    keys: Annotated[int, typer.Option(min=1, help="How many series, users, customers or devices.")] = 100,
    start: Annotated[str | None, typer.Option(help="First event time, ISO 8601; without it events happen now.")] = None,
    step_ms: Annotated[int, typer.Option(min=1, help="With --start: milliseconds between two records.")] = 1,
) -> None:
    """Send made-up records to a source's topic; options make some of them late, repeated or broken.

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
    with stop_on_signal(once=True) as stop, progress(f"{source} →", count) as advance:
        sent = traffic.send(Settings.from_env().kafka, source, stream, rate=rate, stop=stop, progress=advance)
    per_second = sent.count / sent.seconds if sent.seconds else 0
    print(f"sent {sent.count:,} records to {source} in {sent.seconds:.1f} s ({per_second:,.0f}/s), seed {seed}")
