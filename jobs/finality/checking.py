"""The check of a pipeline's served rows: live windows, their freshness, and final slices against their headers."""

import time
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from jobs.control.incident import served_key
from jobs.finality.run.folder import KEPT_SECONDS, name_of
from jobs.lake.columns import checksum, columns_of
from jobs.lake.final import FinalTable
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.slices import Header
from jobs.pipelines.layout import BATCHES_SLICE, PAGES
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.relations import table_name
from jobs.pipelines.slices import Slice, day_of_slice, slice_at
from jobs.quality import page
from jobs.quality.audit import SMALL_ROWS, check_served
from jobs.quality.verdict import Verdict
from jobs.query.lake import Lake, NotThereError
from jobs.storage.folders import Folder

# How far the newest micro-batch may be behind. A stream that runs writes one every second. A stream that starts or
# catches up needs a minute or two.
ALLOWED_SECONDS = 180.0
# SQL for an hour ago. The queries of a check read only windows that begin, and events that happen, after this time.
_SINCE = "now() - INTERVAL 1 HOUR"
_CHECKED_ALWAYS_MS = 24 * 3600 * 1000
_SAMPLE = 100


def check(lake: PipelineLake, run: str, *, link: str | None = None) -> Verdict:
    """Judge the rows that are served now. A critical failure opens an incident; without such a failure it is closed."""
    now_ms, served_lake = round(time.time() * 1000), Lake(lake.root)
    pipeline, final = lake.pipeline, lake.final()
    changed = [header.slice for header in sample(final, now_ms) if is_changed(final, pipeline, header)] if final else []
    docs = check_page(lake, run)
    rows, fresh = live_windows(served_lake, pipeline), freshness_seconds(served_lake, pipeline)
    repeated = repeated_windows(served_lake, pipeline)
    verdict = check_served(pipeline, rows, fresh, ALLOWED_SECONDS, changed, repeated=repeated, run=run, docs=docs)
    page.discard_old(docs.parent, KEPT_SECONDS)
    key, incidents = served_key(pipeline.name), lake.incidents()
    if verdict.passed:
        incidents.close(key, f"the served rows of {pipeline.name} pass their checks")
    else:
        incidents.open(key, f"the served rows of {pipeline.name} fail their checks: {verdict.sentence}", link=link)
    return verdict


def check_page(lake: PipelineLake, run: str) -> Folder:
    """The page about a check."""
    return lake.root / PAGES / lake.pipeline.check_job / f"{name_of(run)}.html"


def live_windows(lake: Lake, pipeline: Pipeline) -> pa.Table:
    """The newest live windows, as many as are judged in memory, each with the name of its slice."""
    columns = columns_of(pipeline).names
    listed = ", ".join(f'"{name}"' for name in columns)
    try:
        rows = lake.query(
            f"SELECT {listed} FROM {pipeline.name} WHERE finality = 'live' "
            f"AND window_start > {_SINCE} ORDER BY window_start DESC LIMIT {SMALL_ROWS}"
        )
    except NotThereError:
        # Neither stream nor recompute has ever run.
        rows = columns_of(pipeline).empty_table()
    starts = pc.cast(pc.cast(rows.column("window_start"), pa.timestamp("ms", tz="UTC")), pa.int64()).to_pylist()
    return rows.append_column("slice", pa.array([slice_at(pipeline, start).name for start in starts], pa.string()))


def repeated_windows(lake: Lake, pipeline: Pipeline) -> int:
    """How many of the newest windows and keys have more than one row, whether live or final."""
    keys = ", ".join(f'"{name}"' for name in ("window_start", *pipeline.keys))
    try:
        rows = lake.query(
            f"SELECT count(*) AS repeated FROM (SELECT 1 FROM {pipeline.name} "
            f"WHERE window_start > {_SINCE} GROUP BY {keys} HAVING count(*) > 1)"
        )
    except NotThereError:
        return 0
    return int(rows.column("repeated")[0].as_py())


def freshness_seconds(lake: Lake, pipeline: Pipeline) -> float | None:
    """How far the newest micro-batch is behind the newest landed event; None if one of the two is missing.

    Live windows could not show this: a few minutes after a stream was killed, its windows are final and no longer live.
    """
    newest = f"SELECT max(arrival_time) FROM {pipeline.source.events_relation} WHERE event_time > {_SINCE}"
    live = f"SELECT max(as_of) FROM {table_name(pipeline.live_table)} WHERE slice = '{BATCHES_SLICE}'"
    try:
        found = lake.query(f"SELECT epoch(({newest}) - ({live})) AS behind").column("behind")[0].as_py()
    except NotThereError:
        return None
    return None if found is None else max(0.0, float(found))


def sample(final: FinalTable, now_ms: int) -> list[Header]:
    """All slices of the last day, and some older ones. Successive checks take the older ones in turn.

    Headers are read only for the days that this needs.
    """
    by_day, since = final.slices_by_day(), Slice(now_ms - _CHECKED_ALWAYS_MS, now_ms).name
    newest = final.headers([day for day in by_day if day >= day_of_slice(since)])
    always = sorted(name for name in newest if name >= since)
    turns = -(-(sum(by_day.values()) - len(always)) // _SAMPLE)
    begin = now_ms // 600_000 % turns * _SAMPLE if turns else 0
    older = [header for header in _in_order(final, by_day, begin) if header.slice < since]
    return older + [newest[name] for name in always]


def _in_order(final: FinalTable, by_day: Mapping[str, int], begin: int) -> list[Header]:
    """Up to `_SAMPLE` headers from position ``begin`` on, in the order of their slices."""
    days, skipped = sorted(by_day), 0
    while days and begin - skipped >= by_day[days[0]]:
        skipped += by_day[days.pop(0)]
    found: list[Header] = []
    while days and len(found) < begin - skipped + _SAMPLE:
        headers = final.headers([days.pop(0)])
        found += [headers[name] for name in sorted(headers)]
    return found[begin - skipped :][:_SAMPLE]


def is_changed(final: FinalTable, pipeline: Pipeline, header: Header) -> bool:
    """Whether a slice's rows differ from the rows that were published."""
    rows = final.rows(header.slice)
    if rows.num_rows != header.rows:
        return True
    # An older definition may have had other columns. A checksum over those cannot be computed any more.
    is_known = header.fingerprint == pipeline.fingerprint or final.has_columns_of_now(header.slice)
    return is_known and checksum(pipeline, rows) != header.checksum
