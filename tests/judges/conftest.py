"""Worlds of the simulation."""

from pathlib import Path

import pytest

from jobs.pipelines import days
from tests.judges.histories import world_of
from tests.judges.simulated_world import SUM, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A world in which no slice fails its checks."""
    world = world_of(tmp_path, 3)
    world.bad = set()
    return world


@pytest.fixture
def old(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world in which everything before the tide line counts as settled."""
    monkeypatch.setattr(days, "_MORE_HOURS", -SUM.source.horizon_hours)
    return world
