"""The results of the batch half: the same rows for a terminal and for `docs/benchmarks.md`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from local.bench.measurements import (
    GOAL_GROWTH,
    GOAL_PUBLISH_SECONDS,
    RIVALS,
    Batch,
    Publish,
    Reading,
    Restated,
    Rivalry,
)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table, and the text that explains it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text: str = ""

    def markdown(self) -> str:
        """The section as Markdown, for the page."""
        if not self.rows:
            return f"## {self.title}\n\nnot measured\n\n{self.text}"
        drawn = markdown_rows([self.columns, ("---", *("---:",) * (len(self.columns) - 1)), *self.rows])
        return f"## {self.title}\n\n{drawn}\n\n{self.text}"

    def table(self) -> Table:
        """The section as a table for a terminal."""
        shown = Table(*self.columns, title=self.title)
        for row in self.rows:
            shown.add_row(*row)
        return shown


def sections(batch: Batch) -> list[Section]:
    """A section for each measurement, also for those that were not made."""
    return [
        Section(
            title="Recompute beside DuckDB",
            columns=("events", "windows", *(f"{side}, events/s" for side in RIVALS), "ours ÷ DuckDB", "seconds"),
            rows=tuple(map(_rivalry, batch.rivalries)),
            text=_RIVALS,
        ),
        Section(
            title="History",
            columns=(
                *("history in", "×", "events", "files", "plan, s", "recompute, s", "audit, s", "publish, s"),
                *("run, s", f"run ÷ run at 1 × (goal ≤ {GOAL_GROWTH:g})"),
            ),
            rows=tuple(_restated(restated, _base(batch.restated, restated)) for restated in batch.restated),
            text=_HISTORY,
        ),
        Section(
            title="Publish",
            columns=(
                *("window rows", f"commit, s (goal ≤ {GOAL_PUBLISH_SECONDS:g})", "slowest, s"),
                *("topic, s", "messages/s"),
            ),
            rows=tuple(map(_publish, batch.publishes)),
            text=_PUBLISH,
        ),
        Section(
            title="Reading current windows",
            columns=("final slices", "windows", "files", "first answer, ms", "newest slice, ms", "all windows, ms"),
            rows=tuple(map(_reading, batch.readings)),
            text=_READING,
        ),
    ]


def tables(batch: Batch) -> list[Table]:
    """The tables of the measurements that were made."""
    return [section.table() for section in sections(batch) if section.rows]


def markdown_rows(rows: Iterable[Sequence[str]]) -> str:
    """The rows of a table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def met(is_met: bool) -> str:
    """Whether a goal is met, in a word."""
    return "(met)" if is_met else "(missed)"


def _rivalry(rivalry: Rivalry) -> tuple[str, ...]:
    seconds = "; ".join(f"{side} {listed(rivalry.seconds[side])}" for side in RIVALS)
    speeds = (f"{rivalry.per_second(side):,.0f}" for side in RIVALS)
    return f"{rivalry.events:,}", f"{rivalry.windows:,}", *speeds, f"{rivalry.ratio:.2f}", seconds


def _base(all_: Iterable[Restated], of: Restated) -> Restated:
    """The base of a comparison: the run with the shortest history in the same place."""
    return min((other for other in all_ if other.where == of.where), key=lambda other: other.multiple)


def _restated(restated: Restated, base: Restated) -> tuple[str, ...]:
    growth = restated.seconds / base.seconds
    compared = f"{growth:.2f} {met(growth <= GOAL_GROWTH)}" if restated is not base else "1.00"
    parts = (f"{median(seconds):.2f}" for seconds in restated.parts.values())
    counts = (f"{restated.multiple}", f"{restated.events:,}", f"{restated.files:,}")
    return restated.where, *counts, *parts, f"{restated.seconds:.2f}", compared


def _publish(publish: Publish) -> tuple[str, ...]:
    slowest = max(publish.commit_seconds)
    commit = f"{median(publish.commit_seconds):.3f} {met(slowest <= GOAL_PUBLISH_SECONDS)}"
    per_second = f"{publish.rows / publish.send_seconds:,.0f}"
    return f"{publish.rows:,}", commit, f"{slowest:.3f}", f"{publish.send_seconds:.2f}", per_second


def _reading(reading: Reading) -> tuple[str, ...]:
    asked = (f"{median(seconds) * 1000:,.0f}" for seconds in (reading.newest_seconds, reading.all_seconds))
    counts = (f"{reading.slices:,}", f"{reading.windows:,}", f"{reading.files:,}")
    return *counts, f"{reading.first_seconds * 1000:,.0f}", *asked


def listed(seconds: Sequence[float]) -> str:
    """The seconds of each round, in a cell of a table."""
    return ", ".join(f"{took:.2f}" for took in seconds)


_RIVALS = """\
An hour of numbers has 60 slices of `rolling_sum`. The Spark job of `recompute`, in a warm session, and one DuckDB
statement on all cores compute them in turns. Both read the same files of `events`, and write one file of sorted rows
for each slice. Their checksums are compared after every round. Ours also counts the events of each slice, for the
audit."""
_HISTORY = """\
Whole runs (`plan`, `recompute`, `audit`, `publish`) in a warm process make one slice of a minute final again and again.
They take turns in lakes that differ only in their history; the median run counts. *Other hours*: with 1 × the lake has
only the slice's own hour, with 10 × it has ten such hours. *The same hour*: with 1 × the lake has only the slice, with
10 × its hour has ten times the events of the slice. All other slices are final. Events were written in micro-batches,
and their files were merged as `ingest` merges them. The column *files* counts all files in the table. A run reads only
the few files that can hold events of its slice."""
_PUBLISH = """\
On a day on which every slice is final, one slice is published again. *Commit* is the time that readers wait: from
opening the table to the one commit that replaces rows and headers. *Topic* is the time until the broker has all
messages of the slice. They are sent after the commit, and readers of the table do not wait for them."""
_READING = """\
A final slice has 6,000 windows of 100 series. The lake also has live rows: those of the last hour, which are superseded
and not pruned yet, and those of two slices that are still live. *First answer* is a query for the newest slice, in a
new process that has DuckDB loaded. The last two columns are the median of ten queries in a warm process: for the newest
slice, and a count over all windows."""
