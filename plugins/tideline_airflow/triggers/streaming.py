"""Follows a streaming job from the triggerer, so that a running stream holds no worker slot.

It only polls. `jobs.control.epochs` decides the meaning of the documents in the control folder.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from jobs.control.epochs import WELL_SECONDS, Epoch, Health, Stop, Wait, stalled_queries
from jobs.control.folder import Control
from jobs.control.incident import crash_loop_key, failed_run_key, stalled_key
from jobs.control.incidents import Incidents
from jobs.control.room import Room
from jobs.pipelines.layout import dag_id_of
from jobs.storage.folders import folder_at
from jobs.times import utc
from tideline_airflow.links import address
from tideline_airflow.notifiers.delivery import deliver
from tideline_airflow.triggers.room import deliver_and_make_room

POLL_SECONDS = 1.0
_TELL_SECONDS = 60.0
# A stream runs for months, and its task has one log. The triggerer does not open it for appending, so nothing can empty
# it meanwhile.
_LOG_SECONDS = 3600.0


class StreamTrigger(BaseTrigger):
    """Fires when its epoch is over; without an epoch it fires when the job may be started again."""

    def __init__(self, *, lake_root: str, job: str, epoch: int | None) -> None:
        """Airflow stores the arguments in its database."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.lake_root = lake_root
        self.job = job
        self.epoch = epoch
        self._told: tuple[float, Health | None] = (0.0, None)
        self._logged_at = 0.0
        self._blind = False
        self._news = True
        self._delivery: asyncio.Future[None] | None = None
        self._room: Room | None = None
        self._short: tuple[float, bool] = (0.0, False)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class and the arguments with which the triggerer creates it again."""
        arguments = {"lake_root": self.lake_root, "job": self.job, "epoch": self.epoch}
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look every second. If a look fails, the next one follows all the same."""
        while not await self._is_known_to_be_over():
            self._start_delivery()
            await asyncio.sleep(POLL_SECONDS)
        yield TriggerEvent({"job": self.job, "epoch": self.epoch})  # type: ignore[no-untyped-call]

    async def on_kill(self) -> None:
        """Ask the driver to end after its micro-batch. Called when a person ended or cleared the task."""
        if self.epoch is not None:
            await asyncio.to_thread(ask_to_stop_once, self._control(), self.epoch)
            self.log.info("asked the driver of epoch %d to stop after its micro-batch", self.epoch)

    def _start_delivery(self) -> None:
        """If there is news, begin to send it in a thread: a channel that hangs must not delay the next look."""
        if self._news and (self._delivery is None or self._delivery.done()):
            self._news = False
            act = deliver_and_make_room if self._short[1] else deliver
            self._delivery = asyncio.ensure_future(asyncio.to_thread(act, folder_at(self.lake_root)))

    def _control(self) -> Control:
        return Control.of(folder_at(self.lake_root), self.job)

    async def _is_known_to_be_over(self) -> bool:
        """Whether to fire now; False if the control folder cannot be read."""
        try:
            return await asyncio.to_thread(self._is_over)
        except Exception as error:
            # Whatever the error of the store is, the next look may succeed. So the trigger goes on.
            if not self._blind:
                self.log.warning("the control folder of %s cannot be read, trying again: %s", self.job, error)
            self._blind = True
            return False

    def _is_over(self) -> bool:
        control, short = self._control(), self._has_no_room()
        if self.epoch is None:
            # A driver that is started on a full disk would only fail.
            return not short and not isinstance(control.next_step(), Wait)
        if control.newest() == 0:
            raise FileNotFoundError(f"{self.lake_root} has no documents of this stream: is the lake mounted?")
        epoch = control.epoch(self.epoch)
        health = control.health(epoch)
        self._blind = False
        self._report(epoch, health)
        return not health.alive or control.is_over(self.epoch)

    def _has_no_room(self) -> bool:
        """Whether the disk of the lake is full. Messages are sent at each change, and each minute while it is full."""
        self._room = self._room or Room.of(folder_at(self.lake_root))
        short, (told_at, before) = self._room.is_short(), self._short
        if short is not before or (short and time.monotonic() - told_at > _TELL_SECONDS):
            self._short, self._news = (time.monotonic(), short), True
        return short

    def _report(self, epoch: Epoch, health: Health) -> None:
        """Log the state when it changes and every hour; open and close incidents by the state every minute."""
        (told_at, told), now = self._told, time.monotonic()
        if health is told and now - told_at < _TELL_SECONDS:
            return
        self._told = (now, health)
        if health is not told or now - self._logged_at >= _LOG_SECONDS:
            self._logged_at = now
            self.log.info("%s epoch %d is %s%s", self.job, epoch.number, health, progress_of(epoch))
        self._keep_incidents(epoch, health)
        self._news = True

    def _keep_incidents(self, epoch: Epoch, health: Health) -> None:
        incidents = Incidents.of(folder_at(self.lake_root))
        if health is Health.STALLED:
            link = address(f"streams/{dag_id_of(self.job)}")
            incidents.open(stalled_key(self.job), stall_of(self.job, epoch), link=link)
        elif health is Health.RUNNING:
            incidents.close(stalled_key(self.job), "the stream makes steps again")
            if time.time() - epoch.taken > WELL_SECONDS:
                for key in (crash_loop_key(self.job), failed_run_key(dag_id_of(self.job))):
                    incidents.close(key, f"epoch {epoch.number} has run for more than {WELL_SECONDS / 60:.0f} minutes")


def ask_to_stop_once(control: Control, epoch: int) -> None:
    """Ask the driver to stop, because a person ended its task. If the driver was asked before, that request stays."""
    if control.stop_of(epoch) is None:
        control.ask_to_stop(epoch, Stop(time=time.time(), by="Airflow: its task was ended or cleared"))


def progress_of(epoch: Epoch) -> str:
    """The progress of each query, in a few words."""
    told = [
        f"{q.topic} batch {q.batch}, {q.rows:,} rows in {q.batch_seconds:.1f} s, lag {_known(q.lag)}"
        for q in epoch.queries
        if q.batch is not None
    ]
    return f" ({'; '.join(told)})" if told else ""


def _known(lag: int | None) -> str:
    return "unknown" if lag is None else f"{lag:,}"


def stall_of(job: str, epoch: Epoch) -> str:
    """The sentence about a stalled stream. It contains no growing number, else each look would update the incident."""
    stuck = [
        f"{query.topic} since {utc(query.stepped)} UTC, after batch {query.batch}"
        for query in stalled_queries(epoch, time.time())
    ]
    return (
        f"stream {job} runs but makes no step: {'; '.join(stuck)}. Its driver is left running. Look at its Spark UI "
        f"and at {epoch.log or 'its log'}: is Kafka slow, the disk full, or a micro-batch too large? If the driver "
        f"hangs, run `tideline streams restart {job}`"
    )
