"""A first run, a roll-back, an account and the upkeep of run folders are killed at every operation on a file."""

import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from jobs.finality.run.folder import RunFolder, old_runs, slices_left
from jobs.pipelines.slices import slice_at
from jobs.upkeep import old_files
from tests.judges.histories import ASKED, back, settle, settle_live
from tests.judges.simulated_live import live_of
from tests.judges.simulated_tables import LakeModel
from tests.judges.simulated_world import BEGIN_MS, MINUTE_MS, SUM, World
from tests.judges.simulation import model_of, planner_of, run
from tests.judges.test_protocol import tear_at, whole_run

OLDEST = slice_at(SUM, BEGIN_MS)


@dataclass
class Scene:
    """A work that is killed, and its judge, which lets other processes go on and returns the defects.

    ``files``: some of the files that the work writes or removes.
    """

    work: Callable[[], object]
    judge: Callable[[], list[str]]
    files: Collection[str]


@contextmanager
def first_run(world: World) -> Iterator[Scene]:
    def judge() -> list[str]:
        # In most cases Airflow repeats the run, otherwise the next run does its work.
        if len(world.operations) % 3:
            run(world, "dying")
        return settle(world)

    yield Scene(partial(run, world, "dying"), judge, ("plan.json", "events_needed", "try-", "staged.json", "verdicts"))


@contextmanager
def rolled_back(world: World) -> Iterator[Scene]:
    """A slice has two versions, and is rolled back to the first."""
    run(world, "first")
    come_late(world)
    run(world, "second")

    def judge() -> list[str]:
        defects = settle(world)
        header, _ = world.history[-1][OLDEST.name]
        return defects + [f"version {header.version}"] * (header.version not in (2, 3))

    yield Scene(partial(back, world, OLDEST.name), judge, (".parquet", "lease-", "receipt-", "ended"))


@contextmanager
def accounted(world: World) -> Iterator[Scene]:
    """An account compares new slices, after the live rows of older slices were pruned."""
    with live_of(world) as stream:
        run(world, "first")
        stream.stream(2)
        stream.account("first")
        stream.stream(1)
        world.arrive(world.clock_ms)
        world.clock_ms += 4 * MINUTE_MS
        come_late(world)
        stream.stream(4)
        run(world, "second")

        def judge() -> list[str]:
            # An account of one more version must know that the live rows of this slice were pruned.
            come_late(world)
            run(world, "third")
            return settle_live(world, stream)

        files = ("prune", "progress", "lease-", "receipt-")
        yield Scene(partial(stream.account, "dying"), judge, files)


@contextmanager
def old_folders(world: World) -> Iterator[Scene]:
    """Some runs ended long ago. A slice is named only by the folder of a killed run, which no plan has seen yet."""
    lake = LakeModel.of(world)
    for name in ("first", "second"):
        run(world, name)
        come_late(world)
    planner_of(world).plan("died", ASKED)
    for name, file in (("first", "ended.json"), ("second", "ended.json"), ("died", "plan.json")):
        os.utime(RunFolder.of(lake, name).path / file, (1, 1))
    left = slices_left(lake)

    def judge() -> list[str]:
        defects = [] if slices_left(lake) >= left else ["the slice of a killed run is forgotten"]
        old_files._runs(lake)
        defects += [f"{folder} is left" for folder in old_runs(lake, and_abandoned=False)]
        return defects + settle(world)

    yield Scene(partial(old_files._runs, lake), judge, ("plan.json", "ended.json", "lease-", "receipt-"))


def come_late(world: World) -> None:
    """Land an event of the oldest slice."""
    world.arrive(OLDEST.start_ms)
    world.broker.land_all()


SCENES: dict[str, Callable[[World], AbstractContextManager[Scene]]] = {
    "first run": first_run,
    "roll-back": rolled_back,
    "account": accounted,
    "old run folders": old_folders,
}


def killed(root: Path, name: str, at: int | None) -> list[str]:
    """Make a scene, kill its work at an operation, and judge it. Return the operations so far."""
    world = whole_run(root)
    world.bad = world.bad if name == "first run" else set()
    with model_of(world), SCENES[name](world) as scene:
        operations = tear_at(world, at, scene.work)
        if at is None:
            assert [file for file in scene.files if not any(file in done for done in operations)] == []
        assert scene.judge() == [], f"killed at {operations[-1]} ({at})"
    shutil.rmtree(root)
    return operations


@pytest.mark.parametrize("name", SCENES)
def test_killed_at_every_file_operation(tmp_path: Path, name: str) -> None:
    for at in range(len(killed(tmp_path / "reference", name, None))):
        killed(tmp_path / str(at), name, at)
