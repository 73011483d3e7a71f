"""The watermark adviser: how late events come, how many the present delay drops, and the price of a longer delay.

It reads landed events with DuckDB, without Spark, and repeats the stream's rule. The events that arrive within one
trigger make a micro-batch. A micro-batch drops late events by a watermark, which follows the newest event time of all
micro-batches up to the second one before. Example: for the fifth micro-batch, it follows that of the first three.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import duckdb
from rich.table import Table
from rich.text import Text

from jobs.lake.pipeline_lake import PipelineLake
from jobs.pipelines.layout import HOUR_MS
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.window import WindowKind
from jobs.refusal import Refusal

QUANTILES = (0.5, 0.9, 0.99, 0.999, 0.9999, 1.0)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The measured lateness and the advice. Each share is the part of the events that count in all of their windows."""

    pipeline: str
    hours: float
    events: int
    wanted_share: float
    # Quantile -> how much older an event is than the newest event time that the stream had seen before; 0: not older.
    lateness_ms: Mapping[str, int]
    delay_seconds: int
    counted_share: float
    proposed_seconds: int
    proposed_share: float
    # How many more (or fewer) state rows the live job keeps with the proposed delay; None if no slice is final yet.
    more_rows: int | None
    sentence: str

    def to_json(self) -> str:
        """The advice as JSON, for programs."""
        return json.dumps(asdict(self))

    def table(self) -> Table:
        """The lateness as a table, for people."""
        table = Table(title=f"{self.pipeline}: lateness of {self.events:,} events")
        for name in ("share of events", "is late by at most"):
            table.add_column(Text(name), justify="right")
        for share, late in self.lateness_ms.items():
            table.add_row(f"{float(share):.2%}", f"{late / 1000:.3f} s")
        return table


def advise(lake: PipelineLake, trigger_ms: int, *, hours: float = 24, share: float = 0.999) -> Advice:
    """Look at the events of the newest hours, and propose the delay with which the wanted share would count."""
    pipeline = lake.pipeline
    if pipeline.window.kind is WindowKind.SESSION:
        raise Refusal(f"{pipeline.name!r} has session windows, which end with their events: no delay can be proposed")
    landed = lake.events()
    if landed is None:
        raise Refusal(f"{pipeline.source.events_table} does not exist yet: run `ingest` first")
    delay_ms = pipeline.watermark_delay_seconds * 1000
    with landed.newest(round(hours * HOUR_MS)) as database:
        database.execute("CREATE TEMP TABLE events AS SELECT time, arrival FROM accepted")
        database.execute(_needed(pipeline, trigger_ms))
        (events,) = _row(database, "SELECT count(*) FROM needed")
        if not events:
            raise Refusal(
                f"no event of {pipeline.source.name!r} was accepted in the newest {hours:g} hours: raise --hours"
            )
        shares = ", ".join(f"quantile_disc(lateness, {quantile})" for quantile in QUANTILES)
        lateness = _row(database, f"SELECT {shares} FROM needed")
        (needed,) = _row(database, f"SELECT quantile_disc(needed, {share}) FROM needed")
        proposed = max(0, needed // 1000 + 1)
        counted = "SELECT avg(CAST(needed < {} AS INTEGER)) FROM needed"
        (now_share,) = _row(database, counted.format(delay_ms))
        (then_share,) = _row(database, counted.format(proposed * 1000))
    rows = _more_rows(lake, proposed - pipeline.watermark_delay_seconds)
    return Advice(
        pipeline=pipeline.name,
        hours=hours,
        events=events,
        wanted_share=share,
        lateness_ms={str(quantile): late for quantile, late in zip(QUANTILES, lateness, strict=True)},
        delay_seconds=pipeline.watermark_delay_seconds,
        counted_share=now_share,
        proposed_seconds=proposed,
        proposed_share=then_share,
        more_rows=rows,
        sentence=_sentence(pipeline, share, now_share, proposed, rows),
    )


def _needed(pipeline: Pipeline, trigger_ms: int) -> str:
    """Each event with its lateness, and with the delay above which it counts in all of its windows.

    Its first window must end after the watermark, and its time may be ahead of its arrival by at most the delay.
    """
    window, delay_ms = pipeline.window, pipeline.watermark_delay_seconds * 1000
    first_end = (
        f"(time - {window.size_ms - window.slide_ms}) // {window.slide_ms} * {window.slide_ms} + {window.size_ms}"
    )
    return f"""CREATE TEMP TABLE needed AS
    WITH batches AS (
        SELECT arrival // {trigger_ms} AS batch, max(time) FILTER (time <= arrival + {delay_ms}) AS newest
        FROM events GROUP BY 1),
    known AS (
        SELECT batch, max(newest) OVER (
            ORDER BY batch ROWS BETWEEN UNBOUNDED PRECEDING AND 2 PRECEDING) AS seen
        FROM batches)
    SELECT greatest(0, coalesce(seen - time, 0)) AS lateness,
        greatest(coalesce(seen - ({first_end}), -1), time - arrival - 1) AS needed
    FROM events JOIN known ON known.batch = arrival // {trigger_ms}"""


def _row(database: duckdb.DuckDBPyConnection, sql: str) -> tuple[Any, ...]:
    return database.execute(sql).fetchall()[0]


def _more_rows(lake: PipelineLake, more_seconds: int) -> int | None:
    """Estimate the rows from the newest final slices: rows (windows and keys) per second, times the added seconds."""
    final = lake.final()
    newest = final.headers(final.days()[-2:]) if final else {}
    headers = [newest[name] for name in sorted(newest)[-100:]]
    if not headers:
        return None
    return round(sum(header.rows for header in headers) / len(headers) / lake.pipeline.slice_seconds * more_seconds)


def _sentence(pipeline: Pipeline, share: float, now_share: float, proposed: int, rows: int | None) -> str:
    delay = pipeline.watermark_delay_seconds
    held = f"With watermark_delay_seconds={delay} the stream would have counted {now_share:.4%} of the events in time"
    if proposed == delay:
        return f"{held}. No shorter delay reaches {share:.4%}: keep it."
    more, state = (
        abs(proposed - delay),
        f"about {abs(rows):,} rows" if rows is not None else "an unknown number of rows",
    )
    if proposed < delay:
        return (
            f"{held}. For {share:.4%} a delay of {proposed} s is enough: windows would stop changing {more} s earlier, "
            f"and the state would hold {state} less."
        )
    price = f"windows would stop changing {more} s later, and the state would hold {state} more"
    lateness = pipeline.allowed_lateness_seconds
    also = (
        f" Raise allowed_lateness_seconds={lateness} to {proposed}, too: slices are over later."
        if proposed > lateness
        else ""
    )
    return (
        f"{held}. For {share:.4%} a delay of {proposed} s is needed: {price}. Final rows are complete with both.{also}"
    )
