"""The records about a slice: its boundary, the header beside its final rows, and its lines in the ledger."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from jobs.storage.json_line import JsonLine

# The verdict of a rolled-back slice begins with these words. Such a slice deliberately omits later events, so they do
# not reopen it.
ROLLED_BACK = "rolled back"


class State(StrEnum):
    """The states of a slice."""

    OPEN = "open"
    CLOSED = "closed"
    RECOMPUTING = "recomputing"
    AUDITING = "auditing"
    FINAL = "final"
    BLOCKED = "blocked"
    REOPENED = "reopened"


@dataclass(frozen=True, kw_only=True)
class Boundary(JsonLine):
    """End offsets of a topic, taken once when a slice is over. All records before them count for the slice."""

    topic_id: str
    ends: Mapping[int, int]

    def is_reached(self, landed: Mapping[int, int]) -> bool:
        """Whether all records before the boundary are landed.

        >>> Boundary(topic_id="t1", ends={0: 41_200, 1: 39_870}).is_reached({0: 41_200, 1: 39_869})
        False
        """
        return all(landed.get(partition, 0) >= end for partition, end in self.ends.items())

    def missing(self, landed: Mapping[int, int]) -> str:
        """Return a text about the offsets that are not landed yet, per partition.

        >>> Boundary(topic_id="t1", ends={0: 41_200, 1: 39_870}).missing({0: 41_200, 1: 39_869})
        'partition 1: 1 offsets'
        """
        behind = {p: end - landed.get(p, 0) for p, end in self.ends.items() if landed.get(p, 0) < end}
        return ", ".join(f"partition {p}: {count:,} offsets" for p, count in behind.items())


@dataclass(frozen=True, kw_only=True)
class Header(JsonLine):
    """The header of a final slice. ``offsets``: how far the topic was landed when the slice was planned."""

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
class LedgerLine:
    """A line of the ledger: the state of a slice from a moment on, with the facts known at that moment."""

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
    # Events that came after the slice was computed, so they are not in it.
    late: int = 0
    # How many of these events had arrived in time (`is_in_time`). They are not in the slice because a wrong clock let
    # it be computed too early. None: an older version of Tideline wrote the line, and did not count them separately.
    in_time: int | None = 0
    checks: str | None = None
    checksum: str | None = None
    reason: str = ""
    docs: str | None = None


def is_of(computed: Header | LedgerLine, entry: LedgerLine | None) -> bool:
    """Whether a line comes from the run that computed or published this version."""
    return entry is not None and (entry.run, entry.version) == (computed.run, computed.version)


def is_superseded(computed: Header | LedgerLine, entry: LedgerLine | None) -> bool:
    """Whether a slice has moved on since a run computed it (``computed``), by the slice's newest line (``entry``).

    It has moved on if that line is about a later version, or if another run has made the same version final. Then the
    run of ``computed`` must not write a line. Its line would be the newest one, and would hide the slice's state.

    In the example the run has computed version 2. If another run only audits version 2, the slice has not moved on.

    >>> own = LedgerLine(slice="20260131T120000Z", state=State.AUDITING, at_ms=0, run="own", version=2)
    >>> is_superseded(own, replace(own, run="another")), is_superseded(own, replace(own, run="another", version=3))
    (False, True)
    >>> is_superseded(own, replace(own, state=State.FINAL))
    False
    >>> is_superseded(own, replace(own, run="another", state=State.FINAL))
    True
    """
    if entry is None:
        return False
    is_final_by_another = entry.state is State.FINAL and entry.run != computed.run
    return entry.version > computed.version or (entry.version == computed.version and is_final_by_another)


def reconciled(header: Header, entry: LedgerLine | None) -> LedgerLine:
    """Return the ledger line of a published slice, made from its header. ``entry`` is the slice's newest line.

    The run that published the slice may have been killed before it wrote this line. The boundary belongs to the slice,
    so it is taken from a line of any run. The counts of late events, the checks and the page of the audit belong to a
    run. So they are taken only from a line of the same run.
    """
    own = entry if is_of(header, entry) else None
    return LedgerLine(
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


def with_late(entry: LedgerLine, more: int, at_ms: int, *, in_time: int = 0) -> LedgerLine:
    """Return a line with the same state, and with ``more`` late events added; ``in_time`` of these arrived in time.

    >>> entry = LedgerLine(slice="20260131T120000Z", state=State.FINAL, at_ms=0, run="r", late=5, in_time=1)
    >>> later = with_late(entry, 3, at_ms=60_000, in_time=2)
    >>> later.late, later.in_time
    (8, 3)
    """
    known = None if entry.in_time is None else entry.in_time + in_time
    return replace(entry, late=entry.late + more, in_time=known, at_ms=at_ms)
