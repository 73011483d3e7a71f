"""What becomes of a slice: when it is closed, whether it is due, and why. Decisions only, on plain data."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Self

from jobs.pipelines.slices import Slice, slice_named, slices_between
from jobs.pipelines.spec import Pipeline

# The broker's clock stamps arrivals, this machine's clock says when a slice is over: they may differ by this much.
CLOCK_SKEW_MS = 5_000


class State(StrEnum):
    """Where a slice stands."""

    OPEN = "open"
    CLOSED = "closed"
    RECOMPUTING = "recomputing"
    AUDITING = "auditing"
    FINAL = "final"
    BLOCKED = "blocked"
    REOPENED = "reopened"


# A run that dies leaves its slices so: the next one takes them again.
_UNFINISHED = (State.CLOSED, State.RECOMPUTING, State.AUDITING, State.REOPENED)


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """End offsets of a topic, taken once when nothing more can come in time. All before them belongs to the slice."""

    topic_id: str
    ends: Mapping[int, int]

    def is_reached(self, landed: Mapping[int, int]) -> bool:
        """Whether everything before it has been landed."""
        return all(landed.get(partition, 0) >= end for partition, end in self.ends.items())

    def missing(self, landed: Mapping[int, int]) -> str:
        """What is not landed yet, in words."""
        behind = {p: end - landed.get(p, 0) for p, end in self.ends.items() if landed.get(p, 0) < end}
        return ", ".join(f"partition {p}: {count:,} offsets" for p, count in behind.items())

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read `to_json` back."""
        read = json.loads(text)
        return cls(topic_id=read["topic_id"], ends={int(p): end for p, end in read["ends"].items()})


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a final slice says of itself. ``offsets`` is how far the topic was landed in what was counted."""

    slice: str
    slice_seconds: int
    version: int
    as_of_ms: int
    run: str
    fingerprint: str
    topic_id: str
    offsets: Mapping[int, int]
    events_version: int
    rows: int
    events: int
    checksum: str
    verdict: str
    reason: str

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read `to_json` back."""
        read = json.loads(text)
        return cls(**{**read, "offsets": {int(p): end for p, end in read["offsets"].items()}})


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A line of the ledger: the state of a slice from a moment on, with all that is known of it then."""

    slice: str
    state: State
    at_ms: int
    run: str
    version: int = 0
    fingerprint: str = ""
    boundary: Boundary | None = None
    offsets: Mapping[int, int] = field(default_factory=dict)
    events_version: int | None = None
    rows: int | None = None
    events: int | None = None
    late: int = 0
    checksum: str | None = None
    reason: str = ""
    docs: str | None = None


@dataclass(frozen=True, kw_only=True)
class Topic:
    """The topic as the plan found it: its ends count open transactions, too."""

    topic_id: str
    earliest: Mapping[int, int]
    ends: Mapping[int, int]

    def landed(self, ends: Mapping[int, int]) -> dict[int, int]:
        """How far it is landed. A partition of which nothing ever was begins at its first record: so will ingest."""
        return {partition: ends.get(partition, first) for partition, first in self.earliest.items()}


@dataclass(frozen=True, kw_only=True)
class Request:
    """Slices that somebody asks for, whatever their state; without any, a run takes what is due."""

    slices: tuple[Slice, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Due:
    """A slice to be recomputed, and why. ``version`` is the one that is served now; 0: none."""

    slice: Slice
    version: int
    reason: str
    boundary: Boundary
    late: int = 0


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a plan finds."""

    tide_line_ms: int | None
    due: tuple[Due, ...]
    # Slices whose time has come, and which wait for ingest; each with its boundary.
    waiting: Mapping[Slice, Boundary]
    # Boundaries that are taken now, to be written down before anything else.
    taken: Mapping[Slice, Boundary]
    # Asked for, but not closed: with the sentence.
    refused: Mapping[Slice, str]
    blocked: tuple[Slice, ...]
    outdated: tuple[Slice, ...]
    # Published, but a run died before it told the ledger and the topic.
    untold: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Known:
    """What tables and topic say when a plan is made."""

    now_ms: int
    first_ms: int | None
    topic: Topic
    landed: Mapping[int, int]
    headers: Mapping[str, Header]
    entries: Mapping[str, Entry]
    # Late events of final slices since the last plan.
    late: Mapping[str, int] = field(default_factory=dict)


def closes_at(pipeline: Pipeline, slice_: Slice) -> int:
    """The moment from which nothing that arrives for a slice is in time."""
    return slice_.end_ms + pipeline.window.reach_ms + pipeline.allowed_lateness_seconds * 1000 + CLOCK_SKEW_MS


def over(pipeline: Pipeline, known: Known) -> list[Slice]:
    """Every slice since the first event whose time has come."""
    starts = [known.first_ms] if known.first_ms is not None else []
    starts += [slice_named(pipeline, min(known.headers)).start_ms] if known.headers else []
    if not starts:
        return []
    last = known.now_ms - closes_at(pipeline, Slice(0, 0))
    return [s for s in slices_between(pipeline, min(starts), known.now_ms) if s.end_ms <= last]


def survey(pipeline: Pipeline, known: Known, request: Request | None = None) -> Survey:
    """What is closed, what is due, and what a run would do."""
    slices = over(pipeline, known)
    asked = set(request.slices) if request else set()
    refused = {s: _not_over(pipeline, s, known.now_ms) for s in asked if closes_at(pipeline, s) > known.now_ms}
    candidates = sorted({*slices, *(asked - set(refused))})
    taken: dict[Slice, Boundary] = {}
    waiting: dict[Slice, Boundary] = {}
    due: list[Due] = []
    for slice_ in candidates:
        if request and slice_ not in asked:
            if _boundary(known, slice_) is None:
                taken[slice_] = _now(known)
            continue
        reason = request.reason if request else _reason(pipeline, known, slice_)
        boundary = _boundary(known, slice_)
        if boundary is None:
            boundary = taken[slice_] = _now(known)
        if reason is None:
            continue
        if not boundary.is_reached(known.landed):
            waiting[slice_] = boundary
            continue
        header = known.headers.get(slice_.name)
        due.append(
            Due(
                slice=slice_,
                version=header.version if header else 0,
                reason=reason,
                boundary=boundary,
                late=_late(known, slice_.name),
            )
        )
    if request:
        refused |= {s: f"ingest has yet to land {b.missing(known.landed)}" for s, b in waiting.items()}
    return Survey(
        tide_line_ms=tide_line(slices, known.headers),
        due=tuple(due),
        waiting=waiting,
        taken=taken,
        refused=refused,
        blocked=tuple(s for s in slices if _state(known, s) is State.BLOCKED),
        outdated=tuple(s for s in slices if _is_outdated(pipeline, known, s)),
        untold=tuple(name for name, header in known.headers.items() if _is_untold(header, known.entries.get(name))),
    )


def tide_line(slices: Sequence[Slice], headers: Collection[str]) -> int | None:
    """The end of the last slice up to which every slice is final; none if the first is not."""
    line = None
    for slice_ in slices:
        if slice_.name not in headers:
            break
        line = slice_.end_ms
    return line


def reconciled(header: Header, entry: Entry | None) -> Entry:
    """What the ledger should say of a slice whose run died after its publish: the header wins."""
    return Entry(
        slice=header.slice,
        state=State.FINAL,
        at_ms=header.as_of_ms,
        run=header.run,
        version=header.version,
        fingerprint=header.fingerprint,
        boundary=entry.boundary if entry else None,
        offsets=header.offsets,
        events_version=header.events_version,
        rows=header.rows,
        events=header.events,
        checksum=header.checksum,
        reason=header.reason,
        docs=entry.docs if entry else None,
    )


def with_late(entry: Entry, more: int, at_ms: int) -> Entry:
    """The same state with more late events."""
    return replace(entry, late=entry.late + more, at_ms=at_ms)


def too_late(pipeline: Pipeline, late: int, events: int) -> bool:
    """Whether so many late events reopen a slice of so many events."""
    return late > pipeline.reopen_rows or late > pipeline.reopen_share * events


def _reason(pipeline: Pipeline, known: Known, slice_: Slice) -> str | None:
    """Why a scheduled run takes a slice; none if it does not."""
    header, entry = known.headers.get(slice_.name), known.entries.get(slice_.name)
    late = _late(known, slice_.name)
    if header is None:
        if entry and entry.state is State.BLOCKED:
            return _reason_to_try_again(pipeline, entry, late)
        return "closed"
    if late and too_late(pipeline, late, header.events):
        if entry and entry.state is State.BLOCKED and entry.version > header.version:
            return _reason_to_try_again(pipeline, entry, late)
        return f"{late:,} late events"
    if entry and entry.state in _UNFINISHED and entry.version > header.version:
        return f"unfinished: {entry.reason}" if not entry.reason.startswith("unfinished") else entry.reason
    return None


def _reason_to_try_again(pipeline: Pipeline, entry: Entry, late: int) -> str | None:
    """A blocked slice would be blocked again, unless something has changed."""
    if entry.fingerprint != pipeline.fingerprint:
        return "blocked, and its definition has changed"
    return f"blocked, and {late:,} events came since" if late > entry.late else None


def _boundary(known: Known, slice_: Slice) -> Boundary | None:
    """The one that was taken; of a topic that was re-created since it says nothing."""
    entry = known.entries.get(slice_.name)
    boundary = entry.boundary if entry else None
    return boundary if boundary and boundary.topic_id == known.topic.topic_id else None


def _now(known: Known) -> Boundary:
    return Boundary(topic_id=known.topic.topic_id, ends=dict(known.topic.ends))


def _late(known: Known, name: str) -> int:
    entry = known.entries.get(name)
    return (entry.late if entry else 0) + known.late.get(name, 0)


def _state(known: Known, slice_: Slice) -> State | None:
    entry = known.entries.get(slice_.name)
    return entry.state if entry else None


def _is_outdated(pipeline: Pipeline, known: Known, slice_: Slice) -> bool:
    header = known.headers.get(slice_.name)
    return header is not None and header.fingerprint != pipeline.fingerprint


def _is_untold(header: Header, entry: Entry | None) -> bool:
    return (
        entry is None
        or entry.version < header.version
        or (entry.version == header.version and entry.state is not State.FINAL)
    )


def _not_over(pipeline: Pipeline, slice_: Slice, now_ms: int) -> str:
    return f"it is not over: late events are awaited for {(closes_at(pipeline, slice_) - now_ms) / 1000:.0f} s more"


def _start_ms(pipeline: Pipeline, name: str) -> int:
    from jobs.pipelines.slices import slice_named

    return slice_named(pipeline, name).start_ms
