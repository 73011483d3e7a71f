"""The results of a simulated year: the same rows for a terminal and for `docs/benchmarks.md`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.table import Table

from local.bench.batch_report import Section, met
from local.bench.year.files import Files, Usage
from local.bench.year.reader_process import NEWEST, PAGE, PLAN, QUERY
from local.bench.year.run import DAYS, Looked, Point, Year
from local.bench.year.writers import EVENTS_OF_A_SLICE

GOAL_GROWTH = 1.5
BASE_DAY = 30
BEGIN, END = "<!-- year -->", "<!-- /year -->"
_MIB = 2**20
_PARTS = ("final", "ledger", "live", "events", "drift", "balance", "control", "log", "other")


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A value that must not grow: at the end, and at the day that the end is compared with."""

    what: str
    base: float
    end: float

    @property
    def ratio(self) -> float:
        """The growth: the value at the end ÷ the base."""
        return self.end / self.base

    @property
    def is_met(self) -> bool:
        """Whether this factor meets the goal."""
        return self.ratio <= GOAL_GROWTH


def judged(year: Year) -> list[Judged]:
    """All values that the goal is about; empty if there is only one point."""
    if len(year.points) < 2:
        return []
    base, end = base_of(year), year.points[-1]
    return [Judged(what=what, base=_SHOWN[what](base), end=_SHOWN[what](end)) for what in _JUDGED]


def base_of(year: Year) -> Point:
    """The day that the end is compared with: the 30th, or the first point if the run is shorter."""
    end = year.points[-1].day
    return next((point for point in year.points if point.day == BASE_DAY < end), year.points[0])


def is_bounded(files: Files) -> bool:
    """Whether every replaced file was deleted after its retention, and no file of a table is missing."""
    return not files.too_many and not files.missing


def sections(year: Year) -> list[Section]:
    """One section about the waits of readers, and one about the disk."""
    days = tuple(f"day {point.day}" for point in year.points)
    return [
        Section(title="A year: how long readers wait", columns=("", *days, *_ends(year)), rows=_looks(year)),
        Section(title="A year: use of the disk", columns=("", *days), rows=_disk(year)),
    ]


def _ends(year: Year) -> tuple[str, ...]:
    if len(year.points) < 2:
        return ()
    return (f"day {year.points[-1].day} ÷ day {base_of(year).day} (goal ≤ {GOAL_GROWTH:g})",)


def tables(year: Year) -> list[Table]:
    """The sections as tables for a terminal."""
    return [section.table() for section in sections(year)]


def part(year: Year, where: str) -> str:
    """The part of the page about the year."""
    drawn = [section.markdown().partition("\n\n")[2].rstrip() for section in sections(year)]
    return "\n\n".join([BEGIN, *drawn, _text(year), where, END])


def _looks(year: Year) -> tuple[tuple[str, ...], ...]:
    ratios = {each.what: f"{each.ratio:.2f} {met(each.is_met)}" for each in judged(year)}
    shown: dict[str, Callable[[Point], str]] = {"slices": lambda point: f"{point.slices:,}"}
    shown |= {what: _decimals(value, what) for what, value in _SHOWN.items()}
    return tuple(
        (what, *(value(point) for point in year.points), *([ratios.get(what, "")] if ratios else []))
        for what, value in shown.items()
    )


def _disk(year: Year) -> tuple[tuple[str, ...], ...]:
    rows = [_row("files", year, lambda point: f"{_all(point).files:,}")]
    rows.append(_row("MiB", year, lambda point: f"{_all(point).bytes / _MIB:,.1f}"))
    rows.append(_row("inodes", year, lambda point: f"{_all(point).inodes:,}"))
    rows += [_row(f"files, `{name}`", year, _files_of(name)) for name in _PARTS if _is_there(year, name)]
    rows.append(_row("newest checkpoint of `final`, MiB", year, lambda point: f"{point.checkpoint_bytes / _MIB:,.2f}"))
    rows.append(_row("files with rows that tables refer to", year, lambda point: f"{point.files.referred:,}"))
    rows.append(_row("replaced files that are still kept", year, lambda point: f"{point.files.replaced:,}"))
    rows.append(_row("too many (goal 0)", year, _too_many))
    rows.append(_row("commits since the first day", year, lambda point: f"{point.files.commits:,}"))
    rows.append(_row("seconds to write these days", year, lambda point: f"{point.seconds:,.0f}"))
    return tuple(rows)


def _row(what: str, year: Year, shown: Callable[[Point], str]) -> tuple[str, ...]:
    return what, *(shown(point) for point in year.points)


def _is_there(year: Year, name: str) -> bool:
    return any(name in point.usage for point in year.points)


def _files_of(name: str) -> Callable[[Point], str]:
    return lambda point: f"{point.usage.get(name, Usage()).files:,}"


def _too_many(point: Point) -> str:
    lost = f", {point.files.missing:,} missing" if point.files.missing else ""
    return f"{point.files.too_many:,}{lost} {met(is_bounded(point.files))}"


def _all(point: Point) -> Usage:
    return sum(point.usage.values(), Usage())


def _decimals(value: Callable[[Point], float], what: str) -> Callable[[Point], str]:
    return lambda point: f"{value(point):,.3f}" if what.endswith(", s") else f"{value(point):,.0f}"


def _seconds_of(kind: str) -> Callable[[Point], float]:
    return lambda point: point.looks[kind].seconds


def _mebibytes_of(kind: str, part: Callable[[Looked], int]) -> Callable[[Point], float]:
    return lambda point: part(point.looks[kind]) / _MIB


_SHOWN: dict[str, Callable[[Point], float]] = {
    "plan, s": _seconds_of(PLAN),
    "memory of the plan's process, MiB": _mebibytes_of(PLAN, lambda looked: looked.peak_bytes),
    "of this, taken by the plan itself, MiB": _mebibytes_of(PLAN, lambda looked: looked.own_bytes),
    "slices page, s": _seconds_of(PAGE),
    "memory of the page's process, MiB": _mebibytes_of(PAGE, lambda looked: looked.peak_bytes),
    "newest slice, s": _seconds_of(NEWEST),
    "first query of README, s": _seconds_of(QUERY),
    "memory of the query's process, MiB": _mebibytes_of(QUERY, lambda looked: looked.peak_bytes),
}
# The goal is about these.
_JUDGED = ("plan, s", "memory of the plan's process, MiB", "slices page, s", "newest slice, s")


def verdict(year: Year) -> str:
    """The verdict in one line, for a terminal."""
    grown = [each.what for each in judged(year) if not each.is_met]
    unbounded = [f"files at day {point.day}" for point in year.points if not is_bounded(point.files)]
    wrong: Iterable[str] = [*grown, *unbounded]
    return f"a year: {'; '.join(wrong) + ' ' if wrong else ''}{met(not wrong)}"


def _text(year: Year) -> str:
    return _TEXT.format(
        names=", ".join(f"`{name}`" for name in year.pipelines),
        days=year.points[-1].day,
        rounds=year.rounds,
        events=EVENTS_OF_A_SLICE,
        one=f"{year.cadence.one_by_one_minutes:,} minutes",
        hourly=f"{year.cadence.hourly_minutes / 60:g} hours",
        hour=year.cadence.hour,
        far=year.cadence.far,
    )


def is_whole(year: Year) -> bool:
    """Whether it is a full year, as on the page."""
    return year.points[-1].day == DAYS


_TEXT = """\
{days} days of 1-minute slices of {names} are simulated. The product's own writers make the commits: `final`,
`ledger`, `drift` and `balance`, the live tables, `events`, run folders, incidents. The product's own upkeep merges,
folds and deletes. A slice has {events} events and one window. No process writes during a measurement. Each measurement
is made in a new process, and does not count the time to load code. A value is the median of {rounds}, for the slowest
pipeline. *Plan* is the plan of a run when one slice is due. *Slices page* is the page of the console. *Newest slice* is
a query for the windows of the newest final slice. Memory is the highest memory that the process has had.

**What is scaled.** In the last {one} before each point, the commits are those of the platform: a run and its folder for
each slice, with a commit of the final table and five of the ledger, and an account every 15 minutes. In the {hourly}
before a point {hour} slices share such commits, and at other times {far}. So the log of the final table, which is kept
for 30 days, has fewer and longer entries than a real one. With a commit a minute it has 43,200 entries and 864
checkpoints on any day after the 30th. A reader takes some 50 ms more to list them, at day 30 as at day 365. Streams
commit once for each slice or such a step, and not every second or two. That is 30 to 60 times less often, and even less
often far from a point. Only the newest slice of a step gets live rows. A stream merges and removes at every 60th
commit, so this happens later than on a real platform. The work of the DAG `upkeep` is done each day in the {hourly}
before a point, and every 30th day at other times.

**What is replaced.** `time.time`, `datetime.now` and the change times of files show the simulated time to the product.
Nothing is fsynced. The Delta library reads the machine's clock. So the two retentions of each table are set longer, by
the difference of the two clocks. This takes one more commit for each simulated hour, or for each step. No records are
sent to topics: a topic is only asked for its ends. Pages of audits, checkpoints, task logs and Airflow's database are
not simulated.

**Files.** The benchmark itself reads every log entry. *Too many* counts files in the folders of partitions to which no
table refers, and which should be deleted by now. These were replaced longer ago than the table's retention and the
interval in which its writer deletes, together. The interval is a day for `final`, `drift` and `balance`, and three
hours for the others. Files of a table that are missing on the disk are reported, too."""
