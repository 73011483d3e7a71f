"""Plan and publish are killed and overtaken anywhere: published slices are whole, and the next run does the rest."""

import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from greenlet import getcurrent

from jobs.finality import publishing
from jobs.finality.due import Request
from jobs.finality.run import folder as runs
from jobs.finality.run.folder import RunFolder
from jobs.finality.run.tries import Try
from jobs.lake.slices import State
from jobs.pipelines.slices import slice_at
from jobs.refusal import Refusal
from tests.judges.histories import (
    ASKED,
    HOUR_MS,
    back,
    interrupted,
    names_early,
    settle,
    simulate,
    simulate_live,
    world_of,
)
from tests.judges.simulated_live import judge_account, live_of
from tests.judges.simulated_tables import LakeModel
from tests.judges.simulated_world import BEGIN_MS, MINUTE_MS, SEND, SUM, Killed, World
from tests.judges.simulation import begin, model_of, planner_of, publish, run, stage_slice
from tests.judges.tears import torn

LIVE_SEEDS = 40
# Each seed is a history of up to six runs by three to five actors, with the product's own lease.
SEEDS = 400


def test_nothing_happens_twice_and_nothing_is_lost_whoever_dies_when(tmp_path: Path) -> None:
    told: list[str] = []
    for seed in range(SEEDS):
        assert simulate(tmp_path, seed, told) == [], f"seed {seed}"
        # Hundreds of worlds are many small files.
        shutil.rmtree(tmp_path / str(seed))
    ends = Counter(line.partition(":")[0] for line in told)
    assert min(ends[end] for end in ("Killed", "OvertakenError", "LeaseLostError", "Refusal")) > 100, ends


def test_nothing_is_lost_if_replaced_runs_go_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here runs overlap, so some lose their folder while they work: they fail, and the next run does their work."""

    original = run

    def losing(*args: Any, **options: Any) -> object:
        try:
            return original(*args, **options)
        except FileNotFoundError as error:
            raise Refusal(f"its folder is gone: {error}") from error

    monkeypatch.setattr(runs, "REPLACED_KEPT_SECONDS", -3600)
    told: list[str] = []
    with monkeypatch.context() as patch:
        patch.setitem(simulate.__globals__, "run", losing)
        for seed in range(SEEDS, SEEDS + 150):
            assert simulate(tmp_path, seed, told) == [], f"seed {seed}"
    assert sum("its folder is gone" in line or "holds no plan" in line for line in told) > 5, Counter(told)


def test_accounts_add_up_whatever_becomes_of_stream_and_topic(tmp_path: Path) -> None:
    for seed in range(LIVE_SEEDS):
        assert simulate_live(tmp_path, seed) == [], f"seed {seed}"


def test_an_account_does_not_compare_with_events_of_a_topic_that_no_plan_has_seen_yet(world: World) -> None:
    """Their offsets look as if they belonged to slices that were computed before."""
    with model_of(world), live_of(world) as stream:
        run(world, "first")
        world.broker.re_create()
        world.arrive(BEGIN_MS)
        world.broker.land_all()
        stream.account("account")
        assert world.defects == []
        assert judge_account(stream) == []


def whole_run(root: Path) -> World:
    world = world_of(root, 1)
    world.bad = {slice_at(SUM, BEGIN_MS + MINUTE_MS).name}
    return world


def die_at(world: World, operation: int, work: Callable[[], object]) -> None:
    """Do a work and kill it at one of its operations; others find its lease as it was then."""
    left = iter(range(operation))

    def count_down(_name: str) -> None:
        if next(left, None) is None:
            world.leases.killing = True
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "operate", count_down)
        with pytest.raises(KeyboardInterrupt):
            work()
    world.leases.killing = False
    world.leases.bury(getcurrent())


def test_killed_at_every_operation_of_a_run_in_turn(tmp_path: Path) -> None:
    with model_of(reference := whole_run(tmp_path / "reference")):
        run(reference, "whole")
    assert len(reference.operations) > 15
    assert {"final: commit", "final: committed", "ledger: commit", "topic: send"} <= set(reference.operations)
    for at, name in enumerate(reference.operations):
        world = whole_run(tmp_path / str(at))
        with model_of(world):
            die_at(world, at, partial(run, world, "dying"))
            assert settle(world) == [], f"killed at {name} ({at})"
            assert world.bad == {name for name in world.bad if name not in world.history[-1]}


def tear_at(world: World, operation: int | None, work: Callable[[], object]) -> list[str]:
    """Do a work and kill it at an operation on files or tables, if one is given. Return the operations so far."""

    def die() -> BaseException:
        world.leases.killing = True
        return Killed()

    with torn(world.root, die) as tears, pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "operate", lambda name: tears.reach(name, world.root))
        tears.left = operation
        with suppress(Killed):
            work()
    world.leases.killing = False
    world.leases.bury(getcurrent())
    assert tears.is_dead == (operation is not None)
    return tears.done


def begun_before(root: Path) -> World:
    """A slice is blocked, and another one was asked for in a run that was killed after its audit."""
    world = whole_run(root)
    with model_of(world):
        run(world, "first")
        world.clock_ms += MINUTE_MS
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(publishing, "_commit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run(world, "dying", ASKED)
        world.arrive(BEGIN_MS)
        world.broker.land_all()
    return world


def test_killed_at_every_file_operation_of_a_run_that_begins_again(tmp_path: Path) -> None:
    """The run is killed before each operation, or in the middle of a write. The same run or the next one goes on."""
    reference = begun_before(tmp_path / "reference")
    with model_of(reference):
        operations = tear_at(reference, None, partial(run, reference, "dying", ASKED))
    names = {operation.partition(" ")[0] for operation in operations}
    assert {"write_bytes", "hardlink_to", "unlink", "rmdir"} <= names
    assert len(operations) > 50
    for at, operation in enumerate(operations):
        world = begun_before(tmp_path / str(at))
        with model_of(world):
            tear_at(world, at, partial(run, world, "dying", ASKED))
            if at % 3:
                run(world, "dying", ASKED)
            assert settle(world) == [], f"killed at {operation} ({at})"
        shutil.rmtree(tmp_path / str(at))


def rolled_back(root: Path, dies_at: int | None = None) -> World:
    """A slice has two versions and is rolled back to the first; the roll-back may be killed at an operation."""
    world, slice_ = world_of(root, 3), slice_at(SUM, BEGIN_MS)
    world.bad = set()
    with model_of(world):
        run(world, "first")
        world.arrive(slice_.start_ms)
        world.broker.land_all()
        run(world, "second")
        world.operations.clear()
        if dies_at is None:
            back(world, slice_.name)
        else:
            die_at(world, dies_at, partial(back, world, slice_.name))
    return world


def test_killed_at_every_operation_of_a_rollback_in_turn(tmp_path: Path) -> None:
    reference = rolled_back(tmp_path / "reference")
    assert {"final: commit", "final: committed", "ledger: commit", "topic: send"} <= set(reference.operations)
    for at, name in enumerate(reference.operations):
        world = rolled_back(tmp_path / str(at), dies_at=at)
        with model_of(world):
            assert settle(world) == [], f"killed at {name} ({at})"
            header, _ = world.history[-1][slice_at(SUM, BEGIN_MS).name]
            assert header.version == (3 if "final: committed" in reference.operations[: at + 1] else 2)


def test_suspended_at_every_operation_while_another_does_the_same(tmp_path: Path) -> None:
    """The run goes on after another has published and announced a newer version: it may change nothing of that."""
    with model_of(reference := whole_run(tmp_path / "reference")):
        run(reference, "whole")
    asked = Request(slices=tuple(slice_at(SUM, BEGIN_MS + at * MINUTE_MS) for at in range(3)), reason="asked")
    told: list[str] = []
    # Between the check of the lease and the message nothing can stop a run: Kafka has no fence for it.
    for at in (at for at, name in enumerate(reference.operations) if name != SEND):
        world = whole_run(tmp_path / str(at))
        with model_of(world):
            slow = begin([partial(run, world, "slow")], told)
            for _ in range(at + 1):
                slow.switch()
            world.leases.fall_asleep()
            run(world, "fast", asked)
            while not slow.dead:
                slow.switch()
            assert settle(world) == [], f"suspended at {reference.operations[at]} ({at})"
    assert {"LeaseLostError", "OvertakenError"} == {line.partition(":")[0] for line in told}


def test_of_two_runs_on_one_slice_one_publishes_and_the_other_says_why_not(tmp_path: Path) -> None:
    world = world_of(tmp_path, 2)
    world.bad = set()
    with model_of(world):
        plans = {name: planner_of(world).plan(name).plan for name in ("fast", "slow")}
        for name, plan in plans.items():
            folder = RunFolder.of(LakeModel.of(world), name)
            own = Try.begin(folder.path, plan.names)
            folder.keep_staged({work.slice: stage_slice(own, work) for work in plan.work})
            verdict = {"passed": True, "failures": [], "rows": 1, "checksum": "c"}
            folder.keep_verdicts({work.slice: verdict for work in plan.work})
        fast = publish(world, "fast", world.clock_ms)
        slow = publish(world, "slow", world.clock_ms)
        assert fast.versions == {work.slice: 1 for work in plans["fast"].work}
        assert slow.versions == {}
        assert all("another run has published it meanwhile" in why for why in slow.refused.values())
        assert set(slow.refused) == set(fast.versions)
        assert settle(world) == []


def test_late_events_reopen_and_are_counted_once(world: World) -> None:
    with model_of(world):
        run(world, "first")
        touched = slice_at(SUM, BEGIN_MS)
        before = world.history[-1][touched.name]
        world.arrive(BEGIN_MS + 1)
        world.broker.land_all()
        run(world, "second")
        header, content = world.history[-1][touched.name]
        assert (header.version, content) == (2, before[1] + 1)
        assert header.reason == "1 late events"
        assert [entry.late for entry in world.lines if entry.slice == touched.name][-1] == 0
        assert run(world, "third") is None
        reopened = [entry for entry in world.lines if (entry.slice, entry.state) == (touched.name, State.REOPENED)]
        assert [entry.late for entry in reopened] == [1]


def test_a_plan_by_a_clock_that_is_an_hour_ahead_publishes_nothing_that_is_not_over(world: World) -> None:
    """An older version may have made such a plan, since it asked its machine's clock."""
    with model_of(world):
        published = run(world, "ahead", ahead_ms=HOUR_MS)
        assert published is not None
        assert published.versions
        assert names_early(world) == set()
        assert len(published.refused) == 60
        name = max(published.refused)
        assert published.refused[name] == (
            f"slice {name} is left to a later run, since by the broker's clock it is not over: events for it are in "
            "time for 3545 s more"
        )
        assert "60 left to another run" in published.sentence
        assert world.defects == []
        world.clock_ms += HOUR_MS
        assert settle(world) == []
        assert {name: world.history[-1][name][0].version for name in published.refused} == dict.fromkeys(
            published.refused, 1
        )
