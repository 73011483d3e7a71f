"""`tideline query`."""

import os
import signal
import sys
from dataclasses import replace
from enum import StrEnum
from typing import Annotated

import typer

from jobs.cli.shared import say
from jobs.settings import QueryLimits, Settings


class QueryOutput(StrEnum):
    """How `query` prints its answer."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def query(
    sql: Annotated[str, typer.Argument(help='One SELECT, e.g. "select * from rolling_sum limit 5".')],
    output: Annotated[QueryOutput, typer.Option("--format", help="How to print the answer.")] = QueryOutput.TABLE,
    seconds: Annotated[
        int | None, typer.Option(min=1, help="How many seconds it may take; by default QUERY_SECONDS.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="The most rows it may return; by default QUERY_ROWS.")] = None,
) -> None:
    """Query the lake with SQL; docs/data.md describes its relations.

    They are PIPELINE, slices_PIPELINE, ledger_PIPELINE, drift_PIPELINE, balance_PIPELINE, events_SOURCE,
    quarantine_SOURCE and incidents.
    """
    from jobs.query import answers
    from jobs.query.lake import Lake

    # The query only reads, so nothing must be cleaned up. Ctrl-C then ends it at once, even within a long function.
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
    """End the process. Called from the watching thread, because the query's own thread may be stuck."""
    say(sentence)
    os._exit(1)
