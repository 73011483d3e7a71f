"""Waits for room on the disk of the lake. A waiting task holds no worker slot, and uses up no try."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from jobs.control.room import Room
from jobs.storage.folders import Folder, folder_at
from tideline_airflow.notifiers.delivery import deliver

POLL_SECONDS = 5.0
_TELL_SECONDS = 60.0


def deliver_and_make_room(lake_root: Folder) -> None:
    """Send due messages, and delete files that no reader needs. On a full disk perhaps no driver runs to do it."""
    deliver(lake_root)
    # Imported late: the library for tables takes memory, and the triggerer needs it only on a full disk.
    from jobs.lake.delta.freeing import make_room

    make_room(lake_root)


class RoomTrigger(BaseTrigger):
    """Fires when the disk of a lake has room."""

    def __init__(self, *, lake_root: str) -> None:
        """Airflow stores the arguments in its database."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.lake_root = lake_root

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class and the arguments with which the triggerer creates it again."""
        return f"{type(self).__module__}.{type(self).__qualname__}", {"lake_root": self.lake_root}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look every few seconds. Make room and send due messages once a minute, and send messages at the end."""
        root, told_at = folder_at(self.lake_root), 0.0
        room = Room.of(root)
        while await asyncio.to_thread(room.is_short):
            if time.monotonic() - told_at > _TELL_SECONDS or not told_at:
                told_at = time.monotonic()
                await asyncio.to_thread(deliver_and_make_room, root)
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.to_thread(deliver, root)
        yield TriggerEvent({})  # type: ignore[no-untyped-call]
