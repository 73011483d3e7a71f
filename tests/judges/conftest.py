"""What the simulation needs beside its worlds."""

import json
from pathlib import Path

import pytest

from jobs.finality import rollback
from jobs.lake.slices import Header
from jobs.pipelines import days
from tests.judges.histories import world_of
from tests.judges.simulated_world import SUM, World


@pytest.fixture
def staged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage rolled-back rows in the form that the model reads."""

    def stage_again(stage: Path, header: Header, rows: object) -> tuple[Path, ...]:
        file = stage / f"{header.slice}-{header.version}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        (row,) = rows.to_pylist() or [{"events": 0}]  # type: ignore[attr-defined]
        file.write_text(json.dumps({"events": row["events"]}))
        return (file,)

    monkeypatch.setattr(rollback, "_stage_again", stage_again)


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
