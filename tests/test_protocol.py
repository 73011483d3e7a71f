"""Plan and publish, killed and overtaken at every operation: what is published is whole, and the next run mends all."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs.connectors import publishing, states
from jobs.connectors.publishing import roll_back
from jobs.connectors.states import Request, State
from jobs.pipelines.slices import slice_at
from tests.simulation import (
    BEGIN_MS,
    MINUTE_MS,
    SUM,
    FinalModel,
    World,
    happen,
    in_turns,
    judge_end,
    model_of,
    run,
)

SEEDS = 2000


def world_of(root: Path, seed: int) -> World:
    world = World(root=root / str(seed), chance=random.Random(seed))
    world.events = [BEGIN_MS + world.chance.randrange(3 * MINUTE_MS) for _ in range(12)]
    world.landed = 12
    world.clock_ms = BEGIN_MS + 6 * MINUTE_MS
    if world.chance.random() < 0.3:
        world.bad = {slice_at(SUM, BEGIN_MS + world.chance.randrange(4) * MINUTE_MS).name}
    return world


def settle(world: World) -> list[str]:
    """Everything landed, and two runs that nobody disturbs: the second has nothing left to do but what is blocked."""
    world.landed = len(world.events)
    run(world, "settling")
    # What was reopened by late events of the first is final after the second.
    run(world, "settled")
    return judge_end(world)


def simulate(root: Path, seed: int) -> list[str]:
    world = world_of(root, seed)
    first = slice_at(SUM, BEGIN_MS)
    asked = Request(slices=(first, slice_at(SUM, BEGIN_MS + MINUTE_MS)), reason="asked")
    with model_of(world):
        actors = {
            "a": lambda: run(world, "a"),
            "b": lambda: run(world, "b", asked if seed % 2 else None),
            "c": lambda: (happen(world), run(world, "c")),
        }
        if seed % 3 == 0:
            run(world, "before")
            actors["back"] = lambda: back(world, first.name)
        in_turns(world, actors, steps=world.chance.randrange(5, 120))
        return settle(world)


def back(world: World, slice_: str) -> None:
    settings = SimpleNamespace(lake_root=world.root, kafka=None)
    roll_back(settings, SUM, slice_, 1, run="back", reason="a test", by="tests")  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def staged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rolled back rows, as the model reads them."""

    def stage_again(stage: Path, header: states.Header, rows: object) -> tuple[Path, ...]:
        file = stage / f"{header.slice}-{header.version}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        (row,) = rows.to_pylist() or [{"events": 0}]  # type: ignore[attr-defined]
        file.write_text(json.dumps({"events": row["events"]}))
        return (file,)

    monkeypatch.setattr(publishing, "_stage_again", stage_again)


def test_nothing_happens_twice_and_nothing_is_lost_whoever_dies_when(tmp_path: Path) -> None:
    operations = 0
    for seed in range(SEEDS):
        assert simulate(tmp_path, seed) == [], f"seed {seed}"
        operations += 1
    assert operations == SEEDS


def whole_run(root: Path) -> World:
    world = world_of(root, 1)
    world.bad = {slice_at(SUM, BEGIN_MS + MINUTE_MS).name}
    return world


def test_killed_at_every_operation_of_a_run_in_turn(tmp_path: Path) -> None:
    with model_of(reference := whole_run(tmp_path / "reference")):
        run(reference, "whole")
    assert len(reference.operations) > 15
    assert {"final: commit", "final: committed", "ledger: commit", "topic: send"} <= set(reference.operations)
    for at in range(len(reference.operations)):
        world = whole_run(tmp_path / str(at))
        with model_of(world):
            left = iter(range(at))

            def count_down(left: object = left) -> None:
                if next(left, None) is None:  # type: ignore[call-overload]
                    raise KeyboardInterrupt

            world.operate = lambda name: count_down()  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                run(world, "dying")
            world.operate = lambda name: None  # type: ignore[method-assign]
            world.holder = None
            assert settle(world) == [], f"killed at {reference.operations[at]} ({at})"
            assert world.bad == {name for name in world.bad if name not in world.history[-1]}


def test_of_two_runs_on_one_slice_one_publishes_and_the_other_says_why_not(tmp_path: Path) -> None:
    from jobs.connectors import planning
    from jobs.connectors.runs import RunFolder

    world = world_of(tmp_path, 2)
    world.bad = set()
    with model_of(world):
        plans = {
            name: planning.make(world.root, None, SUM, name, None, lambda: world.clock_ms / 1000).plan
            for name in ("fast", "slow")
        }
        for name, plan in plans.items():
            folder = RunFolder.of(world.root, SUM, name)
            stage = folder.new_stage()
            for work in plan.work:
                (stage / f"slice={work.slice}").mkdir(parents=True)
                content = json.dumps({"events": work.events})
                (stage / f"slice={work.slice}" / "rows.parquet").write_text(content)
            folder.staged({}, stage)
            verdict = {"passed": True, "failures": [], "rows": 1, "checksum": "c"}
            folder.decide({work.slice: verdict for work in plan.work})
        settings = SimpleNamespace(lake_root=world.root, kafka=None)
        fast = publishing.publish(settings, SUM, "fast")  # type: ignore[arg-type]
        slow = publishing.publish(settings, SUM, "slow")  # type: ignore[arg-type]
        assert fast.versions == {work.slice: 1 for work in plans["fast"].work}
        assert slow.versions == {}
        assert all("another run has published it meanwhile" in why for why in slow.refused.values())
        assert set(slow.refused) == set(fast.versions)
        assert settle(world) == []


def test_late_events_reopen_and_are_counted_once(tmp_path: Path) -> None:
    world = world_of(tmp_path, 3)
    world.bad = set()
    with model_of(world):
        run(world, "first")
        late = slice_at(SUM, BEGIN_MS)
        before = world.history[-1][late.name]
        world.events.append(BEGIN_MS + 1)
        world.landed += 1
        run(world, "second")
        header, content = world.history[-1][late.name]
        assert (header.version, content) == (2, before[1] + 1)
        assert header.reason == "1 late events"
        assert [entry.late for entry in world.lines if entry.slice == late.name][-1] == 0
        assert run(world, "third") is None
        reopened = [entry for entry in world.lines if (entry.slice, entry.state) == (late.name, State.REOPENED)]
        assert [entry.late for entry in reopened] == [1]


# -- The simulation finds what is planted --


def test_a_publish_that_does_not_look_at_the_version_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FinalModel, "require_version", lambda *_: None)
    assert any(simulate(tmp_path, seed) for seed in range(100))


def test_a_run_that_forgets_what_a_dead_one_left_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jobs.connectors import states as product

    monkeypatch.setattr(product, "_is_untold", lambda *_: False)
    assert any(simulate(tmp_path, seed) for seed in range(200))


def test_a_boundary_that_is_taken_too_early_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jobs.connectors.states import Boundary

    monkeypatch.setattr(Boundary, "is_reached", lambda *_: True)
    assert any(simulate(tmp_path, seed) for seed in range(200))
