"""The account of final slices: the events that separate live from final, by cause, and any unexplained rest.

It runs after the publish, which it never delays, and before live rows are pruned. Each version of a slice is accounted
for once. The version has its account if its totals are in `balance/<pipeline>`.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from jobs import session
from jobs.control.events_needed import write_needed_from
from jobs.control.incident import unexplained_key
from jobs.control.writing import writing
from jobs.finality import account_inputs
from jobs.finality.account_inputs import AccountInputs, AccountProgress, need_no_account, read_inputs
from jobs.finality.comparison import Comparison, compare
from jobs.finality.due import why_removed
from jobs.lake.accounts import Accounts
from jobs.lake.live import BatchRange, PruneRequest
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.slices import Header
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import day_of_slice, has_events, slice_at, slice_named
from jobs.pipelines.window import WindowKind
from jobs.refusal import Refusal
from jobs.settings import Settings
from jobs.times import iso

log = logging.getLogger(__name__)

# The driver's clock stamps batches, and the broker's clock stamps arrivals. The two may differ by this much.
_CLOCKS = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True)
class _DueSlices:
    """The due slices: those to compare, those that cannot be compared (with the reason), and those that wait."""

    compared: list[Header]
    noted: dict[str, str]
    waiting: list[Header]
    ranges: list[BatchRange]


def run(lake: PipelineLake, settings: Settings, run_id: str, link: str | None = None) -> None:
    """Account for every final slice that has no account yet, then ask the live job to prune superseded rows.

    ``link``: the address at which people read about this run.
    """
    pipeline = lake.pipeline
    if pipeline.window.kind is WindowKind.SESSION:
        raise Refusal(
            f"{pipeline.name!r} has session windows, which cannot be accounted for yet, because the stream may split a "
            f"session: leave the DAG {pipeline.account_job} paused"
        )
    with writing(lake.root, pipeline.account_job):
        accounts = lake.open_accounts()
    final = lake.final()
    if final is None:
        log.info("no slice of %s is final yet", pipeline.name)
        return
    # This job does not check its clock, which may be hours ahead. A publish and a roll-back begin only if their clock
    # agrees with the broker's, so the time of the newest one is right. The earlier of both times counts.
    now_ms = min(round(time.time() * 1000), final.newest_ms())
    inputs = read_inputs(lake, final, accounts)
    due = inputs.due()
    found = _divide(pipeline, inputs, due)
    if found.waiting:
        names = ", ".join(header.slice for header in found.waiting[:3])
        log.info(
            "%d slices wait until ingest has landed all records that the stream has read: %s …",
            len(found.waiting),
            names,
        )
    if len(found.waiting) < len(due):
        _account(lake, settings, run_id, inputs, found, accounts, link)
    else:
        _update_incident(lake, accounts, link)
    _prune(lake, inputs, accounts, now_ms - settings.live_kept_seconds * 1000)
    is_all = not found.waiting and len(due) < account_inputs.MAX_SLICES
    looked_ms = now_ms - round(_CLOCKS.total_seconds() * 1000)
    _advance(lake, accounts, inputs, looked_ms if is_all else None)


def _divide(pipeline: Pipeline, inputs: AccountInputs, due: Sequence[Header]) -> _DueSlices:
    """Divide the due slices into those to compare, those that cannot be compared, and those that wait."""
    noted = {header.slice: note for header in due if (note := _why_not(pipeline, inputs, header))}
    comparable = [header for header in due if header.slice not in noted]
    ranges = inputs.live.batch_ranges(_earliest(pipeline, comparable)) if comparable else []
    ahead = _not_landed(pipeline, inputs, ranges)
    waiting = [h for h in comparable if any(_may_touch(pipeline, h, batch) for batch in ahead)]
    return _DueSlices(
        compared=[header for header in comparable if header not in waiting], noted=noted, waiting=waiting, ranges=ranges
    )


def _why_not(pipeline: Pipeline, inputs: AccountInputs, header: Header) -> str | None:
    """Return why a slice's live and final rows cannot be compared, or None if they can."""
    if header.fingerprint != pipeline.fingerprint:
        return f"made by another definition ({header.fingerprint}): restate the slice to compare it"
    if inputs.live.note and inputs.live.note.fingerprint not in (None, pipeline.fingerprint):
        return f"the live rows are of another definition ({inputs.live.note.fingerprint})"
    counted = inputs.counted
    topic = pipeline.source.name
    now = {inputs.live.topic_id(topic), inputs.landed.topic_id(topic) if inputs.landed else None}
    if {*now, counted and counted.topic_id} - {None, header.topic_id}:
        return "the topic was re-created since: its offsets cannot be compared with those of the earlier topic"
    if counted and _oldest_ms(pipeline, header) <= counted.since_ms:
        return (
            "it may hold records of an earlier topic of this name, whose offsets cannot be compared with the new ones"
        )
    earlier = any(slice_ == header.slice for slice_, _ in inputs.accounted)
    if earlier and header.slice < inputs.pruned_before:
        return "its live rows were pruned after the account of an earlier version"
    events_from_ms = inputs.landed.events_from_ms if inputs.landed else 0
    if not has_events(pipeline, slice_named(pipeline, header.slice), events_from_ms):
        return why_removed(pipeline.source, events_from_ms)
    if inputs.batches_since and _earliest(pipeline, [header]) < inputs.batches_since:
        return f"rows about micro-batches before {inputs.batches_since:%FT%TZ} were removed because of their age"
    return None


def _oldest_ms(pipeline: Pipeline, header: Header) -> int:
    """The earliest time at which an event of a slice may have arrived."""
    return slice_named(pipeline, header.slice).start_ms - pipeline.source.max_ahead_seconds * 1000


def _earliest(pipeline: Pipeline, headers: Iterable[Header]) -> datetime:
    """The earliest time at which a batch may have taken an event of these slices."""
    first_ms = min(_oldest_ms(pipeline, header) for header in headers)
    return datetime.fromtimestamp(first_ms / 1000, UTC) - _CLOCKS


def _not_landed(pipeline: Pipeline, inputs: AccountInputs, ranges: Iterable[BatchRange]) -> list[BatchRange]:
    """The batches of the stream with records that `ingest` has not landed yet."""
    topic = pipeline.source.name
    topic_id = inputs.live.topic_id(topic)
    ends = inputs.landed.ends(topic, topic_id) if inputs.landed and topic_id else {}
    return [batch for batch in ranges if batch.end > ends.get(batch.partition, 0)]


def _may_touch(pipeline: Pipeline, header: Header, batch: BatchRange) -> bool:
    """Whether an event of a batch can have counted in a window of a slice."""
    return batch.watermark < slice_named(pipeline, header.slice).end + timedelta(milliseconds=pipeline.window.reach_ms)


def _account(
    lake: PipelineLake,
    settings: Settings,
    run_id: str,
    inputs: AccountInputs,
    found: _DueSlices,
    accounts: Accounts,
    link: str | None,
) -> None:
    pipeline = lake.pipeline
    began, stage = time.monotonic(), accounts.new_stage()
    compared = Comparison()
    if found.compared:
        with session.opened(settings, f"account {pipeline.name}") as spark:
            compared = compare(spark, lake, run_id, inputs, found.compared, found.ranges, stage)
    now = datetime.now(UTC)
    signed = {"run": run_id, "as_of": now}
    rows = [{**row, **signed} for row in compared.totals]
    rows += [
        {"slice": slice_, "version": inputs.headers[slice_].version, "kind": "slice", "note": note, **signed}
        for slice_, note in found.noted.items()
    ]
    with writing(lake.root, pipeline.account_job) as lease:
        lease.check()
        accounts.add(stage, compared.drift_rows, rows)
        _update_incident(lake, accounts, link)
        accounts.maintain(inputs.kept_from, lease.check)
    seconds = time.monotonic() - began
    log.info("%d slices of %s accounted for in %.1f s", len(found.compared), pipeline.name, seconds)


def _prune(lake: PipelineLake, inputs: AccountInputs, accounts: Accounts, kept_from_ms: int) -> None:
    """Ask the live job to prune old slices, up to the first that is not final, has no account, or must be kept.

    ``kept_from_ms``: slices that end later must be kept.

    A slice that has lost events before it was final can never become final. So later slices do not wait for it. Its
    live rows are not pruned, since there are no final rows in their place.
    """
    pipeline = lake.pipeline
    done = need_no_account(
        inputs.headers, accounts.done({day_of_slice(name) for name in inputs.headers}), inputs.kept_from
    )
    there, before = inputs.live.slices(), inputs.pruned_before
    events_from_ms = inputs.landed.events_from_ms if inputs.landed else 0
    for name in sorted(there | set(inputs.headers)):
        slice_ = slice_named(pipeline, name)
        if name not in inputs.headers and not has_events(pipeline, slice_, events_from_ms):
            continue
        if name not in done or slice_.end_ms > kept_from_ms:
            break
        before = max(before, slice_at(pipeline, slice_.end_ms).name)
    superseded = {name for name in there if name < before and name in done}
    if superseded:
        PruneRequest(before=before, slices=tuple(superseded)).write(lake.documents(pipeline.name))


def _advance(lake: PipelineLake, accounts: Accounts, inputs: AccountInputs, looked_ms: int | None) -> None:
    """Store how far the accounts are, and which events they still need: those of later slices.

    ``looked_ms``: every slice published before this time has its account; None if some slice has none.
    """
    pipeline = lake.pipeline
    last = AccountProgress.read(lake) or AccountProgress.begin(pipeline, inputs)
    if last is None:
        return
    seen_ms = last.seen_ms if looked_ms is None else looked_ms
    now = replace(last.advanced(pipeline, inputs, accounts), seen_ms=seen_ms)
    now.write(lake)
    write_needed_from(lake.root, pipeline.account_job, now.to_ms - pipeline.window.look_back_ms)


def _update_incident(lake: PipelineLake, accounts: Accounts, link: str | None) -> None:
    """Open or close the incident, judging by all stored accounts and not only by those of this run.

    An earlier run may have been killed before it opened the incident, or may have seen other slices.
    """
    incidents, key = lake.incidents(), unexplained_key(lake.pipeline.name)
    wrong = accounts.unexplained()
    if wrong:
        text = _sentence(lake.pipeline, accounts, wrong)
        log.error("unexplained: %s", text)
        incidents.open(key, text, link=link)
    else:
        incidents.close(key, "no kept account has an unexplained difference any more")


def _sentence(pipeline: Pipeline, accounts: Accounts, wrong: Sequence[Mapping[str, Any]]) -> str:
    """The first window that nothing explains, and the number of such windows."""
    first, windows = wrong[0], sum(row["unexplained"] for row in wrong)
    row = accounts.first_unexplained(first["slice"], first["version"])
    example = f", {_window(pipeline, row)}" if row else ""
    return f"slice {first['slice']}{example}; windows with an unexplained difference: {windows}. See docs/drift.md"


def _window(pipeline: Pipeline, row: Mapping[str, Any]) -> str:
    keys = ", ".join(f"{key}={row[key]!r}" for key in pipeline.keys)
    differing = [(name, off) for name, off in row["unexplained"].items() if off != 0]
    values = "; ".join(
        f"{name}: live {_of(row, 'live', name)}, final {_of(row, 'final', name)}"
        + ("" if off is None else f", unexplained {off}")
        for name, off in differing
    )
    return f"window {iso(round(row['window_start'].timestamp() * 1000))}, {keys}: {values}"


def _of(row: Mapping[str, Any], side: str, name: str) -> Any:
    return "no row" if row[side] is None else row[side][name]
