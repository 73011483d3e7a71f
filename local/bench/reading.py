"""How long a publish takes, by the number of its rows, and how long queries take, by the number of final slices."""

import time

from deltalake import DeltaTable

from jobs.lake.delta.reading import files_with_sizes
from jobs.lake.final_topic import messages, send
from jobs.lake.publication import Publication
from jobs.pipelines.layout import HOUR_MS
from jobs.pipelines.slices import Slice, slices_between
from jobs.query.lake import Lake
from jobs.refusal import Refusal
from jobs.settings import Settings
from jobs.storage.folders import Folder
from local.bench.lake import KEYS, PIPELINE, WINDOWS, MadeLake, lake_beside, newest_hour, stage_windows
from local.bench.measurements import Publish, Reading, Sizes, seconds_of
from local.steps import Tell

# Live rows of a final slice stay for an hour. The newest slices have only live rows.
_SUPERSEDED_SLICES = 60
_OPEN_SLICES = 2
_ASKED = 10


def publishes_of(settings: Settings, sizes: Sizes, report: Tell) -> tuple[Publish, ...]:
    """Publish some slices again and again, in a table with a day of final slices."""
    end = newest_hour()
    slices = slices_between(PIPELINE, end - sizes.final_slices * PIPELINE.slice_seconds * 1000, end)
    with lake_beside(settings, "publish") as lake:
        report(f"publish: making up {len(slices):,} final slices")
        lake.make_final(slices, keys=1, as_of_ms=slices[-1].end_ms + HOUR_MS)
        return tuple(
            _publish(lake, slice_, rows, sizes, report)
            for slice_, rows in zip(slices[-len(sizes.publish_rows) :], sizes.publish_rows, strict=True)
        )


def _publish(lake: MadeLake, slice_: Slice, rows: int, sizes: Sizes, report: Tell) -> Publish:
    commits, keys, settings = [], max(rows // WINDOWS, 1), lake.settings
    for number in range(sizes.runs):
        report(f"publish: {rows:,} rows, {sizes.progress(number)}")
        header = lake.header(slice_, rows=keys * WINDOWS, as_of_ms=slice_.end_ms + HOUR_MS, version=number + 2)
        (staged,) = stage_windows(lake.tables.open_final(), [header], keys)
        # As a task does it from the start: open the table, read the day's headers and commit.
        began = time.monotonic()
        final = lake.tables.open_final()
        final.require_version(final.header(slice_.name), header)
        final.publish([Publication(header=header, files=(staged,))])
        commits.append(time.monotonic() - began)
    report(f"publish: sending {rows:,} rows to the topic")
    began = time.monotonic()
    sent = send(settings.kafka, PIPELINE.final_topic.name, messages(PIPELINE, header, final.rows(slice_.name)))
    if sent != keys * WINDOWS:
        raise Refusal(f"sent messages={sent} for rows={keys * WINDOWS}: the two must be equal")
    return Publish(rows=sent, commit_seconds=commits[sizes.warm_ups :], send_seconds=time.monotonic() - began)


def readings_of(settings: Settings, sizes: Sizes, report: Tell) -> tuple[Reading, ...]:
    """Query the newest windows, and all windows, as `tideline query` and the console do."""
    return tuple(_reading(settings, count, report) for count in sizes.read_slices)


def _reading(settings: Settings, count: int, report: Tell) -> Reading:
    length = PIPELINE.slice_seconds * 1000
    line = newest_hour()
    final = slices_between(PIPELINE, line - count * length, line)
    live = [*final[-_SUPERSEDED_SLICES:], *slices_between(PIPELINE, line, line + _OPEN_SLICES * length)]
    with lake_beside(settings, f"reading-{count}") as lake:
        report(f"reading: making up {count:,} final slices")
        lake.make_final(final, keys=KEYS, as_of_ms=line + HOUR_MS)
        lake.show_live(live, as_of_ms=line + HOUR_MS)
        report(f"reading: querying {count:,} final slices")
        newest = f"SELECT * FROM {PIPELINE.name} WHERE window_start >= make_timestamptz({live[-1].start_ms * 1000})"
        everything = f"SELECT count(*) AS windows, sum(events) AS events FROM {PIPELINE.name}"
        began = time.monotonic()
        reader = Lake(lake.settings.lake_root)
        shown = reader.query(newest).num_rows
        first_seconds = time.monotonic() - began
        windows = reader.query(everything)["windows"][0].as_py()
        if (shown, windows) != (WINDOWS * KEYS, (count + _OPEN_SLICES) * WINDOWS * KEYS):
            raise Refusal(
                f"unexpected answer: final slices={count}, current windows={windows}, of the newest slice={shown}"
            )
        return Reading(
            slices=count,
            windows=windows,
            files=sum(_files(lake.settings.lake_root / path) for path in (PIPELINE.final_table, PIPELINE.live_table)),
            first_seconds=first_seconds,
            newest_seconds=[seconds_of(lambda: reader.query(newest)) for _ in range(_ASKED)],
            all_seconds=[seconds_of(lambda: reader.query(everything)) for _ in range(_ASKED)],
        )


def _files(path: Folder) -> int:
    return len(files_with_sizes(DeltaTable(str(path))))
