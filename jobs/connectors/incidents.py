"""What an operator must know: opened once, updated, closed when it is over.

An incident is a row of small documents, each created once and never changed; readers fold them.
"""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path

from jobs.connectors.documents import Documents
from jobs.pipelines.spec import INCIDENTS

# News of an open incident is kept once an hour: one that repeats every few minutes needs no line for each time.
_NEWS_SECONDS = 3600.0


def crash_loop(job: str) -> str:
    """The key of a stream that fails again and again."""
    return f"stream.{job}.crash-loop"


def stalled(job: str) -> str:
    """The key of a stream that lives and makes no step."""
    return f"stream.{job}.stalled"


class Happening(StrEnum):
    """What a document says."""

    OPENED = "opened"
    UPDATED = "updated"
    CLOSED = "closed"


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One incident as it stands: opened at, last word at, and whether it is over."""

    key: str
    opened: float
    updated: float
    text: str
    closed: bool


class Incidents:
    """The incidents of a lake, each known by a key such as `stream.ingest.crash-loop`."""

    def __init__(self, documents: Documents) -> None:
        """Use `of` for a lake."""
        self._documents = documents

    @classmethod
    def of(cls, lake_root: Path) -> "Incidents":
        """Those of the lake below a root."""
        return cls(Documents.at(lake_root / INCIDENTS))

    def open(self, key: str, text: str) -> bool:
        """Open an incident, or say something new about one that is open; whether it was opened now."""
        names = self._names(key)
        last = self._last(key, names)
        if last is None or last.closed:
            return self._add(key, names, Happening.OPENED, text)
        if last.text != text and time.time() - last.updated > _NEWS_SECONDS:
            self._add(key, names, Happening.UPDATED, text)
        return False

    def close(self, key: str, text: str) -> bool:
        """Close an incident; whether it was open."""
        names = self._names(key)
        last = self._last(key, names)
        return last is not None and not last.closed and self._add(key, names, Happening.CLOSED, text)

    def still_open(self, *prefixes: str) -> list[Incident]:
        """Those that are not over and whose key begins so."""
        return [found for found in self.all() if not found.closed and found.key.startswith(prefixes)]

    def all(self) -> list[Incident]:
        """Every incident, the one with the newest word first."""
        by_key = groupby(self._documents.names(), key=_key)
        found = [incident for key, names in by_key for incident in self._fold(key, names)]
        return sorted(found, key=lambda incident: -incident.updated)

    def _names(self, key: str) -> list[str]:
        return [name for name in self._documents.names() if _key(name) == key]

    def _last(self, key: str, names: list[str]) -> Incident | None:
        return next(iter(reversed(self._fold(key, names))), None)

    def _fold(self, key: str, names: Iterable[str]) -> list[Incident]:
        incidents: list[Incident] = []
        for name in names:
            said = self._documents.read(name)
            if said is None:
                continue
            closed = said["happening"] == Happening.CLOSED
            if said["happening"] == Happening.OPENED or not incidents:
                incidents.append(
                    Incident(key=key, opened=said["time"], updated=said["time"], text=said["text"], closed=closed)
                )
            else:
                changes = {"updated": said["time"], "text": said["text"], "closed": closed}
                incidents[-1] = Incident(**{**asdict(incidents[-1]), **changes})
        return incidents

    def _add(self, key: str, names: list[str], happening: Happening, text: str) -> bool:
        """The next word after those that were seen: of several that say one at once, one is heard."""
        number = max((int(name.rpartition("-")[2]) for name in names), default=0) + 1
        document = {"happening": happening, "time": time.time(), "text": text}
        return self._documents.create(f"{key}-{number:06d}", document)


def _key(name: str) -> str:
    return name.rpartition("-")[0]
