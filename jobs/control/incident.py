"""What an incident is: what it is called, what happens to it, and what was told of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from jobs.pipelines import INGEST


def crash_loop(job: str) -> str:
    """The key of a stream that fails again and again."""
    return f"stream.{job}.crash-loop"


def stalled(job: str) -> str:
    """The key of a stream that lives and makes no step."""
    return f"stream.{job}.stalled"


def lost(source: str) -> str:
    """The key of records that `ingest` has passed over, since a reset told it to."""
    return f"stream.{INGEST}.lost.{source}"


def blocked(pipeline: str, slice_: str) -> str:
    """The key of a slice that its checks keep from being published."""
    return f"recompute.{pipeline}.blocked.{slice_}"


def served(pipeline: str) -> str:
    """The key of rows that are served and fail their checks."""
    return f"check.{pipeline}.served"


def unexplained(pipeline: str) -> str:
    """The key of a difference between live and final rows that nothing explains."""
    return f"account.{pipeline}.unexplained"


def failed_run(dag_id: str) -> str:
    """The key of a DAG whose newest run failed."""
    return f"dag.{dag_id}.failed"


def missed_deadline(dag_id: str) -> str:
    """The key of a DAG with a run that is late."""
    return f"dag.{dag_id}.deadline"


def unreadable(name: str) -> str:
    """The key of a small file that could not be read and was given up."""
    return f"document.{name}.unreadable"


def full_disk() -> str:
    """The key of a disk that has no room for the lake."""
    return "disk.lake.full"


class Happening(StrEnum):
    """What a document says."""

    OPENED = "opened"
    UPDATED = "updated"
    CLOSED = "closed"
    TOLD = "told"


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One incident as it stands: opened at, last word at, whether it is over, and whether people were told so."""

    key: str
    opened: float
    updated: float
    text: str
    closed: bool
    link: str | None = None
    # The last word before it was closed.
    was: str | None = None
    told_opened: bool = False
    told_closed: bool = False

    @property
    def told(self) -> bool:
        """Whether there is nothing left to tell."""
        return self.told_closed if self.closed else self.told_opened


@dataclass(frozen=True, kw_only=True)
class Untold:
    """A message that is due: about which word, what else it covers, and which channels have it already."""

    incident: Incident
    number: int
    newest: int
    sent: frozenset[str]
    attempts: Mapping[str, int]

    @property
    def due(self) -> float:
        """Since when it is due."""
        return self.incident.updated if self.incident.closed else self.incident.opened
