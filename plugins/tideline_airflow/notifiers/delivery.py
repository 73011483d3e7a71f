"""Sends the messages about incidents that are due through every channel. The next delivery repeats those that failed.

Any process may deliver, and several may at once. Each claims a message before it sends it, and notes that it was sent.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from airflow.sdk.log import redact  # type: ignore[attr-defined]

from jobs.control.incident import Incident, Unsent
from jobs.control.incidents import Incidents
from jobs.storage.folders import Folder
from jobs.times import utc
from tideline_airflow.notifiers.channels import Message, Send, channels

# Shorter than the time that Airflow gives a task's callbacks. The next delivery sends the messages that are left.
_DELIVERY_SECONDS = 12.0
# A failed lookup of connections looks like a lookup without a result. So a message is dropped for lack of a channel
# only after this time.
NOBODY_SECONDS = 600.0

log = logging.getLogger(__name__)


def deliver(lake_root: Folder) -> None:
    """Send every message that is due. It never raises: an alert that cannot be sent must not fail its caller."""
    try:
        incidents = Incidents.of(lake_root)
        due = sorted(incidents.unsent(), key=lambda unsent: unsent.due)
        if due:
            _Delivery(incidents=incidents, channels=channels()).send(due)
    except Exception as error:
        log.warning("messages about incidents could not be sent, the next delivery tries again: %s", _sentence(error))


def message(incident: Incident) -> Message:
    """The message about an incident: that it is open, or that it is over."""
    opened, link = utc(incident.opened), incident.link
    if not incident.closed:
        text = f"{incident.text}\nSince {opened} UTC."
        return Message(subject=f"[tideline] opened: {incident.key}", text=text, link=link, good=False)
    lasted = timedelta(seconds=round(incident.updated - incident.opened))
    was = f"\nThe problem was: {incident.was}" if incident.was else ""
    text = f"{incident.text}{was}\nIt began at {opened} UTC and lasted {lasted}."
    return Message(subject=f"[tideline] recovered: {incident.key}", text=text, link=link, good=True)


@dataclass(frozen=True, kw_only=True)
class _Delivery:
    """One round over all messages that are due. A channel that failed is not used again in this round."""

    incidents: Incidents
    channels: Mapping[str, Send]
    dead: set[str] = field(default_factory=set)

    def send(self, due: list[Unsent]) -> None:
        until = time.monotonic() + _DELIVERY_SECONDS
        waiting: set[str] = set()
        for unsent in due:
            key = unsent.incident.key
            if time.monotonic() > until:
                log.warning("there was no time for all messages about incidents: the next delivery sends the rest")
                return
            # Messages of one key are sent in order: a recovery must not be announced after the next failure.
            if key in waiting or not self._deliver(unsent):
                waiting.add(key)

    def _deliver(self, unsent: Unsent) -> bool:
        """Send a message through all channels; return whether nothing is left to do for it."""
        if not self.channels:
            nobody = time.time() - unsent.due > NOBODY_SECONDS
            if nobody:
                self.incidents.settle(unsent, ())
            return nobody
        missing = [name for name in self.channels if name not in unsent.sent]
        sent = unsent.sent | {name for name in missing if self._send_through(unsent, name)}
        done = sent >= self.channels.keys()
        if done:
            self.incidents.settle(unsent, sent)
        return done

    def _send_through(self, unsent: Unsent, channel: str) -> bool:
        """Try to send a message through one channel; return whether this process has sent it."""
        claim = None if channel in self.dead else self.incidents.claim(unsent, channel)
        if claim is None:
            return False
        try:
            self.channels[channel](message(unsent.incident))
        except Exception as error:
            self.dead.add(channel)
            self.incidents.give_back(claim)
            key = unsent.incident.key
            log.warning("%s could not send %s, the next delivery tries again: %s", channel, key, _sentence(error))
            return False
        self.incidents.note_sent(claim)
        return True


def _sentence(error: Exception) -> str:
    return str(redact(f"{type(error).__name__}: {error}"))
