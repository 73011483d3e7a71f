"""What a slice says of itself: its boundary, the header beside its final rows, and its lines in the ledger."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from jobs.storage.json_line import JsonLine

# So begins the verdict of a slice that was rolled back: what it misses, somebody wants it to miss.
ROLLED_BACK = "rolled back"


class State(StrEnum):
    """Where a slice stands."""

    OPEN = "open"
    CLOSED = "closed"
    RECOMPUTING = "recomputing"
    AUDITING = "auditing"
    FINAL = "final"
    BLOCKED = "blocked"
    REOPENED = "reopened"


@dataclass(frozen=True, kw_only=True)
class Boundary(JsonLine):
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


@dataclass(frozen=True, kw_only=True)
class Header(JsonLine):
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
    # Events that came since it was computed, and are not in it.
    late: int = 0
    # Those of them that arrived before the slice was over. None: an older version of Tideline did not tell them apart.
    in_time: int | None = 0
    checks: str | None = None
    checksum: str | None = None
    reason: str = ""
    docs: str | None = None


def is_of(computed: Header | Entry, entry: Entry | None) -> bool:
    """Whether a line is of the run that has computed or published this."""
    return entry is not None and (entry.run, entry.version) == (computed.run, computed.version)


def is_passed(computed: Header | Entry, entry: Entry | None) -> bool:
    """Whether a run is at work on the next version, or another has made this one final.

    Below a line of this run nobody would find what the other leaves.
    """
    if entry is None:
        return False
    is_final_by_another = entry.state is State.FINAL and entry.run != computed.run
    return entry.version > computed.version or (entry.version == computed.version and is_final_by_another)


def reconciled(header: Header, entry: Entry | None) -> Entry:
    """What the ledger should say of a slice whose run died after its publish: the header wins.

    The boundary is the slice's, whoever has written the newest line; checks and page are those of a run.
    """
    own = entry if is_of(header, entry) else None
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
        late=own.late if own else 0,
        in_time=own.in_time if own else 0,
        checks=own.checks if own else None,
        checksum=header.checksum,
        reason=header.reason,
        docs=own.docs if own else None,
    )


def with_late(entry: Entry, more: int, at_ms: int, *, in_time: int = 0) -> Entry:
    """The same state with more late events, so many of them in time."""
    known = None if entry.in_time is None else entry.in_time + in_time
    return replace(entry, late=entry.late + more, in_time=known, at_ms=at_ms)
