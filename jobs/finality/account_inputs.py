"""How far the accounts of a pipeline are, so that an account reads new slices and not the whole history."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Self

from jobs.finality.tide_line import Finals, first_event_ms, whole_from_ms
from jobs.lake.accounts import Accounts
from jobs.lake.events import Landed
from jobs.lake.final import FinalTable
from jobs.lake.ledger import LateCountPosition
from jobs.lake.live import Live, PruneRequest
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.slices import Header
from jobs.pipelines.days import DAY_MS, day_of
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import day_of_slice, slice_at, start_ms_of
from jobs.settings import KeptDays

# The document in the control folder of the account.
_PROGRESS = "progress"
# A run looks through at most this many days for slices without an account. The next run goes on from there.
_DAYS_AT_ONCE = 31
# A run accounts for at most this many slices. Several runs work off a longer backlog.
MAX_SLICES = 1000


@dataclass(frozen=True, kw_only=True)
class AccountProgress:
    """How far the accounts of a pipeline are.

    ``to_ms``: an event time. No slice before it needs an account any more. Each is final and has its account, or is
    passed over, because it has lost events or is older than accounts are kept. ``seen_ms``: a time of publishing. No
    slice that was published before it needs an account any more.
    """

    to_ms: int
    seen_ms: int = 0

    @classmethod
    def read(cls, lake: PipelineLake) -> Self | None:
        """Return the progress that was written last, or None if it is missing or cannot be read."""
        document = lake.documents(lake.pipeline.account_job).read(_PROGRESS) or {}
        to_ms, seen_ms = document.get("to_ms"), document.get("seen_ms")
        if isinstance(to_ms, int) and isinstance(seen_ms, int):
            return cls(to_ms=to_ms, seen_ms=seen_ms)
        return None

    @classmethod
    def begin(cls, pipeline: Pipeline, inputs: "AccountInputs") -> Self | None:
        """Return the progress before the first account: the begin of the first slice; None if there is no slice."""
        first_ms = first_event_ms(pipeline, inputs.landed, Finals.of(inputs.final))
        return None if first_ms is None else cls(to_ms=slice_at(pipeline, first_ms).start_ms)

    def advanced(self, pipeline: Pipeline, inputs: "AccountInputs", accounts: Accounts) -> Self:
        """Move on to the first slice that is not final or has no account, by a month at most.

        Slices with removed events are passed over: they can be neither made final nor compared.
        """
        now = replace(self, to_ms=max(self.to_ms, whole_from_ms(pipeline, inputs.landed)))
        for _ in range(_DAYS_AT_ONCE):
            day = {day_of(now.to_ms)}
            headers = inputs.final.headers(day & set(inputs.final.days()))
            done = need_no_account(headers, accounts.done(day), inputs.kept_from)
            before, to_ms = now, accounted_to(pipeline, now.to_ms, done)
            now = replace(now, to_ms=to_ms)
            if day_of(to_ms) == day_of(before.to_ms):
                break
        return now

    def write(self, lake: PipelineLake) -> None:
        """Store the progress for the next run."""
        lake.documents(lake.pipeline.account_job).replace(_PROGRESS, vars(self))


def accounted_to(pipeline: Pipeline, from_ms: int, done: Collection[str]) -> int:
    """The time up to which every slice from a moment on is ``done``: it needs no account any more.

    >>> from jobs.pipelines import PIPELINES
    >>> accounted_to(PIPELINES["rolling_sum"], 0, done={"19700101T000000Z", "19700101T000200Z"})
    60000
    """
    slice_ = slice_at(pipeline, from_ms)
    while slice_.name in done:
        slice_ = slice_at(pipeline, slice_.end_ms)
    return slice_.start_ms


def need_no_account(headers: Mapping[str, Header], done: Collection[tuple[str, int]], kept_from: str) -> set[str]:
    """The slices that have an account at their version already, or are older than the accounts that are kept."""
    return {name for name, header in headers.items() if name < kept_from or (name, header.version) in done}


def accounts_kept_from(final: FinalTable) -> str:
    """The first day for which accounts are kept, counted back from the newest final slice."""
    newest, kept_ms = final.days()[-1:], KeptDays.from_env().drift * DAY_MS
    return day_of(start_ms_of(f"{newest[0]}T000000Z") - kept_ms) if newest else ""


@dataclass(frozen=True, kw_only=True)
class AccountInputs:
    """All tables, each at one version.

    Live is read first, and then the events. So most events that live has counted are in this version of the events. If
    a batch of live has events that are not in it, the account of its slices waits.
    """

    final: FinalTable
    headers: Mapping[str, Header]
    live: Live
    landed: Landed | None
    pruned_before: str
    # From the ledger: how far late events are counted. It has the id of the topic, and the arrival time up to which
    # records may be of an earlier topic.
    counted: LateCountPosition | None
    accounted: Collection[tuple[str, int]]
    # The first day for which accounts are kept.
    kept_from: str = ""
    # Since when there is a row about each batch; None if all rows are there.
    batches_since: datetime | None = None

    def due(self) -> list[Header]:
        """The slices that have no account at their version, oldest first. Slices before ``kept_from`` get none."""
        missing = self.headers.keys() - need_no_account(self.headers, self.accounted, self.kept_from)
        return [self.headers[name] for name in sorted(missing)[:MAX_SLICES]]


def read_inputs(lake: PipelineLake, final: FinalTable, accounts: Accounts | None) -> AccountInputs:
    """Read the tables, for the days that have live rows or a slice published since the last account."""
    live, ledger = lake.live(), lake.ledger()
    progress, kept_from, there = AccountProgress.read(lake), accounts_kept_from(final), final.days()
    changed = final.days_changed_since(progress.seen_ms if progress else 0)
    in_live = {day_of_slice(name) for name in live.slices()}
    days = {day for day in there if day >= kept_from} & changed | in_live & set(there)
    return AccountInputs(
        final=final,
        headers=final.headers(days),
        live=live,
        landed=lake.events(),
        pruned_before=PruneRequest.read(lake.documents(lake.pipeline.name)).before,
        counted=ledger.late_count_position() if ledger else None,
        accounted=accounts.done(days) if accounts else set(),
        kept_from=kept_from,
        batches_since=live.complete_since(),
    )


def events_due(lake: PipelineLake) -> int:
    """How many events are in the slices that have no account yet."""
    final = lake.final()
    return sum(header.events for header in read_inputs(lake, final, lake.accounts()).due()) if final else 0
