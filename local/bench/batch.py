"""The batch half of the benchmark: recompute beside DuckDB, recompute under a long history, publishes, and queries.

Everything is measured in one warm process, on made-up lakes (`local.bench.lake`) and with the broker of the settings.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from jobs import session
from jobs.broker.kafka import admin
from jobs.finality import auditing, planning, publishing, recompute
from jobs.finality.due import Request
from jobs.finality.run.folder import Plan, RunFolder
from jobs.lake.columns import checksum, columns_of
from jobs.lake.events import Landed
from jobs.lake.pipeline_lake import PipelineLake
from jobs.pipelines.layout import HOUR_MS
from jobs.pipelines.slices import NAME_FORMAT, Slice, over_at, slices_between
from jobs.refusal import Refusal
from jobs.settings import Settings
from jobs.storage.folders import Folder, remove
from jobs.storage.parquet import files_in
from local.bench.lake import PIPELINE, MadeLake, Stretch, events_schema, lake_beside, newest_hour
from local.bench.measurements import (
    HISTORY,
    OTHER_HOURS,
    PARTS,
    PUBLISH,
    READING,
    RECOMPUTE,
    RIVALS,
    SAME_HOUR,
    Batch,
    Restated,
    Rivalry,
    Sizes,
    seconds_of,
)
from local.bench.reading import publishes_of, readings_of
from local.steps import Tell

_OWN_MINUTE = 30
_MINUTE_MS = 60_000
_HISTORY_ROUNDS = 3


def run(settings: Settings, sizes: Sizes, only: Sequence[str], report: Tell) -> Batch:
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


def rivalries_of(settings: Settings, schema: pa.Schema, sizes: Sizes, report: Tell) -> tuple[Rivalry, ...]:
    """Compute all slices of an hour, by our recompute and by DuckDB in turns."""
    return tuple(_rivalry(settings, schema, events, sizes, report) for events in sizes.rival_events)


def _rivalry(settings: Settings, schema: pa.Schema, events: int, sizes: Sizes, report: Tell) -> Rivalry:
    hour = newest_hour()
    seconds: dict[str, list[float]] = {side: [] for side in RIVALS}
    with lake_beside(settings, f"rivals-{events}") as lake:
        report(f"recompute: making up {events:,} events")
        lake.land(schema, [Stretch(from_ms=hour, to_ms=hour + HOUR_MS, events=events, batches=sizes.own_hour_batches)])
        slices = slices_between(PIPELINE, hour, hour + HOUR_MS)
        for number in range(sizes.runs):
            plan, folder = _planned(lake, f"run-{number}", slices)
            theirs = lake.settings.lake_root / "theirs"
            sides = {
                "ours": partial(recompute.run, lake.tables, lake.settings, plan.run),
                "DuckDB": partial(by_duckdb, lake.tables, plan, theirs),
            }
            report(f"recompute: {events:,} events, {sizes.progress(number)}")
            for side in RIVALS if number % 2 == 0 else reversed(RIVALS):
                took = seconds_of(sides[side])
                seconds[side] += [took] if sizes.counts(number) else []
            windows = _same_windows(plan, folder.stages()[0], theirs)
            remove(theirs)
        return Rivalry(events=sum(work.events for work in plan.work), windows=windows, seconds=seconds)


def _over_ms(slices: Sequence[Slice]) -> int:
    """When the last of these slices is over."""
    return over_at(PIPELINE, max(slices))


def _planned(lake: MadeLake, run: str, slices: Sequence[Slice]) -> tuple[Plan, RunFolder]:
    """Plan a run of exactly these slices, at the moment when the last of them is over."""
    request = Request(slices=tuple(slices), reason="measured")
    with admin(lake.settings.kafka) as client:
        planner = planning.Planner(lake=lake.tables, client=client, clock=lambda: _over_ms(slices))
        planned = planner.plan(run, request)
    if len(planned.plan.work) != len(slices):
        raise Refusal(f"planned={len(planned.plan.work)} of slices={len(slices)}: refused={planned.survey.refused}")
    return planned.plan, RunFolder.of(lake.tables, run)


_SAME = """
COPY (
  SELECT strftime(time_bucket(INTERVAL {slice} SECONDS, window_start), '{name_format}') AS slice,
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


def by_duckdb(lake: PipelineLake, plan: Plan, folder: Folder) -> None:
    """The yardstick: make the same exact windows from the same files, with one statement on all cores.

    DuckDB divides decimals as DOUBLEs, so the mean (of values that are not negative) is rounded in whole numbers.
    """
    landed, slices = _events_of(lake, plan.events_version), plan.slices(PIPELINE)
    from_ms, to_ms = min(slices).start_ms, max(slices).end_ms
    files = [str(landed.path / file) for file in landed.files([(from_ms, to_ms)])]
    with duckdb.connect() as database:
        database.execute(f"SET TimeZone = 'UTC'; SET threads = {os.cpu_count()}")
        database.execute(
            _SAME.format(
                slice=PIPELINE.slice_seconds,
                name_format=NAME_FORMAT,
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


def _events_of(lake: PipelineLake, version: int | None = None) -> Landed:
    found = lake.events(version)
    if found is None:
        raise Refusal(f"there are no events in {lake.root}")
    return found


def _same_windows(plan: Plan, ours: Folder, theirs: Folder) -> int:
    """The number of windows. A race counts only if both sides made the same windows."""
    windows = 0
    for work in plan.work:
        sides = [_staged(folder / f"slice={work.slice}") for folder in (ours, theirs)]
        if len({checksum(PIPELINE, rows) for rows in sides}) > 1:
            raise Refusal(f"slice {work.slice}: our windows and DuckDB's are not the same: one of the two is wrong")
        windows += sides[0].count_rows()
    return windows


def _staged(folder: Folder) -> ds.Dataset:
    return ds.dataset(list(map(str, files_in(folder))), schema=columns_of(PIPELINE), format="parquet")


def restated_of(settings: Settings, schema: pa.Schema, sizes: Sizes, report: Tell) -> tuple[Restated, ...]:
    """Restate the same slice again and again, in turns in lakes that differ only in their history."""
    # A run takes a second, and a pause of the garbage collector takes a tenth of it. More rounds give a stable median.
    sizes = replace(sizes, rounds=sizes.rounds * _HISTORY_ROUNDS)
    hour = newest_hour()
    slice_ = slices_between(PIPELINE, hour, hour + HOUR_MS)[_OWN_MINUTE * _MINUTE_MS // (PIPELINE.slice_seconds * 1000)]
    with lake_beside(settings, "history") as place:
        cases: list[tuple[MadeLake, Restated]] = []
        for where in (OTHER_HOURS, SAME_HOUR):
            for multiple in sizes.multiples:
                report(f"history: making up a lake with {multiple} × the events in {where}")
                name = f"{where.replace(' ', '-')}-{multiple}"
                lake = replace(place, settings=replace(settings, lake_root=place.settings.lake_root / name))
                events = _make_history(lake, schema, sizes, where, multiple, slice_)
                files = len(_events_of(lake.tables).files([(0, slice_.end_ms + HOUR_MS)]))
                restated = Restated(where=where, multiple=multiple, events=events, files=files)
                cases.append((lake, restated))
        for number in range(sizes.runs):
            report(f"history: {sizes.progress(number)}")
            for lake, restated in cases:
                took = _restate(lake, slice_, f"run-{number}", sizes.slice_events)
                for part in PARTS if sizes.counts(number) else ():
                    restated.parts[part].append(took[part])
    return tuple(restated for _, restated in cases)


def _restate(made: MadeLake, slice_: Slice, run: str, events: int) -> dict[str, float]:
    """Do a whole run as Airflow does it, part after part. Return the seconds of each part."""
    lake, settings = made.tables, made.settings
    versions: dict[str, int] = {}
    parts: dict[str, Callable[[], object]] = {
        "plan": lambda: _planned(made, run, [slice_]),
        "recompute": lambda: recompute.run(lake, settings, run),
        "audit": lambda: auditing.examine(lake, run, now_ms=_over_ms([slice_])),
        "publish": lambda: versions.update(
            publishing.publish(lake, settings.kafka, run, now_ms=_over_ms([slice_])).versions
        ),
    }
    took = {name: seconds_of(part) for name, part in parts.items()}
    final = lake.final()
    header = final.header(slice_.name) if final else None
    if header is None or versions != {slice_.name: header.version} or abs(header.events / events - 1) > 0.01:
        raise Refusal(f"run {run!r}: published={versions} header={header}, expected events={events:,}")
    return took


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
