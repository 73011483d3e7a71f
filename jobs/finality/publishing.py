"""Publishes slices: first a commit per group of adjacent slices, then the topic, then the ledger. Safe to run again.

If a run is killed after its commit, the next run does the rest: the headers show which slices are published.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from jobs.control.lease import Lease
from jobs.control.writing import writing
from jobs.failpoints import FailPoint, may_fail_at
from jobs.finality.late import with_missed
from jobs.finality.run.folder import Plan, RunFolder, Work, slices_left
from jobs.lake.final import FinalTable
from jobs.lake.final_topic import Message, messages, send, tombstones, window_columns
from jobs.lake.ledger import LateCountPosition, Ledger
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.publication import Publication, PublishedMeanwhileError, UnreadableRowsError
from jobs.lake.slices import ROLLED_BACK, Header, LedgerLine, State, is_superseded, reconciled
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import adjacent_groups, day_of_slice, slice_named, why_early
from jobs.refusal import Refusal
from jobs.settings import KafkaSettings

log = logging.getLogger(__name__)

# After this many slices are sent, their lines are written into the ledger. If the run is killed later, the next run
# need not send these slices again.
_ANNOUNCED_AT_ONCE = 200


@dataclass(frozen=True, kw_only=True)
class Published:
    """The result of a publish: slices with their new versions, those that stay blocked, those left to another run."""

    versions: Mapping[str, int]
    blocked: Mapping[str, Sequence[str]]
    refused: Mapping[str, str]
    messages: int

    @property
    def sentence(self) -> str:
        """The result as text for people."""
        parts = [f"{len(self.versions)} slices are final"]
        parts += [f"{len(self.blocked)} blocked"] if self.blocked else []
        parts += [f"{len(self.refused)} left to another run"] if self.refused else []
        return ", ".join(parts)


def publish(
    lake: PipelineLake, kafka: KafkaSettings, run: str, approved: Mapping[str, str] | None = None, *, now_ms: int
) -> Published:
    """Publish the slices of a run that passed the audit, or, with ``approved``, only those that a person approves.

    ``approved``: slice -> who approves it, and why. ``now_ms``: by the broker's clock. A slice that is not over by then
    is left to a later run, whatever the plan says.
    """
    pipeline, folder = lake.pipeline, RunFolder.of(lake, run)
    plan, verdicts = folder.plan(), folder.verdicts()
    if verdicts is None:
        raise Refusal(f"run {run!r} of {pipeline.name!r} was not audited: clear its task audit, or its task plan")
    passed = [name for name, verdict in verdicts.items() if verdict["passed"]]
    if never := [name for name in approved or () if not verdicts.get(name, {}).get("checksum")]:
        raise Refusal(
            f"slice {never[0]} was not computed in run {run!r}, so there is nothing to publish: correct the definition "
            "or the data, then restate the slice"
        )
    chosen = {work.slice: work for work in plan.only(passed if approved is None else approved).work}
    too_early = {name: why for name in chosen if (why := _too_early(pipeline, name, now_ms))}
    with writing(lake.root, pipeline.recompute_job) as lease:
        final, ledger = lake.open_final(), lake.open_ledger()
        headers = {
            name: _header(pipeline, plan, work, verdicts[name], (approved or {}).get(name))
            for name, work in chosen.items()
            if name not in too_early
        }
        overtaken, unreadable = _commit(lake, final, lease, folder, headers)
        refused = too_early | overtaken | unreadable
        may_fail_at(FailPoint.PUBLISHED, 0)
        done = {
            *(name for name in headers if name not in refused),
            *(plan.unannounced if approved is None else ()),
        }
        versions, still_newest, sent = announce(lake, kafka, final, ledger, lease, done, now_ms)
        final.maintain(lease.check, now_ms)
    may_fail_at(FailPoint.ANNOUNCED, 0)
    stay = {
        name: [failure["sentence"] for failure in verdict["failures"]]
        for name, verdict in verdicts.items()
        if not verdict["passed"]
    }
    lake.incidents().close_blocked(pipeline.name, still_newest)
    # A slice with unreadable rows is left to a later run. The plan finds an old slice only in the folder of a run that
    # has not ended. So this run stays open, unless the folders of other runs have all these slices.
    others = slices_left(lake, but=folder) if unreadable else set()
    if approved is None and not stay and unreadable.keys() <= others:
        folder.end()
    return Published(
        versions=versions,
        blocked=stay if approved is None else {},
        refused=refused,
        messages=sent,
    )


def _too_early(pipeline: Pipeline, name: str, now_ms: int) -> str | None:
    """Return why a slice is not over yet, or None if it is.

    If it is not over, the plan was made with a wrong clock. Or an older version of Tideline made it, which used the
    clock of the machine.
    """
    why = why_early(pipeline, slice_named(pipeline, name), now_ms)
    return f"slice {name} is left to a later run, since by the broker's clock {why}" if why else None


def _commit(
    lake: PipelineLake, final: FinalTable, lease: Lease, folder: RunFolder, headers: Mapping[str, Header]
) -> tuple[dict[str, str], dict[str, str]]:
    """Publish in one commit per group of adjacent slices.

    Returns:
        slice -> why it was not published. First the slices that another run has published, then the slices whose served
        rows cannot be read.
    """
    overtaken: dict[str, str] = {}
    unreadable: dict[str, str] = {}
    files = folder.files_by_slice()
    there = final.headers({day_of_slice(name) for name in headers})
    mine = {n for n, h in headers.items() if n in there and (there[n].run, there[n].version) == (h.run, h.version)}
    wanted = [slice_named(lake.pipeline, name) for name in headers if name not in mine]
    for group in adjacent_groups(wanted):
        publications = []
        for name in (slice_.name for slice_ in group):
            try:
                final.require_version(there.get(name), headers[name])
                if name in there:
                    keep_replaced_windows(lake, final, there[name], headers[name].run)
                publications.append(Publication(header=headers[name], files=files(name)))
            except PublishedMeanwhileError as error:
                overtaken[name] = str(error)
            except UnreadableRowsError as error:
                unreadable |= _log_unreadable(error)
        unreadable |= _publish_readable(lake.pipeline, final, lease, publications)
    return overtaken, unreadable


def _publish_readable(
    pipeline: Pipeline, final: FinalTable, lease: Lease, publications: Sequence[Publication]
) -> dict[str, str]:
    """Publish in one commit, and return why some slices are left out: their rows in folded files cannot be read."""
    refused: dict[str, str] = {}
    while some := [each for each in publications if each.header.slice not in refused]:
        lease.check()
        try:
            final.publish(some)
        except UnreadableRowsError as error:
            refused |= _log_unreadable(error)
        else:
            log.info("published %d slices of %s from %s", len(some), pipeline.name, some[0].header.slice)
            break
    return refused


def _log_unreadable(error: UnreadableRowsError) -> dict[str, str]:
    log.error("%d slices are not published: %s", len(error.sentences), error)
    return error.sentences


def _header(pipeline: Pipeline, plan: Plan, work: Work, verdict: Mapping[str, Any], approval: str | None) -> Header:
    warned = len(verdict["failures"])
    passed = f"passed with {warned} warning{'s' if warned > 1 else ''}" if warned else "passed"
    return Header(
        slice=work.slice,
        slice_seconds=pipeline.slice_seconds,
        version=work.version + 1,
        as_of_ms=plan.as_of_ms,
        run=plan.run,
        fingerprint=plan.fingerprint,
        topic_id=plan.topic_id,
        offsets=plan.offsets,
        events_version=plan.events_version,
        rows=verdict["rows"],
        events=work.events,
        checksum=verdict["checksum"],
        verdict=f"blocked, approved by {approval}" if approval else passed,
        reason=work.reason,
    )


def keep_replaced_windows(lake: PipelineLake, final: FinalTable, now: Header, run: str) -> None:
    """Store the windows that a slice serves now, and those that it has served before its present version.

    The run of the present version may have been killed before it sent tombstones. Example: version 1 had a window of
    `k9`, version 2 lacks it, and the run of version 2 was killed after its commit. Then the run of version 3 sends the
    tombstone.
    """
    names = window_columns(lake.pipeline)
    try:
        windows = [final.rows(now.slice, names)]
    except (OSError, pa.ArrowException) as error:
        raise UnreadableRowsError([now.slice], lake.pipeline.final_table, str(error)) from error
    if (earlier_ones := RunFolder.of(lake, now.run).replaced_windows(now.slice)) is not None:
        windows.append(earlier_ones)
    distinct = pa.concat_tables(windows).group_by(names).aggregate([])
    RunFolder.of(lake, run).keep_replaced_windows(now.slice, distinct)


def announce(
    lake: PipelineLake,
    kafka: KafkaSettings,
    final: FinalTable,
    ledger: Ledger,
    lease: Lease,
    slices: Iterable[str],
    now_ms: int,
) -> tuple[dict[str, int], list[str], int]:
    """Send slices to the topic first, then write the ledger. So a slice that the ledger calls final needs nothing more.

    Returns:
        the version of each slice, the slices that have not moved on since (`is_superseded`), and how many messages were
        sent.
    """
    names, still_newest, sent = sorted(slices), list[str](), 0
    headers = final.headers({day_of_slice(name) for name in names})
    to_announce = [headers[name] for name in names]
    for some in (to_announce[at : at + _ANNOUNCED_AT_ONCE] for at in range(0, len(to_announce), _ANNOUNCED_AT_ONCE)):
        wanted = (m for header in some for m in _messages(lake, final, lease, header))
        sent += send(kafka, lake.pipeline.final_topic.name, wanted)
        lease.check()
        entries = ledger.newest([header.slice for header in some])
        counted = ledger.late_count_position()
        newest = [header for header in some if not is_superseded(header, entries.get(header.slice))]
        ledger.append(_line(lake, header, entries.get(header.slice), counted, now_ms) for header in newest)
        still_newest += [header.slice for header in newest]
    return {header.slice: header.version for header in to_announce}, still_newest, sent


def _line(
    lake: PipelineLake, header: Header, entry: LedgerLine | None, counted: LateCountPosition | None, now_ms: int
) -> LedgerLine:
    line = reconciled(header, entry)
    if not header.verdict.startswith(ROLLED_BACK):
        line = with_missed(lake, line, header, entry, counted)
    verdict = f"{header.verdict}; {header.reason}" if header.verdict not in ("", "passed") else header.reason
    return replace(line, at_ms=now_ms, state=State.FINAL, reason=verdict)


def _messages(lake: PipelineLake, final: FinalTable, lease: Lease, header: Header) -> Iterable[Message]:
    rows = final.rows(header.slice)
    # Checked before each slice: a publisher that was suspended during its send would otherwise send older versions
    # after those of its successor.
    lease.check()
    yield from messages(lake.pipeline, header, rows)
    gone = RunFolder.of(lake, header.run).replaced_windows(header.slice)
    if gone is not None:
        yield from tombstones(lake.pipeline, gone, rows)
