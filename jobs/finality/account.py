"""The account of final slices: the events that separate live from final, by cause, and any unexplained rest.

It runs off the critical path, and before live rows are pruned. Each version of a slice is accounted for once. It has
its account if its totals are in `balance/<pipeline>`.
"""

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from jobs import session
from jobs.control.events_needed import say_needed
from jobs.finality import accounted
from jobs.finality.accounted import Progress, Seen, ready, see
from jobs.finality.due import removed
from jobs.finality.planning import writing
from jobs.finality.recompute import read_events
from jobs.finality.unexplained import keep_incident
from jobs.lake.columns import TIME
from jobs.lake.drift import Accounts, FinalFiles, Taken, ask_to_prune, final_files
from jobs.lake.final import FinalTable
from jobs.lake.slices import Header
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import has_events, slice_at, slice_named
from jobs.pipelines.window import WindowKind
from jobs.refusal import Refusal
from jobs.settings import Settings
from jobs.storage.folders import Folder
from jobs.transforms import drift
from jobs.transforms.aggregate import slice_of

log = logging.getLogger(__name__)

_OF_LIVE = {"epoch": "BIGINT", "batch": "BIGINT", "as_of": "TIMESTAMP"}

# The driver's clock stamps batches, and the broker's clock stamps arrivals. The two may differ by this much.
_CLOCKS = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True)
class _Sorted:
    """The due slices: those to compare, those that cannot be compared (with the reason), and those that wait."""

    compared: list[Header]
    noted: dict[str, str]
    waiting: list[Header]
    taken: list[Taken]


def run(settings: Settings, pipeline: Pipeline, run_id: str, link: str | None = None) -> None:
    """Account for every final slice that has no account yet, then ask the live job to prune superseded rows.

    ``link``: the address at which people read about this run.
    """
    if pipeline.window.kind is WindowKind.SESSION:
        raise Refusal(
            f"{pipeline.name!r} has session windows, which cannot be accounted for yet: a session may be split by the "
            "stream, and no account says so; leave its account off"
        )
    with writing(settings.lake_root, pipeline.account_job):
        accounts = Accounts.open(settings.lake_root, pipeline)
    now_ms, final = round(time.time() * 1000), FinalTable.read(settings.lake_root, pipeline)
    if final is None:
        log.info("nothing of %s is final yet", pipeline.name)
        return
    seen = see(settings.lake_root, pipeline, final, accounts)
    due = seen.due()
    found = _sort(pipeline, seen, due)
    if found.waiting:
        names = ", ".join(header.slice for header in found.waiting[:3])
        log.info("%d slices wait until ingest has landed what live has read: %s …", len(found.waiting), names)
    if len(found.waiting) < len(due):
        _account(settings, pipeline, run_id, seen, found, accounts, link)
    else:
        keep_incident(settings.lake_root, pipeline, accounts, link)
    _prune(settings, pipeline, seen, accounts)
    is_all = not found.waiting and len(due) < accounted.MAX_SLICES
    # The publishers' clocks count here: they are close to the broker's. The clock of this machine may be hours off.
    looked_ms = min(now_ms, final.newest_ms()) - round(_CLOCKS.total_seconds() * 1000)
    _get_on(settings.lake_root, pipeline, final, accounts, seen, looked_ms if is_all else None)


def _sort(pipeline: Pipeline, seen: Seen, due: Sequence[Header]) -> _Sorted:
    noted = {header.slice: note for header in due if (note := _why_not(pipeline, seen, header))}
    comparable = [header for header in due if header.slice not in noted]
    taken = seen.live.taken(_earliest(pipeline, comparable)) if comparable else []
    ahead = _not_landed(pipeline, seen, taken)
    waiting = [h for h in comparable if any(_may_touch(pipeline, h, batch) for batch in ahead)]
    return _Sorted(
        compared=[header for header in comparable if header not in waiting], noted=noted, waiting=waiting, taken=taken
    )


def _why_not(pipeline: Pipeline, seen: Seen, header: Header) -> str | None:
    """Return why a slice's live and final rows cannot be compared, or None if they can."""
    if header.fingerprint != pipeline.fingerprint:
        return f"made by another definition ({header.fingerprint}): restate the slice to compare it"
    if seen.live.note and seen.live.note.fingerprint not in (None, pipeline.fingerprint):
        return f"the live rows are of another definition ({seen.live.note.fingerprint})"
    counted = seen.counted
    topic = pipeline.source.name
    now = {seen.live.topic_id(topic), seen.landed.topic_id(topic) if seen.landed else None}
    if {*now, counted and counted.topic_id} - {None, header.topic_id}:
        return "the topic was re-created since: offsets of one say nothing of the other"
    if counted and _oldest_ms(pipeline, header) <= counted.since_ms:
        return "it may hold records of the topic that was there before: offsets of one say nothing of the other"
    earlier = any(slice_ == header.slice for slice_, _ in seen.accounted)
    if earlier and header.slice < seen.pruned_before:
        return "its live rows were pruned after the account of an earlier version"
    landed_from_ms = seen.landed.from_ms if seen.landed else 0
    if not has_events(pipeline, slice_named(pipeline, header.slice), landed_from_ms):
        return removed(pipeline.source, landed_from_ms)
    if seen.batches_since and _earliest(pipeline, [header]) < seen.batches_since:
        return f"rows about micro-batches before {seen.batches_since:%FT%TZ} were removed: they were older than needed"
    return None


def _oldest_ms(pipeline: Pipeline, header: Header) -> int:
    """The earliest time at which an event of a slice may have arrived."""
    return slice_named(pipeline, header.slice).start_ms - pipeline.source.max_ahead_seconds * 1000


def _earliest(pipeline: Pipeline, headers: Iterable[Header]) -> datetime:
    """The earliest time at which a batch may have taken an event of these slices."""
    first_ms = min(_oldest_ms(pipeline, header) for header in headers)
    return datetime.fromtimestamp(first_ms / 1000, UTC) - _CLOCKS


def _not_landed(pipeline: Pipeline, seen: Seen, taken: Iterable[Taken]) -> list[Taken]:
    """The batches that live has read and that ingest has not landed in full."""
    topic = pipeline.source.name
    topic_id = seen.live.topic_id(topic)
    ends = seen.landed.ends(topic, topic_id) if seen.landed and topic_id else {}
    return [batch for batch in taken if batch.end > ends.get(batch.partition, 0)]


def _may_touch(pipeline: Pipeline, header: Header, batch: Taken) -> bool:
    """Whether an event of a batch can have counted in a window of a slice."""
    return batch.watermark < slice_named(pipeline, header.slice).end + timedelta(milliseconds=pipeline.window.reach_ms)


def _account(
    settings: Settings,
    pipeline: Pipeline,
    run_id: str,
    seen: Seen,
    found: _Sorted,
    accounts: Accounts,
    link: str | None,
) -> None:
    began, stage = time.monotonic(), accounts.new_stage()
    totals: list[dict[str, Any]] = []
    if found.compared:
        with session.opened(settings, f"account {pipeline.name}") as spark:
            totals = compare(spark, settings, pipeline, run_id, seen, found.compared, found.taken, stage)
    now = datetime.now(UTC)
    signed = {"run": run_id, "as_of": now}
    rows = [{**row, **signed} for row in totals]
    rows += [
        {"slice": slice_, "version": seen.headers[slice_].version, "kind": "slice", "note": note, **signed}
        for slice_, note in found.noted.items()
    ]
    with writing(settings.lake_root, pipeline.account_job) as lease:
        lease.check()
        accounts.add(stage if stage.exists() else None, rows)
        keep_incident(settings.lake_root, pipeline, accounts, link)
        accounts.tend(seen.kept_from)
    seconds = time.monotonic() - began
    log.info("%d slices of %s accounted for in %.1f s", len(found.compared), pipeline.name, seconds)


def compare(
    spark: SparkSession,
    settings: Settings,
    pipeline: Pipeline,
    run_id: str,
    seen: Seen,
    headers: Sequence[Header],
    taken: Sequence[Taken],
    stage: Folder,
) -> list[dict[str, Any]]:
    """Stage the drift rows of slices, and return the totals."""
    finals = _finals(spark, pipeline, seen, headers)
    transformed = _tagged(spark, settings, pipeline, seen, headers, taken, finals).persist()
    names = {header.slice for header in headers}
    live = _rows(spark, pipeline, seen.live.files(names), _OF_LIVE)
    final = _final_rows(spark, pipeline, final_files(settings.lake_root, pipeline, seen.final_version, names), names)
    balance = drift.balance(transformed, live, final, pipeline).persist()
    try:
        rows = drift.drift_rows(balance, finals, pipeline, run_id)
        ordered = rows.repartition("day").sortWithinPartitions("day", "window_start")
        ordered.write.partitionBy("day").parquet(str(stage))
        by_slice = {row["slice"]: row for row in drift.totals(balance, pipeline).collect()}
        causes = drift.causes_by_slice(transformed, pipeline).collect()
    finally:
        balance.unpersist()
        transformed.unpersist()
    return _totals(headers, by_slice, causes)


def _tagged(
    spark: SparkSession,
    settings: Settings,
    pipeline: Pipeline,
    seen: Seen,
    headers: Sequence[Header],
    taken: Sequence[Taken],
    finals: DataFrame,
) -> DataFrame:
    if seen.landed is None:
        raise Refusal(f"{pipeline.source.events_table} is gone, and slices of {pipeline.name!r} are final: restore it")
    slices = [slice_named(pipeline, header.slice) for header in headers]
    events = read_events(spark, settings, pipeline, seen.landed.version, slices)
    return drift.tagged(events, pipeline, _batches(spark, taken), _width(taken), finals)


def _finals(spark: SparkSession, pipeline: Pipeline, seen: Seen, headers: Iterable[Header]) -> DataFrame:
    topic, offsets = pipeline.source.name, pa.map_(pa.int32(), pa.int64())
    stream = {"begins": list(seen.live.begins(topic).items()), "reached": list(seen.live.reached(topic).items())}
    columns = pa.schema({"slice": pa.string(), "version": pa.int64(), **dict.fromkeys(["offsets", *stream], offsets)})
    rows = [{"slice": h.slice, "version": h.version, "offsets": list(h.offsets.items()), **stream} for h in headers]
    return session.small_frame(spark, columns, rows)


def _batches(spark: SparkSession, taken: Sequence[Taken]) -> DataFrame:
    columns = pa.schema({"partition": pa.int32(), "start": pa.int64(), "end": pa.int64(), "watermark": TIME})
    return session.small_frame(spark, columns, [vars(batch) for batch in taken])


def _width(taken: Iterable[Taken]) -> int:
    """The average length of a range. Cutting the ranges at its multiples gives about twice as many rows at most."""
    sizes = [batch.end - batch.start for batch in taken]
    return max(1, sum(sizes) // max(1, len(sizes)))


def _final_rows(spark: SparkSession, pipeline: Pipeline, files: FinalFiles, slices: Collection[str]) -> DataFrame:
    own = _rows(spark, pipeline, files.own, {})
    if not files.folded:
        return own
    # Folded files also hold rows of other slices. The bounds let Spark skip most of those rows.
    start, wanted = F.col("window_start"), [slice_named(pipeline, name) for name in slices]
    bounds = start.between(F.lit(min(each.start for each in wanted)), F.lit(max(each.end for each in wanted)))
    of_slices = slice_of(start, pipeline.slice_seconds).isin(*slices)
    return own.unionByName(_rows(spark, pipeline, files.folded, {}).where(bounds & of_slices))


def _rows(spark: SparkSession, pipeline: Pipeline, files: Sequence[str], more: Mapping[str, str]) -> DataFrame:
    values = dict(zip(pipeline.value_columns, pipeline.value_types, strict=True))
    types = {"window_start": "TIMESTAMP", "window_end": "TIMESTAMP", **values, **more}
    if files:
        return spark.read.schema(", ".join(f"`{name}` {type_}" for name, type_ in types.items())).parquet(*files)
    return spark.range(0).select(*(F.lit(None).cast(type_).alias(name) for name, type_ in types.items()))


def _totals(headers: Iterable[Header], by_slice: Mapping[str, Row], causes: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows of the balance table: one for each slice, for each cause in it, and for each measure and age."""
    versions, rows = {header.slice: header.version for header in headers}, []
    for slice_, version in versions.items():
        at, found = {"slice": slice_, "version": version}, by_slice.get(slice_)
        counts = {name: found[name] if found else 0 for name in ("windows", "differing", "unexplained")}
        rows.append({**at, "kind": "slice", **counts})
        rows += (
            [{**at, "kind": "age", "windows": counts["windows"], **age.asDict()} for age in found["ages"]]
            if found
            else []
        )
    rows += [{"version": versions[row["slice"]], "kind": "cause", **row.asDict()} for row in causes]
    return rows


def _prune(settings: Settings, pipeline: Pipeline, seen: Seen, accounts: Accounts) -> None:
    """Ask to prune all slices before the first that is not final and accounted for, or that must still be kept.

    A slice with removed events can never be final, so it does not hold up later slices. Its own live rows stay: it has
    no others.
    """
    done = ready(seen.headers, accounts.done({name[:8] for name in seen.headers}), seen.kept_from)
    now = datetime.now(UTC)
    there, before = seen.live.slices(), seen.pruned_before
    events_from_ms = seen.landed.from_ms if seen.landed else 0
    for name in sorted(there | set(seen.headers)):
        slice_ = slice_named(pipeline, name)
        if name not in seen.headers and not has_events(pipeline, slice_, events_from_ms):
            continue
        if name not in done or slice_.end + timedelta(seconds=settings.live_kept_seconds) > now:
            break
        before = max(before, slice_at(pipeline, slice_.end_ms).name)
    superseded = {name for name in there if name < before and name in done}
    if superseded:
        ask_to_prune(settings.lake_root, pipeline, before, superseded)


def _get_on(
    lake_root: Folder, pipeline: Pipeline, final: FinalTable, accounts: Accounts, seen: Seen, looked_ms: int | None
) -> None:
    """Store how far the accounts are, and which events they still need: those of later slices.

    ``looked_ms``: every slice published before this time has its account; None if some slice has none.
    """
    last = Progress.read(lake_root, pipeline) or Progress.begin(pipeline, final, seen.landed)
    if last is None:
        return
    seen_ms = last.seen_ms if looked_ms is None else looked_ms
    now = replace(last.advanced(pipeline, final, seen.landed, accounts, seen.kept_from), seen_ms=seen_ms)
    now.write(lake_root, pipeline)
    say_needed(lake_root, pipeline.account_job, now.to_ms - pipeline.window.look_back_ms)
