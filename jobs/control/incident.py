"""The parts of an incident: its key, the kinds of its documents, its state, and a message that is due."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from jobs.pipelines import INGEST


def crash_loop_key(job: str) -> str:
    """The key of a stream that fails again and again."""
    return f"stream.{job}.crash-loop"


def stalled_key(job: str) -> str:
    """The key of a stream that runs but makes no progress."""
    return f"stream.{job}.stalled"


def lost_key(source: str) -> str:
    """The key of records that `ingest` passed over because of a reset."""
    return f"stream.{INGEST}.lost.{source}"


def blocked_key(pipeline: str, slice_: str) -> str:
    """The key of a slice that failed its audit and is not published."""
    return f"recompute.{pipeline}.blocked.{slice_}"


def served_key(pipeline: str) -> str:
    """The key of served rows that fail their checks."""
    return f"check.{pipeline}.served"


def unexplained_key(pipeline: str) -> str:
    """The key of a difference between live and final rows that no event explains."""
    return f"account.{pipeline}.unexplained"


def failed_run_key(dag_id: str) -> str:
    """The key of a DAG after a failure of its newest run."""
    return f"dag.{dag_id}.failed"


def missed_deadline_key(dag_id: str) -> str:
    """The key of a DAG with a run that missed its deadline."""
    return f"dag.{dag_id}.deadline"


def unreadable_key(name: str) -> str:
    """The key of a small file that could not be read and was given up."""
    return f"document.{name}.unreadable"


def full_disk_key() -> str:
    """The key of a disk that has no room for the lake."""
    return "disk.lake.full"


def seen_failures(dag_id: str) -> str:
    """Where the failed runs of a DAG that were seen are noted. This is no incident."""
    return f"dag.{dag_id}.seen"


class Happening(StrEnum):
    """The kind of a document of an incident."""

    OPENED = "opened"
    UPDATED = "updated"
    CLOSED = "closed"
    ANNOUNCED = "told"


@dataclass(frozen=True, kw_only=True)
class Incident:
    """The state of one incident: its times, its text, whether it is over, and whether its message was sent."""

    key: str
    opened: float
    updated: float
    text: str
    closed: bool
    link: str | None = None
    # The last text before it was closed.
    was: str | None = None
    # Whether no message about it is left to send.
    told: bool = False


@dataclass(frozen=True, kw_only=True)
class Unsent:
    """A message that is due.

    ``number`` is the number of the document that the message reports: the incident's opening or its end.
    ``newest`` is the number of the incident's newest document: the message covers all documents up to it.
    ``sent`` has the channels that have sent it, and ``attempts`` the number of each channel's newest attempt.
    """

    incident: Incident
    number: int
    newest: int
    sent: frozenset[str]
    attempts: Mapping[str, int]

    @property
    def due(self) -> float:
        """The time since which it is due."""
        return self.incident.updated if self.incident.closed else self.incident.opened
