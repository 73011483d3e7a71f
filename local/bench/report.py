"""The results of a benchmark, for a terminal and for `docs/benchmarks.md`."""

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil
from rich.table import Table

from jobs.refusal import Refusal
from jobs.settings import PROJECT, Settings
from local.bench.batch_report import Section, listed, markdown_rows, met, sections, tables
from local.bench.freshness import Freshness
from local.bench.measurements import Batch
from local.bench.run import GOAL_P95_SECONDS, GOAL_RATIO, SIDES, Race, Results
from local.bench.scale import WORKERS, Scaled
from local.bench.year import report as bench_year_report
from local.bench.year.run import Year
from local.jars.java import find_java

PAGE = PROJECT / "docs" / "benchmarks.md"
_SCALE_BEGIN, _SCALE_END = "<!-- scale -->", "<!-- /scale -->"
_SCALE = """\
{begin}

| partitions | 1 worker, records/s | 2 workers, records/s | 2 ÷ 1 |
| ---: | ---: | ---: | ---: |
{rows}

`rolling_sum` drains {records} numbers on a standalone cluster, in a warm session. Each worker has one core. The median
of {rounds} drains counts. Broker, driver and workers share the machine: {machine}; {date}, commit {commit}, load
average {load}. [Growing](growing.md#what-limits-it-on-one-machine) explains what limits the rate.

{end}"""


def table(results: Results) -> Table:
    """The drains as a table for a terminal."""
    columns = ("workload", "records", "ours, records/s", "plain Spark, records/s", "ours ÷ plain")
    return Section(title="drains", columns=columns, rows=tuple(map(_row, results.races))).table()


def freshness_line(freshness: Freshness) -> str:
    """The time from produced to seen by a query, in one line."""
    return (
        f"freshness: p50 {freshness.p50_seconds:.2f} s, p95 {freshness.p95_seconds:.2f} s, "
        f"p99 {freshness.p99_seconds:.2f} s of {freshness.samples} events ({freshness.lost} not seen); "
        f"goal p95 ≤ {GOAL_P95_SECONDS:g} s: {met(freshness.p95_seconds <= GOAL_P95_SECONDS and not freshness.lost)}"
    )


def batch_tables(results: Results) -> list[Table]:
    """The results of the batch half, one table for each measurement."""
    return tables(results.batch or Batch())


def scale_table(scaled: Sequence[Scaled]) -> Table:
    """The throughput with more workers and partitions."""
    columns = ("partitions", *(f"{workers} × 1 core, records/s" for workers in WORKERS), "2 ÷ 1")
    return Section(title="scale", columns=columns, rows=_scale_rows(scaled)).table()


def _scale_rows(scaled: Sequence[Scaled]) -> tuple[tuple[str, ...], ...]:
    found = {(one.partitions, one.workers): one for one in scaled}
    rows: list[tuple[str, ...]] = []
    for partitions in sorted({one.partitions for one in scaled}):
        one, two = (found[partitions, workers].per_second for workers in WORKERS)
        rows.append((str(partitions), f"{one:,.0f}", f"{two:,.0f}", f"{two / one:.2f}"))
    return tuple(rows)


def write_scale(results: Results, settings: Settings, rounds: int, page: Path = PAGE) -> None:
    """Replace only the part of the page about scale."""
    _replace(page, _SCALE_BEGIN, _SCALE_END, _scale_part(results, settings, rounds))


def write_year(year: Year, results: Results, settings: Settings, page: Path = PAGE) -> None:
    """Replace only the part of the page about the year."""
    where = _YEAR_WHERE.format(**_where(results, settings))
    _replace(page, bench_year_report.BEGIN, bench_year_report.END, bench_year_report.part(year, where))


def _replace(page: Path, begin: str, end: str, part: str) -> None:
    text = page.read_text()
    found = _part(text, begin, end)
    if found is None:
        raise Refusal(f"{page} has no part between {begin} and {end}: run `make bench`, which writes the whole page")
    page.write_text(text.replace(found, part))


def _year_part(page: Path) -> str:
    """The part about the year, as the page has it now: a run without the year keeps it."""
    begin, end = bench_year_report.BEGIN, bench_year_report.END
    kept = _part(page.read_text(), begin, end) if page.exists() else None
    return kept or f"{begin}\n\nnot measured\n\n{end}"


def _part(text: str, begin: str, end: str) -> str | None:
    """The part of a page between two marks, with the marks."""
    found = re.search(f"{begin}.*?{end}", text, re.DOTALL)
    return found[0] if found else None


def _scale_part(results: Results, settings: Settings, rounds: int) -> str:
    if not results.scaled:
        return f"{_SCALE_BEGIN}\n\nnot measured\n\n{_SCALE_END}"
    facts = _where(results, settings)
    rows, records = markdown_rows(_scale_rows(results.scaled)), f"{results.scaled[0].records:,}"
    return _SCALE.format(begin=_SCALE_BEGIN, end=_SCALE_END, rows=rows, records=records, rounds=rounds, **facts)


def write(results: Results, settings: Settings, rounds: int, page: Path = PAGE) -> None:
    """Replace the page by these results."""
    drained = ((race.workload, side, listed(race.seconds[side])) for race in results.races for side in SIDES)
    text = _PAGE.format(
        **_where(results, settings),
        spark=f"{settings.spark_master}, {settings.driver_memory} of memory",
        rounds=rounds,
        drains=markdown_rows(map(_row, results.races)),
        each=markdown_rows(drained),
        ratio=GOAL_RATIO,
        freshness=freshness_line(results.freshness) if results.freshness else "not measured",
        batch="\n\n".join(section.markdown() for section in sections(results.batch or Batch())),
        scale=_scale_part(results, settings, rounds),
        year=_year_part(page),
    )
    page.write_text(text)


def _row(race: Race) -> tuple[str, ...]:
    ours, plain = (f"{race.per_second(side):,.0f}" for side in SIDES)
    return race.workload, f"{race.records:,}", ours, plain, f"{race.ratio:.2f} {met(race.ratio >= GOAL_RATIO)}"


def _where(results: Results, settings: Settings) -> dict[str, str]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB memory",
        "system": f"{platform.system()} {platform.release()}",
        "load": f"{results.load_before:.2f} before, {results.load_after:.2f} after",
        "versions": ", ".join(_versions(settings)),
        "commit": _commit(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    models = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in models if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _versions(settings: Settings) -> list[str]:
    pinned = (jar.stem.rpartition("-") for jar in sorted(settings.jars.glob("*/*.jar")))
    jars = [f"{name} {number}" for name, _, number in pinned if name.startswith(("delta-spark", "kafka_2"))]
    packages = [f"{name} {version(name)}" for name in ("pyspark", "deltalake", "duckdb", "kafka-python")]
    return [f"Python {platform.python_version()}", f"Java {find_java(os.environ).major}", *packages, *jars]


def _commit() -> str:
    ran = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    return ran.stdout.strip() or "unknown"


_YEAR_WHERE = "On {machine}; {date}, commit {commit}, load average {load}."

_PAGE = """\
# Benchmarks

This page is written by `make bench`. Do not edit it.

## Drains

Our jobs and plain Spark jobs drain the same new records from one broker, in turns, each in a warm session. The median
of {rounds} drains counts. A drain begins when the job is told to start, and ends when every record is committed.

| workload | records per drain | ours, records/s | plain Spark, records/s | ours ÷ plain (goal ≥ {ratio}) |
|---|---:|---:|---:|---:|
{drains}

| workload | side | seconds of each drain |
|---|---|---|
{each}

`ingest` reads `numbers` and `lines`, `rolling_sum` reads `numbers`, and `word_count` reads `lines`. *Ours* is the job
as it is shipped, with all its parts: strict parsing, [quarantine](glossary.md), the lease, the start checks, offsets
and watermark in each commit, the output topic. *Plain* (`local/bench/plain.py`) is a tuned Spark job without these
parts. It parses with `from_json`, aggregates, appends to Delta and sends the same rows to a topic. Both use the same
fetch sizes, two shuffle partitions, RocksDB state with changelog checkpoints and the parallel garbage collector. Two
things differ. Ours writes files without starting a process for each file (docs/decisions/0005), and sends batches of
256 KiB to the topic instead of 16. After the last drain the tables of both sides are compared: both must have counted
every record.

## More workers, more partitions

{scale}

## Freshness

{freshness}

`rolling_sum` reads 1,000 numbers per second. About four times a second, at random moments, one more event is sent, each
in a series of its own. A warm process repeats a query until it returns the event. The sender, the stream, the broker
and the process that queries share the machine.

{batch}

## A simulated year

{year}

## Machine and versions

| | |
|---|---|
| date | {date} |
| machine | {machine} |
| system | {system} |
| load average (1 minute) | {load} |
| versions | {versions} |
| commit | {commit} |
| Spark | {spark} |

## Repeat it

`make bench` takes about half an hour on a quiet machine, and writes this page. A quick look is
`tideline bench --records 50000 --only rolling_sum`. It prints its results, and does not change this page. `--only`
takes `ingest`, `rolling_sum`, `word_count`, `freshness`, `scale`, `recompute`, `history`, `publish`, `reading` or
`year`. `scale` alone and `year` alone replace their part of this page. `year` takes an hour or longer, and is no part
of `make bench`: `tideline bench --only year`. `make soak` shows how the whole platform runs over a longer time.
"""
