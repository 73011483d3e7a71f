"""The incidents of a lake, for its operators: each is opened once, updated, and closed when it is over.

An incident is a series of small documents, and a reader combines them:

    KEY-NUMBER                  a word: it opens, updates or closes the incident; created once and never changed
    KEY-NUMBER.told             no message about the words up to this one is left to send
    KEY-NUMBER.CHANNEL.TRY      a message about this word: claimed by its sender, then sent
    dag.DAG.seen                a DAG's newest failed run that has an incident; one document for each DAG

At most one message is due per incident: that it is open, or that it is over. If an incident is over before the message
about its opening was sent, only one message is sent. It reports the end, and repeats the newest text about the problem.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.control.incident import Happening, Incident, Unsent, blocked_key, seen_failures, unreadable_key
from jobs.pipelines.layout import INCIDENTS
from jobs.storage.documents import UNREADABLE, Documents, Report
from jobs.storage.folders import Folder

# News about an open incident is stored once an hour at most, because some incidents get news every few minutes.
_NEWS_SECONDS = 3600.0
# A claim of this age without a sent message is void. Every channel sends, or gives up, in far less time.
CLAIM_SECONDS = 600.0
_NAME = re.compile(r"(?P<key>.+)-(?P<number>\d{6,})(?:\.(?P<told>told)|\.(?P<channel>\w+)\.(?P<attempt>\d+))?")


@dataclass(frozen=True, kw_only=True)
class _Word:
    """A document that opens, updates or closes an incident."""

    number: int
    happening: str
    time: float
    text: str
    link: str | None

    @property
    def closes(self) -> bool:
        return self.happening == Happening.CLOSED


@dataclass(frozen=True, kw_only=True)
class _Row:
    """The documents of one key, as their names show them."""

    key: str
    words: list[int] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    messages: dict[int, list[tuple[str, int]]] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        """The highest number in use.

        Example: a removal that was cut short has left only `KEY-000007.told`. Then 7 is in use, and the next word gets
        8. A new word with number 7 would count as announced.
        """
        return max([*self.words, *self.told, *self.messages], default=0)

    @property
    def is_told(self) -> bool:
        return max(self.told, default=0) >= max(self.words, default=0)

    def notes(self, numbers: range) -> tuple[list[str], list[str]]:
        """The names of the claims and of the `told` notes of these words."""
        claimed = [
            f"{_word(self.key, number)}.{channel}.{attempt}"
            for number in sorted(self.messages.keys() & set(numbers))
            for channel, attempt in self.messages[number]
        ]
        return claimed, [f"{_word(self.key, number)}.told" for number in sorted({*self.told} & set(numbers))]


class Incidents:
    """The incidents of a lake, each with a key such as `stream.ingest.crash-loop`."""

    def __init__(self, documents: Documents) -> None:
        """Use `of` for a lake."""
        self._documents = documents

    @classmethod
    def of(cls, lake_root: Folder) -> "Incidents":
        """The incidents of the lake below a root."""
        return cls(Documents.at(lake_root / INCIDENTS))

    def open(self, key: str, text: str, *, link: str | None = None) -> bool:
        """Open an incident, or add news to an open one; returns whether it was opened now."""
        return self._open(self._row(key), text, link)

    def open_all(self, texts: Mapping[str, str], *, link: str | None = None) -> None:
        """Open an incident for each key, as `open` does. The names are listed once for all of them."""
        rows = self._rows() if texts else {}
        for key, text in texts.items():
            self._open(rows.get(key) or _Row(key=key), text, link)

    def _open(self, row: _Row, text: str, link: str | None) -> bool:
        last = self._last(row)
        if last is None or last.closes:
            return self._add(row, Happening.OPENED, text, link)
        if last.text != text and time.time() - last.time > _NEWS_SECONDS:
            added = self._add(row, Happening.UPDATED, text, link)
            if added and row.is_told:
                # The message about the opening was sent, and news needs no further message.
                self._settle(row.key, row.newest + 1, ())
        return False

    def close(self, key: str, text: str) -> bool:
        """Close an incident; returns whether it was open."""
        return self._close(self._row(key), text)

    def _close(self, row: _Row, text: str) -> bool:
        last = self._last(row)
        return last is not None and not last.closes and self._add(row, Happening.CLOSED, text, None)

    def still_open(self, *prefixes: str) -> list[Incident]:
        """The open incidents with a key that begins with one of the prefixes."""
        rows = [row for row in self._rows().values() if row.key.startswith(prefixes)]
        # Most incidents are closed, and there are more and more of them. So only the last word of each is read.
        still = [row for row in rows if (last := self._last(row)) and not last.closes]
        return self._folded(still, lambda incident: not incident.closed)

    def close_blocked(self, pipeline: str, slices: Iterable[str]) -> None:
        """Close the incidents of slices that are final now. The names are listed once for all slices together."""
        keys = {blocked_key(pipeline, name) for name in slices}
        for row in self._rows().values() if keys else ():
            if row.key in keys:
                self._close(row, "the slice is final now")

    def discard_old(self, kept_seconds: float) -> int:
        """Remove incidents that ended at least this long ago and whose messages are sent; return how many documents.

        The oldest incident of a key goes first: its claims, its words from the opening on, and last its `told` notes.
        So a reader meanwhile finds an incident that is over and sent, or none. If a removal is cut short, the next one
        finishes it.
        """
        before, gone = time.time() - kept_seconds, 0
        for row in self._rows().values():
            names = [*self._left_behind(row, before), *self._old(row, before)]
            for name in names:
                self._documents.delete(name)
            gone += len(names)
        return gone

    def _old(self, row: _Row, before: float) -> list[str]:
        """The documents of incidents that may be removed, in the order of removal."""
        found: list[str] = []
        chapters = self._chapters(row)
        for at, chapter in enumerate(chapters):
            first, last = chapter[0], chapter[-1]
            # An incident with a later opening behind it is over, too: its closing word was lost.
            over = last.closes or at + 1 < len(chapters)
            if not (over and last.time < before and max(row.told, default=0) >= last.number):
                break
            claimed, told = row.notes(range(first.number, last.number + 1))
            words = [number for number in sorted(row.words) if first.number <= number <= last.number]
            found += [*claimed, *(_word(row.key, number) for number in words), *told]
        return found

    def _left_behind(self, row: _Row, before: float) -> list[str]:
        """The notes without their words, as left by a removal that was cut short."""
        claimed, told = row.notes(range(min(row.words, default=row.newest + 1)))
        # A listing that runs while a word and its note are written may show the note and miss the word. So new notes
        # are left alone.
        return [name for name in (*claimed, *told) if (self._documents.read(name) or {"time": 0})["time"] < before]

    def all(self) -> list[Incident]:
        """Every incident, the one with the newest word first."""
        return self._folded(self._rows().values())

    def _folded(self, rows: Iterable[_Row], wanted: Callable[[Incident], bool] = lambda _: True) -> list[Incident]:
        found = [_incident(row, chapter) for row in rows for chapter in self._chapters(row)]
        return sorted(filter(wanted, found), key=lambda incident: -incident.updated)

    def unsent(self) -> list[Unsent]:
        """The messages that are due, for each key in order. Only keys with a message left to send are read."""
        rows = [row for row in self._rows().values() if not row.is_told]
        found = [self._unsent(row, chapter) for row in rows for chapter in self._chapters(row)]
        return [unsent for unsent in found if not unsent.incident.told]

    def claim(self, unsent: Unsent, channel: str) -> str | None:
        """Claim the right to send a message over a channel; None if another process sent it or may be sending it."""
        newest = unsent.attempts.get(channel, 0)
        if newest and self._is_held(_attempt(unsent, channel, newest)):
            return None
        name = _attempt(unsent, channel, newest + 1)
        return name if self._documents.create(name, {"time": time.time(), "sent": False}) else None

    def note_sent(self, claim: str) -> None:
        """Note that the message of a claim was sent."""
        self._documents.replace(claim, {"time": time.time(), "sent": True})

    def give_back(self, claim: str) -> None:
        """Give up a claim after its message could not be sent, so that any process may try again."""
        self._documents.delete(claim)

    def settle(self, unsent: Unsent, channels: Iterable[str]) -> None:
        """Note that no message is left to send about it, and that these channels sent it."""
        self._settle(unsent.incident.key, unsent.newest, channels)

    def note_failure(self, dag_id: str, run_id: str) -> None:
        """Note that the failure of a run has its incident, under any key."""
        self._documents.replace(seen_failures(dag_id), {"run": run_id})

    def knows_failure(self, dag_id: str, run_id: str) -> bool:
        """Whether the failure of this run was noted."""
        return self._documents.read(seen_failures(dag_id)) == {"run": run_id}

    def _settle(self, key: str, number: int, channels: Iterable[str]) -> None:
        told = {"happening": Happening.ANNOUNCED, "time": time.time(), "channels": sorted(channels)}
        self._documents.create(f"{_word(key, number)}.told", told)

    def _is_held(self, claim: str) -> bool:
        document = self._documents.read(claim)
        if document is None:
            # If the claim is gone, it was given back a moment ago. It counts as held, because another process may be
            # claiming it again. If it exists, a power cut has emptied it, and it is free.
            return not self._documents.exists(claim)
        # Clocks differ and are corrected: a claim from far in the future is as void as an old one.
        return bool(document["sent"]) or abs(time.time() - document["time"]) < CLAIM_SECONDS

    def _rows(self) -> dict[str, _Row]:
        """All rows, from one listing of the names."""
        rows: dict[str, _Row] = {}
        for name in self._documents.names():
            parts = _NAME.fullmatch(name)
            if parts is None:
                continue
            row = rows.setdefault(parts["key"], _Row(key=parts["key"]))
            number = int(parts["number"])
            if parts["told"]:
                row.told.append(number)
            elif parts["channel"]:
                row.messages.setdefault(number, []).append((parts["channel"], int(parts["attempt"])))
            else:
                row.words.append(number)
        return rows

    def _row(self, key: str) -> _Row:
        return self._rows().get(key) or _Row(key=key)

    def _read(self, key: str, number: int) -> _Word | None:
        document = self._documents.read(_word(key, number))
        if document is None:
            return None
        known = {name: document[name] for name in ("happening", "time", "text")}
        return _Word(number=number, link=document.get("link"), **known)

    def _last(self, row: _Row) -> _Word | None:
        """The newest word that a power cut has not emptied."""
        words = (self._read(row.key, number) for number in sorted(row.words, reverse=True))
        return next((word for word in words if word), None)

    def _chapters(self, row: _Row) -> list[list[_Word]]:
        """The words of each incident that had this key."""
        chapters: list[list[_Word]] = []
        for number in sorted(row.words):
            word = self._read(row.key, number)
            if word and (word.happening == Happening.OPENED or not chapters):
                chapters.append([])
            if word:
                chapters[-1].append(word)
        return chapters

    def _unsent(self, row: _Row, chapter: Sequence[_Word]) -> Unsent:
        incident = _incident(row, chapter)
        number = chapter[-1].number if incident.closed else chapter[0].number
        attempts: dict[str, int] = {}
        sent = set()
        for channel, attempt in row.messages.get(number, ()) if not incident.told else ():
            attempts[channel] = max(attempt, attempts.get(channel, 0))
            document = self._documents.read(f"{_word(row.key, number)}.{channel}.{attempt}")
            if document and document["sent"]:
                sent.add(channel)
        return Unsent(
            incident=incident, number=number, newest=chapter[-1].number, sent=frozenset(sent), attempts=attempts
        )

    def _add(self, row: _Row, happening: Happening, text: str, link: str | None) -> bool:
        """Add the next word after the listed ones. Of several processes that add one at once, only one succeeds."""
        document: dict[str, Any] = {"happening": happening, "time": time.time(), "text": text}
        return self._documents.create(
            _word(row.key, row.newest + 1), document if link is None else {**document, "link": link}
        )


def report_of(lake_root: Folder) -> Report:
    """Return a function that reports an unreadable small file by an incident that is over at once."""

    def report(file: Path) -> None:
        incidents, name = Incidents.of(lake_root), str(file.relative_to(str(lake_root)))
        key = unreadable_key(name.replace("/", "."))
        copies = file.parent / UNREADABLE
        incidents.open(key, f"file {name} could not be read, as after a power cut; a copy is kept in {copies}")
        incidents.close(key, "the file counts as missing, and work goes on without it")

    return report


def _word(key: str, number: int) -> str:
    return f"{key}-{number:06d}"


def _attempt(unsent: Unsent, channel: str, attempt: int) -> str:
    return f"{_word(unsent.incident.key, unsent.number)}.{channel}.{attempt}"


def _incident(row: _Row, chapter: Sequence[_Word]) -> Incident:
    first, last = chapter[0], chapter[-1]
    told = [number for number in row.told if first.number <= number <= last.number]
    before = [word for word in chapter if not word.closes]
    return Incident(
        key=row.key,
        opened=first.time,
        updated=last.time,
        text=last.text,
        closed=last.closes,
        link=next((word.link for word in reversed(chapter) if word.link), None),
        was=before[-1].text if last.closes and before else None,
        told=last.number in told if last.closes else bool(told),
    )
