"""Waits for room on the disk of the lake: a task that waits holds no worker slot, and uses up none of its tries."""

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
    """Have the incident told, and delete what no reader needs: on a full disk there may be no driver that does it."""
    deliver(lake_root)
    # The library for tables takes memory, which the triggerer need not spend before.
    from jobs.lake.delta.freeing import make_room

    make_room(lake_root)


class RoomTrigger(BaseTrigger):
    """Fires when the disk of a lake has room."""

    def __init__(self, *, lake_root: str) -> None:
        """All of it goes through Airflow's database."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.lake_root = lake_root

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """How the triggerer makes it again."""
        return f"{type(self).__module__}.{type(self).__qualname__}", {"lake_root": self.lake_root}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look every few seconds, make room once a minute, and have the incident told, its end too."""
        root, told_at = folder_at(self.lake_root), 0.0
        room = Room.of(root)
        while await asyncio.to_thread(room.is_short):
            if time.monotonic() - told_at > _TELL_SECONDS or not told_at:
                told_at = time.monotonic()
                await asyncio.to_thread(deliver_and_make_room, root)
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.to_thread(deliver, root)
        yield TriggerEvent({})  # type: ignore[no-untyped-call]
