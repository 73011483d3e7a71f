"""The batch half of the benchmark: recompute beside DuckDB, recompute under a long history, publishes, and queries.

Everything is measured in one warm process, on made-up lakes (`local.bench.lake`) and with the broker of the settings.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable

from jobs import session
from jobs.broker.kafka import admin
from jobs.finality import auditing, planning, publishing, recompute
from jobs.finality.due import Request
from jobs.finality.runs import Plan, RunFolder
from jobs.lake.checksums import checksum
from jobs.lake.columns import columns_of
from jobs.lake.delta.reading import files_with_sizes
from jobs.lake.events import Landed
from jobs.lake.final import FinalTable
from jobs.lake.final_topic import messages, send
from jobs.lake.publication import Publication
from jobs.pipelines.layout import HOUR_MS
from jobs.pipelines.slices import Slice, over_at, slices_between
from jobs.query.lake import Lake
from jobs.refusal import Refusal
from jobs.settings import Settings
from jobs.storage.folders import Folder, remove
from jobs.storage.parquet import files_in
from local.bench.lake import KEYS, PIPELINE, WINDOWS, MadeLake, Stretch, events_schema, stage_windows

RECOMPUTE, HISTORY, PUBLISH, READING = BATCH = ("recompute", "history", "publish", "reading")
RIVALS = ("ours", "DuckDB")
PARTS = ("plan", "recompute", "audit", "publish")
OTHER_HOURS, SAME_HOUR = "other hours", "the same hour"
GOAL_GROWTH = 1.2
GOAL_PUBLISH_SECONDS = 1.0
_OWN_MINUTE = 30
_MINUTE_MS = 60_000
# Live rows of a final slice stay for an hour. The newest slices have only live rows.
_SUPERSEDED_SLICES = 60
_OPEN_SLICES = 2
_ASKED = 10
_HISTORY_ROUNDS = 3

Report = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the measurements."""

    rival_events: tuple[int, ...] = (1_000_000, 10_000_000)
    slice_events: int = 100_000
    hour_events: int = 1_000_000
    multiples: tuple[int, ...] = (1, 10, 100)
    # With a commit every two seconds, as a real stream has, a hundred hours would take too long to make up. In the hour
    # of the measured slice there is a commit every ten seconds.
    hour_batches: int = 30
    own_hour_batches: int = 360
    publish_rows: tuple[int, ...] = (1_000, 100_000, 1_000_000)
    final_slices: int = 1_440
    read_slices: tuple[int, ...] = (1, 100, 1_000)
    warm_ups: int = 2
    rounds: int = 3

    @classmethod
    def of(cls, records: int, rounds: int) -> "Sizes":
        """Sizes that fit the number of records that each drain reads."""
        return cls(rival_events=(records, 10 * records), slice_events=records // 10, hour_events=records, rounds=rounds)

    @property
    def runs(self) -> int:
        """How often each measurement runs. The first runs only warm up."""
        return self.warm_ups + self.rounds

    def counts(self, number: int) -> bool:
        """Whether a run, counted from 0, is measured."""
        return number >= self.warm_ups

    def progress(self, number: int) -> str:
        """The progress in words, for people who wait."""
        return f"{number - self.warm_ups + 1} of {self.rounds}" if self.counts(number) else "warming up"


@dataclass(frozen=True, kw_only=True)
class Rivalry:
    """The seconds that each side took to make the same windows from the same files, round by round."""

    events: int
    windows: int
    seconds: Mapping[str, Sequence[float]]

    def per_second(self, side: str) -> float:
        """Events per second of the median round."""
        return self.events / median(self.seconds[side])

    @property
    def ratio(self) -> float:
        """Our events per second ÷ DuckDB's."""
        return self.per_second("ours") / self.per_second("DuckDB")


@dataclass(frozen=True, kw_only=True)
class Restated:
    """One slice restated under a history of ``multiple`` times the base; the seconds of each part, round by round."""

    where: str
    multiple: int
    events: int
    files: int
    parts: Mapping[str, Sequence[float]]

    @property
    def seconds(self) -> float:
        """The median duration of whole runs."""
        return median(map(sum, zip(*self.parts.values(), strict=True)))


@dataclass(frozen=True, kw_only=True)
class Publish:
    """The publish of a slice of ``rows`` windows: each commit, and the sending of all its messages to the topic."""

    rows: int
    commit_seconds: Sequence[float]
    send_seconds: float


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Queries over current windows, with ``slices`` final slices."""

    slices: int
    windows: int
    files: int
    first_seconds: float
    newest_seconds: Sequence[float]
    all_seconds: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The results of the batch half."""

    rivalries: tuple[Rivalry, ...] = ()
    restated: tuple[Restated, ...] = ()
    publishes: tuple[Publish, ...] = ()
    readings: tuple[Reading, ...] = ()


def run(settings: Settings, sizes: Sizes, only: Sequence[str], report: Report) -> Batch:
    """Measure, and remove the made-up lakes afterwards. Measurements that need Spark come last."""
    with _quiet():
        readings = readings_of(settings, sizes, report) if READING in only else ()
        publishes = publishes_of(settings, sizes, report) if PUBLISH in only else ()
        if not {RECOMPUTE, HISTORY} & set(only):
            return Batch(publishes=publishes, readings=readings)
        with session.opened(settings, "bench") as spark:
            schema = events_schema(spark)
            rivalries = rivalries_of(settings, schema, sizes, report) if RECOMPUTE in only else ()
            restated = restated_of(settings, schema, sizes, report) if HISTORY in only else ()
    return Batch(rivalries=rivalries, restated=restated, publishes=publishes, readings=readings)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the messages that jobs log for their task. Here they are of no interest."""
    log = logging.getLogger("jobs")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def _lake(settings: Settings, name: str) -> Iterator[MadeLake]:
    """Make an empty lake beside the others, and remove it afterwards."""
    root = settings.lake_root / name
    try:
        yield MadeLake.of(replace(settings, lake_root=root))
    finally:
        remove(root)


def _hour() -> int:
    """The begin of the newest hour of made-up events. The slices of this hour are over."""
    return int(time.time() * 1000) // HOUR_MS * HOUR_MS - 2 * HOUR_MS


def rivalries_of(settings: Settings, schema: pa.Schema, sizes: Sizes, report: Report) -> tuple[Rivalry, ...]:
    """Compute all slices of an hour, by our recompute and by DuckDB in turns."""
    return tuple(_rivalry(settings, schema, events, sizes, report) for events in sizes.rival_events)


def _rivalry(settings: Settings, schema: pa.Schema, events: int, sizes: Sizes, report: Report) -> Rivalry:
    hour = _hour()
    seconds: dict[str, list[float]] = {side: [] for side in RIVALS}
    with _lake(settings, f"rivals-{events}") as lake:
        report(f"recompute: {events:,} events are made up")
        lake.land(schema, [Stretch(from_ms=hour, to_ms=hour + HOUR_MS, events=events, batches=sizes.own_hour_batches)])
        slices = slices_between(PIPELINE, hour, hour + HOUR_MS)
        for number in range(sizes.runs):
            plan, folder = _planned(lake.settings, f"run-{number}", slices)
            theirs = lake.settings.lake_root / "theirs"
            sides = {
                "ours": partial(recompute.run, lake.settings, PIPELINE, plan.run),
                "DuckDB": partial(by_duckdb, lake.settings, plan, theirs),
            }
            report(f"recompute: {events:,} events, {sizes.progress(number)}")
            for side in RIVALS if number % 2 == 0 else reversed(RIVALS):
                took = _seconds(sides[side])
                seconds[side] += [took] if sizes.counts(number) else []
            windows = _same_windows(plan, folder.stages()[0], theirs)
            remove(theirs)
        return Rivalry(events=sum(work.events for work in plan.work), windows=windows, seconds=seconds)


def _over_ms(slices: Sequence[Slice]) -> int:
    """When the last of these slices is over."""
    return over_at(PIPELINE, max(slices))


def _planned(settings: Settings, run: str, slices: Sequence[Slice]) -> tuple[Plan, RunFolder]:
    """Plan a run of exactly these slices, at the moment when the last of them is over."""
    request = Request(slices=tuple(slices), reason="measured")
    with admin(settings.kafka) as client:
        planned = planning.make(settings.lake_root, client, PIPELINE, run, request, lambda: _over_ms(slices))
    if len(planned.plan.work) != len(slices):
        raise Refusal(f"of {len(slices)} slices {len(planned.plan.work)} were planned: {planned.survey.refused}")
    return planned.plan, RunFolder.of(settings.lake_root, PIPELINE, run)


_SAME = """
COPY (
  SELECT strftime(time_bucket(INTERVAL {slice} SECONDS, window_start), '%Y%m%dT%H%M%SZ') AS slice,
    window_start, window_start + INTERVAL {size} MILLISECONDS AS window_end, key,
    CAST(total AS DECIMAL(28,6)) AS total,
    CAST(CAST((20000 * units + events) // (2 * events) AS DECIMAL(28,0)) * CAST(0.0000000001 AS DECIMAL(10,10))
      AS DECIMAL(28,10)) AS mean,
    events, CAST(1 AS BIGINT) AS version, make_timestamptz({as_of_ms} * 1000) AS as_of, '{run}' AS run,
    '{fingerprint}' AS fingerprint
  FROM (
    SELECT time_bucket(INTERVAL {size} MILLISECONDS, event_time) AS window_start, key, sum(value) AS total,
      CAST(sum(value) * 1000000 AS HUGEINT) AS units, count(*) AS events
    FROM read_parquet({files})
    WHERE reason IS NULL AND event_time >= make_timestamptz({from_ms} * 1000)
      AND event_time < make_timestamptz({to_ms} * 1000)
    GROUP BY ALL
  )
  ORDER BY slice, window_start, key
) TO '{folder}' (FORMAT parquet, PARTITION_BY (slice))"""


def by_duckdb(settings: Settings, plan: Plan, folder: Folder) -> None:
    """The yardstick: make the same exact windows from the same files, with one statement on all cores.

    DuckDB divides decimals as DOUBLEs, so the mean (of values that are not negative) is rounded in whole numbers.
    """
    landed = Landed.at(settings.lake_root, PIPELINE.source, plan.events_version)
    slices = plan.slices(PIPELINE)
    if landed is None:
        raise Refusal(f"there are no events in {settings.lake_root}")
    from_ms, to_ms = min(slices).start_ms, max(slices).end_ms
    files = [str(landed.path / file) for file in landed.files([(from_ms, to_ms)])]
    with duckdb.connect() as database:
        database.execute(f"SET TimeZone = 'UTC'; SET threads = {os.cpu_count()}")
        database.execute(
            _SAME.format(
                slice=PIPELINE.slice_seconds,
                size=PIPELINE.window.size_ms,
                as_of_ms=plan.as_of_ms,
                run=plan.run,
                fingerprint=plan.fingerprint,
                files=files,
                from_ms=from_ms,
                to_ms=to_ms,
                folder=folder,
            )
        )


def _same_windows(plan: Plan, ours: Folder, theirs: Folder) -> int:
    """The number of windows. A race counts only if both sides made the same windows."""
    windows = 0
    for work in plan.work:
        sides = [_staged(folder / f"slice={work.slice}") for folder in (ours, theirs)]
        if len({checksum(PIPELINE, rows) for rows in sides}) > 1:
            raise Refusal(f"ours and DuckDB's windows of slice {work.slice} are not the same: one of the two is wrong")
        windows += sides[0].count_rows()
    return windows


def _staged(folder: Folder) -> ds.Dataset:
    return ds.dataset(list(map(str, files_in(folder))), schema=columns_of(PIPELINE), format="parquet")


def restated_of(settings: Settings, schema: pa.Schema, sizes: Sizes, report: Report) -> tuple[Restated, ...]:
    """Restate the same slice again and again, in turns in lakes that differ only in their history."""
    # A run takes a second, and a pause of the garbage collector takes a tenth of it. More rounds give a stable median.
    sizes = replace(sizes, rounds=sizes.rounds * _HISTORY_ROUNDS)
    hour = _hour()
    slice_ = slices_between(PIPELINE, hour, hour + HOUR_MS)[_OWN_MINUTE * _MINUTE_MS // (PIPELINE.slice_seconds * 1000)]
    found: list[Restated] = []
    with _lake(settings, "history") as place:
        cases = {}
        for where in (OTHER_HOURS, SAME_HOUR):
            for multiple in sizes.multiples:
                report(f"history: {multiple} × in {where} is made up")
                name = f"{where.replace(' ', '-')}-{multiple}"
                lake = replace(place, settings=replace(settings, lake_root=place.settings.lake_root / name))
                events = _make_history(lake, schema, sizes, where, multiple, slice_)
                cases[where, multiple] = _Case(lake=lake, events=events)
        for number in range(sizes.runs):
            report(f"history: {sizes.progress(number)}")
            for case in cases.values():
                case.restate(slice_, f"run-{number}", sizes.slice_events, counts=sizes.counts(number))
        for (where, multiple), case in cases.items():
            files = len(case.landed().files([(0, slice_.end_ms + HOUR_MS)]))
            found.append(Restated(where=where, multiple=multiple, events=case.events, files=files, parts=case.parts))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A lake with a history, and the seconds that the parts of its runs took."""

    lake: MadeLake
    events: int
    parts: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})

    def landed(self) -> Landed:
        found = Landed.at(self.lake.settings.lake_root, PIPELINE.source)
        if found is None:
            raise Refusal(f"there are no events in {self.lake.settings.lake_root}")
        return found

    def restate(self, slice_: Slice, run: str, events: int, *, counts: bool) -> None:
        """Do a whole run as Airflow does it, part after part."""
        settings = self.lake.settings
        versions: dict[str, int] = {}
        parts: dict[str, Callable[[], object]] = {
            "plan": lambda: _planned(settings, run, [slice_]),
            "recompute": lambda: recompute.run(settings, PIPELINE, run),
            "audit": lambda: auditing.examine(settings.lake_root, PIPELINE, run),
            "publish": lambda: versions.update(
                publishing.publish(settings, PIPELINE, run, now_ms=_over_ms([slice_])).versions
            ),
        }
        for name, part in parts.items():
            took = _seconds(part)
            self.parts[name] += [took] if counts else []
        final = FinalTable.read(settings.lake_root, PIPELINE)
        header = final.headers([slice_.name[:8]])[slice_.name] if final else None
        if header is None or versions != {slice_.name: header.version} or abs(header.events / events - 1) > 0.01:
            raise Refusal(f"run {run!r} published {versions}, where {events:,} events were to be made final: {header}")


def _make_history(lake: MadeLake, schema: pa.Schema, sizes: Sizes, where: str, multiple: int, slice_: Slice) -> int:
    """Make events of the slice and of its history, with all slices already final. Return the number of events."""
    stretches = list(_history(sizes, where, multiple, slice_))
    end = lake.land(schema, stretches)
    slices = slices_between(PIPELINE, stretches[0].from_ms, max(stretch.to_ms for stretch in stretches))
    lake.make_final(slices, keys=1, as_of_ms=slices[-1].end_ms + HOUR_MS, end=end)
    return end * lake.topic.partitions


def _history(sizes: Sizes, where: str, multiple: int, slice_: Slice) -> Iterator[Stretch]:
    """The stretches of a history, which is ``multiple`` times as long or as full as the base.

    Other hours: ``multiple`` hours of events, ending with the slice's hour. The same hour: ``multiple`` times the
    events of the slice, all in its hour.
    """
    hour = slice_.start_ms - slice_.start_ms % HOUR_MS
    if where == OTHER_HOURS:
        for start in range(hour - (multiple - 1) * HOUR_MS, hour, HOUR_MS):
            yield Stretch(from_ms=start, to_ms=start + HOUR_MS, events=sizes.hour_events, batches=sizes.hour_batches)
    own = sizes.hour_events if where == OTHER_HOURS else multiple * sizes.slice_events
    per_ms = (own - sizes.slice_events) / (HOUR_MS - (slice_.end_ms - slice_.start_ms))
    for from_ms, to_ms in ((hour, slice_.start_ms), (slice_.start_ms, slice_.end_ms), (slice_.end_ms, hour + HOUR_MS)):
        is_own = from_ms == slice_.start_ms
        events = sizes.slice_events if is_own else round(per_ms * (to_ms - from_ms))
        if events:
            batches = max((to_ms - from_ms) * sizes.own_hour_batches // HOUR_MS, 1)
            yield Stretch(from_ms=from_ms, to_ms=to_ms, events=events, batches=batches)


def publishes_of(settings: Settings, sizes: Sizes, report: Report) -> tuple[Publish, ...]:
    """Publish some slices again and again, in a table with a day of final slices."""
    end = _hour()
    slices = slices_between(PIPELINE, end - sizes.final_slices * PIPELINE.slice_seconds * 1000, end)
    with _lake(settings, "publish") as lake:
        report(f"publish: {len(slices):,} final slices are made up")
        lake.make_final(slices, keys=1, as_of_ms=slices[-1].end_ms + HOUR_MS)
        return tuple(
            _publish(lake, slice_, rows, sizes, report)
            for slice_, rows in zip(slices[-len(sizes.publish_rows) :], sizes.publish_rows, strict=True)
        )


def _publish(lake: MadeLake, slice_: Slice, rows: int, sizes: Sizes, report: Report) -> Publish:
    commits, keys, settings = [], max(rows // WINDOWS, 1), lake.settings
    for number in range(sizes.runs):
        report(f"publish: {rows:,} rows, {sizes.progress(number)}")
        header = lake.header(slice_, rows=keys * WINDOWS, as_of_ms=slice_.end_ms + HOUR_MS, version=number + 2)
        (staged,) = stage_windows(FinalTable.open(settings.lake_root, PIPELINE), [header], keys)
        # As a task does it from the start: open the table, read the day's headers and commit.
        began = time.monotonic()
        final = FinalTable.open(settings.lake_root, PIPELINE)
        final.require_version(final.headers([slice_.name[:8]])[slice_.name], header)
        final.publish([Publication(header=header, files=(staged,))])
        commits.append(time.monotonic() - began)
    report(f"publish: {rows:,} rows are sent to the topic")
    began = time.monotonic()
    sent = send(settings.kafka, PIPELINE.final_topic.name, messages(PIPELINE, header, final.rows(slice_.name)))
    if sent != keys * WINDOWS:
        raise Refusal(f"{sent} messages of {keys * WINDOWS} rows were sent")
    return Publish(rows=sent, commit_seconds=commits[sizes.warm_ups :], send_seconds=time.monotonic() - began)


def readings_of(settings: Settings, sizes: Sizes, report: Report) -> tuple[Reading, ...]:
    """Query the newest windows, and all windows, as `tideline query` and the console do."""
    return tuple(_reading(settings, count, report) for count in sizes.read_slices)


def _reading(settings: Settings, count: int, report: Report) -> Reading:
    length = PIPELINE.slice_seconds * 1000
    line = _hour()
    final = slices_between(PIPELINE, line - count * length, line)
    live = [*final[-_SUPERSEDED_SLICES:], *slices_between(PIPELINE, line, line + _OPEN_SLICES * length)]
    with _lake(settings, f"reading-{count}") as lake:
        report(f"reading: {count:,} final slices are made up")
        lake.make_final(final, keys=KEYS, as_of_ms=line + HOUR_MS)
        lake.show_live(live, as_of_ms=line + HOUR_MS)
        report(f"reading: {count:,} final slices")
        newest = f"SELECT * FROM {PIPELINE.name} WHERE window_start >= make_timestamptz({live[-1].start_ms * 1000})"
        everything = f"SELECT count(*) AS windows, sum(events) AS events FROM {PIPELINE.name}"
        began = time.monotonic()
        reader = Lake(lake.settings.lake_root)
        shown = reader.query(newest).num_rows
        first_seconds = time.monotonic() - began
        windows = reader.query(everything)["windows"][0].as_py()
        if (shown, windows) != (WINDOWS * KEYS, (count + _OPEN_SLICES) * WINDOWS * KEYS):
            raise Refusal(f"of {count} final slices {windows} windows are current, {shown} of them the newest")
        return Reading(
            slices=count,
            windows=windows,
            files=sum(_files(lake.settings.lake_root / path) for path in (PIPELINE.final_table, PIPELINE.live_table)),
            first_seconds=first_seconds,
            newest_seconds=[_seconds(lambda: reader.query(newest)) for _ in range(_ASKED)],
            all_seconds=[_seconds(lambda: reader.query(everything)) for _ in range(_ASKED)],
        )


def _files(path: Folder) -> int:
    return len(files_with_sizes(DeltaTable(str(path))))


def _seconds(do: Callable[[], object]) -> float:
    began = time.monotonic()
    do()
    return time.monotonic() - began
