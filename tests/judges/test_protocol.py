"""Plan and publish are killed and overtaken anywhere: published slices are whole, and the next run does the rest."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from greenlet import getcurrent

from jobs.control.events_needed import said_needed
from jobs.control.incident import blocked
from jobs.control.incidents import Incidents
from jobs.control.lease import LeaseLostError
from jobs.finality import due, late, planning, publishing, rollback, runs
from jobs.finality.due import Request
from jobs.finality.rollback import roll_back
from jobs.finality.runs import RunFolder
from jobs.finality.tries import Try
from jobs.lake.slices import Boundary, Entry, Header, State
from jobs.pipelines import days
from jobs.pipelines.slices import CLOCK_SKEW_MS, early, over_at, slice_at, slice_named, slices_between
from jobs.pipelines.source import CLOCK_TOLERANCE_MS
from jobs.refusal import Refusal
from jobs.streaming.reset_plan import To
from tests.judges.simulated_broker import SKEW_MS, Broker
from tests.judges.simulated_judges import judge_end
from tests.judges.simulated_live import Stream, judge_account, live_of, or_reset
from tests.judges.simulated_tables import FinalModel
from tests.judges.simulated_world import BEGIN_MS, MINUTE_MS, SEND, SUM, Killed, World
from tests.judges.simulation import begin, happen, in_turns, model_of, run, stage_slice
from tests.judges.tears import torn

HOUR_MS = 60 * MINUTE_MS
# By partition: how far its leader's clock is ahead of the broker's clock.
SKEWS = ((0, -SKEW_MS), (SKEW_MS, 0), (-SKEW_MS // 2, SKEW_MS // 2))
WAYS = (To.EARLIEST, To.LATEST, To.LANDED)
LIVE_SEEDS, LIVE_SEED = 40, 10_000
# Each seed is a history of up to six runs by three to five actors, with the product's own lease.
SEEDS = 400


def world_of(root: Path, seed: int) -> World:
    world = World(root=root / str(seed), chance=random.Random(seed), re_creates=seed % 4 == 2)
    if seed % 2:
        world.broker = Broker(ahead_ms=dict(zip(range(2), world.chance.choice(SKEWS), strict=True)))
    for world.clock_ms in sorted(BEGIN_MS + world.chance.randrange(3 * MINUTE_MS) for _ in range(12)):
        world.arrive(world.clock_ms)
    world.broker.land_all()
    world.clock_ms = BEGIN_MS + 6 * MINUTE_MS
    if world.chance.random() < 0.3:
        world.bad = {slice_at(SUM, BEGIN_MS + world.chance.randrange(4) * MINUTE_MS).name}
    return world


def settle(world: World) -> list[str]:
    """Land everything and do two undisturbed runs, so that only blocked slices are left. Return the defects."""
    world.broker.land_all()
    run(world, "settling")
    # Slices that late events of the first run reopened are final after the second.
    run(world, "settled")
    return judge_end(world)


def simulate(root: Path, seed: int, told: list[str] | None = None) -> list[str]:
    """Return the defects in the end. ``told`` collects the errors of works that failed."""
    world = world_of(root, seed)
    first = slice_at(SUM, BEGIN_MS)
    asked = Request(slices=(first, slice_at(SUM, BEGIN_MS + MINUTE_MS)), reason="asked")
    with model_of(world), pytest.MonkeyPatch.context() as patch:
        if seed % 4 == 3 and seed % 5:
            # As if the day before midnight were a week ago: once it is whole, a plan seeks only unfinished work there.
            patch.setattr(days, "_MORE_HOURS", -SUM.source.horizon_hours)
        # Half of the tolerance, and much more than it.
        off_ms = {1: CLOCK_TOLERANCE_MS // 2, 2: -CLOCK_TOLERANCE_MS // 2}.get(seed % 5, 0)
        actors: dict[str, tuple[Callable[[], object], ...]] = {
            "a": (lambda: run(world, "a", off_ms=off_ms), lambda: run(world, "a again", off_ms=off_ms)),
            "b": (lambda: run(world, "b", asked), lambda: run(world, "b again", asked)),
            "c": (lambda: happen(world), lambda: run(world, "c"), lambda: run(world, "c again", asked)),
        }
        if seed % 3 == 0 or world.re_creates:
            run(world, "before")
        if seed % 3 == 0:
            actors["back"] = (lambda: back(world, first.name),)
        if seed % 5 == 0:
            actors["ahead"] = (lambda: run(world, "ahead", ahead_ms=10 * MINUTE_MS),)
        if seed % 5 in (1, 2):
            actors["off"] = (lambda: run(world, "off", off_ms=(3 - 2 * (seed % 5)) * 3 * HOUR_MS),)
        ended = in_turns(world, actors, steps=world.chance.randrange(10, 800))
        if told is not None:
            told += ended
        return settle(world)


def simulate_live(root: Path, seed: int) -> list[str]:
    """Return the defects in the end, with a live stream, its resets, and the account that compares and prunes."""
    world = world_of(root, LIVE_SEED + seed)
    world.re_creates = seed % 3 == 0
    with model_of(world), live_of(world) as stream:
        run(world, "before")
        ways = [world.chance.choice(list(WAYS)) for _ in range(4)]
        actors: dict[str, tuple[Callable[[], object], ...]] = {
            "run": (lambda: run(world, "a"), lambda: run(world, "b"), lambda: run(world, "c")),
            "live": tuple(partial(or_reset, stream, 2, way) for way in ways),
            "more": tuple(partial(or_reset, stream, 2, way) for way in ways),
            "account": tuple(partial(stream.account, f"account {at}") for at in range(5)),
        }
        if seed % 2:
            actors["operator"] = (partial(stream.reset, ways[0]),)
        in_turns(world, actors, steps=world.chance.randrange(100, 600), news=400)
        defects = settle(world)
        if not defects:
            defects = settle_live(world, stream)
        return defects


def settle_live(world: World, stream: Stream) -> list[str]:
    """The stream goes on or begins anew, then two undisturbed accounts follow. Return the defects."""
    or_reset(stream, 2, To.EARLIEST)
    for at in range(2):
        stream.account(f"settling {at}")
    return world.defects + judge_account(stream)


def back(world: World, slice_: str) -> None:
    settings = SimpleNamespace(lake_root=world.root, kafka=None)
    roll_back(settings, SUM, slice_, 1, run="back", reason="a test", by="tests")  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def staged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage rolled-back rows in the form that the model reads."""

    def stage_again(stage: Path, header: Header, rows: object) -> tuple[Path, ...]:
        file = stage / f"{header.slice}-{header.version}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        (row,) = rows.to_pylist() or [{"events": 0}]  # type: ignore[attr-defined]
        file.write_text(json.dumps({"events": row["events"]}))
        return (file,)

    monkeypatch.setattr(rollback, "_stage_again", stage_again)


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


def test_an_account_does_not_compare_with_events_of_a_topic_that_no_plan_has_seen_yet(tmp_path: Path) -> None:
    """Their offsets look as if they belonged to slices that were computed before."""
    world = world_of(tmp_path, 3)
    world.bad = set()
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
        plans = {
            name: planning.make(world.root, None, SUM, name, None, lambda: world.clock_ms).plan
            for name in ("fast", "slow")
        }
        for name, plan in plans.items():
            folder = RunFolder.of(world.root, SUM, name)
            own = Try.begin(folder.path, plan.names)
            folder.take({work.slice: stage_slice(own, work) for work in plan.work})
            verdict = {"passed": True, "failures": [], "rows": 1, "checksum": "c"}
            folder.decide({work.slice: verdict for work in plan.work})
        settings = SimpleNamespace(lake_root=world.root, kafka=None)
        fast = publishing.publish(settings, SUM, "fast", now_ms=world.clock_ms)  # type: ignore[arg-type]
        slow = publishing.publish(settings, SUM, "slow", now_ms=world.clock_ms)  # type: ignore[arg-type]
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


def names_early(world: World) -> set[str]:
    """The slices that are final but not over."""
    return {name for name in world.history[-1] if early(SUM, slice_named(SUM, name), world.clock_ms)}


def test_a_plan_by_a_clock_that_is_an_hour_ahead_publishes_nothing_that_is_not_over(tmp_path: Path) -> None:
    """An older version may have made such a plan, since it asked its machine's clock."""
    world = world_of(tmp_path, 3)
    world.bad = set()
    with model_of(world):
        published = run(world, "ahead", ahead_ms=HOUR_MS)
        assert published is not None
        assert published.versions
        assert names_early(world) == set()
        assert len(published.refused) == 60
        name = max(published.refused)
        assert published.refused[name] == (
            f"slice {name} is left to a later run, since by the broker's clock it is not over: late events are awaited "
            "for 3545 s more"
        )
        assert "60 left to another run" in published.sentence
        assert world.defects == []
        world.clock_ms += HOUR_MS
        assert settle(world) == []
        assert {name: world.history[-1][name][0].version for name in published.refused} == dict.fromkeys(
            published.refused, 1
        )


@pytest.fixture
def hasty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world with a slice that was final before it was over: a publish of an older version did not check that."""
    world = world_of(tmp_path, 3)
    world.bad = set()
    world.clock_ms = HASTY.start_ms + 30_000
    for at in range(1000):
        world.arrive(HASTY.start_ms + at)
    world.broker.land_all()
    with model_of(world), monkeypatch.context() as patch:
        patch.setattr(publishing, "early", lambda *_: None)
        run(world, "hasty", ahead_ms=5 * MINUTE_MS)
    assert HASTY.name in names_early(world)
    world.defects.clear()
    for at in range(9):
        world.arrive(HASTY.start_ms + 30_000 + at)
    world.broker.land_all()
    return world


HASTY = slice_at(SUM, BEGIN_MS + 6 * MINUTE_MS)


def as_older(lines: list[Entry]) -> list[Entry]:
    """Ledger lines of an older version, which did not count the events that came in time separately."""
    return [replace(line, in_time=None if line.late else 0) for line in lines]


def judge_healed(world: World) -> None:
    """When the slice is over it is computed again, with all events that came in time."""
    run(world, "waiting")
    assert world.history[-1][HASTY.name][0].version == 1, "it is not over yet"
    world.clock_ms = over_at(SUM, HASTY)
    run(world, "healing")
    header, content = world.history[-1][HASTY.name]
    assert (header.version, content) == (2, 1009)
    assert header.reason == "9 missing events that had come in time"
    world.clock_ms += 10 * MINUTE_MS
    assert settle(world) == []
    assert world.history[-1][HASTY.name][0].version == 2


def test_events_that_came_in_time_reopen_a_slice_however_few_they_are(hasty: World) -> None:
    with model_of(hasty):
        judge_healed(hasty)


def test_events_that_an_older_version_has_counted_reopen_it_too(hasty: World) -> None:
    """The older version did not count events that came in time separately, so its lines do not give their number."""
    with model_of(hasty):
        run(hasty, "older")
        assert [(line.late, line.in_time) for line in hasty.lines if line.slice == HASTY.name][-1] == (9, 9)
        hasty.lines = as_older(hasty.lines)
        judge_healed(hasty)


def test_what_a_slice_misses_that_was_rolled_back_stays_away(hasty: World) -> None:
    with model_of(hasty):
        judge_healed(hasty)
        back(hasty, HASTY.name)
        hasty.arrive(HASTY.start_ms)
        hasty.broker.land_all()
        run(hasty, "older")
        hasty.lines = as_older(hasty.lines)
        run(hasty, "later")
        assert hasty.history[-1][HASTY.name][0].version == 3
        assert [(line.late, line.in_time) for line in hasty.lines if line.slice == HASTY.name][-1] == (1, 0)


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world in which everything before the tide line counts as settled."""
    monkeypatch.setattr(days, "_MORE_HOURS", -SUM.source.horizon_hours)
    world = world_of(tmp_path, 3)
    world.bad = set()
    return world


OLDEST = slice_at(SUM, BEGIN_MS)
ASKED = Request(slices=(OLDEST,), reason="asked")


def judge_taken_up(world: World) -> None:
    """The next run does the work that another run was asked for, and left."""
    run(world, "second")
    header, _ = world.history[-1][OLDEST.name]
    assert (header.version, header.reason) == (2, "unfinished: asked")


def test_what_a_dead_run_left_is_taken_up_however_old_it_is(old: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with model_of(old):
        run(old, "first")
        with monkeypatch.context() as patch:
            patch.setattr(old, "operate", die_while_staging)
            with pytest.raises(KeyboardInterrupt):
                run(old, "dying", ASKED)
        judge_taken_up(old)
        assert run(old, "third") is None


def test_a_plan_says_which_events_are_needed(old: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The events of the horizon before the tide line are needed, and those of slices that a killed run has left."""
    needed = lambda: said_needed(old.root, SUM.recompute_job)  # noqa: E731
    horizon_ms = SUM.source.horizon_hours * HOUR_MS

    def at_most(time_ms: int) -> int:
        return time_ms - time_ms % HOUR_MS

    with model_of(old):
        run(old, "first")
        # The plan came before its publish, so there is no tide line yet.
        assert needed() == at_most(OLDEST.start_ms - horizon_ms - CLOCK_SKEW_MS)
        later_ms = OLDEST.start_ms + horizon_ms + 4 * HOUR_MS
        old.clock_ms = later_ms + MINUTE_MS
        line = [slice_ for slice_ in slices_between(SUM, OLDEST.end_ms, later_ms) if slice_.name not in old.history[-1]]
        header, content = old.history[-1][OLDEST.name]
        old.history.append(old.history[-1] | {s.name: (replace(header, slice=s.name, run="r"), content) for s in line})
        run(old, "second")
        assert needed() == at_most(later_ms - horizon_ms - CLOCK_SKEW_MS)
        run(old, "asked", ASKED)
        assert needed() == at_most(OLDEST.start_ms)
        run(old, "third")
        assert needed() == at_most(later_ms - horizon_ms - CLOCK_SKEW_MS)
        with monkeypatch.context() as patch:
            patch.setattr(old, "operate", die_while_staging)
            with pytest.raises(KeyboardInterrupt):
                run(old, "dying", ASKED)
        planning.make(old.root, None, SUM, "fourth", Request(slices=(line[-1],), reason="asked"), lambda: later_ms)
        assert needed() == at_most(OLDEST.start_ms)


def test_a_run_that_dies_while_it_begins_again_leaves_its_plan(old: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with model_of(old):
        run(old, "first")
        plan = planning.make(old.root, None, SUM, "dying", ASKED, lambda: old.clock_ms).plan
        with monkeypatch.context() as patch:
            patch.setattr(runs, "write_whole", no_space)
            with pytest.raises(OSError, match="No space left"):
                RunFolder.of(old.root, SUM, "dying").begin(plan)
        judge_taken_up(old)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_who_tells_an_older_version_does_not_hide_the_run_on_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(tmp_path, 3)
    world.bad = set()
    clock = lambda: world.clock_ms  # noqa: E731
    with model_of(world):
        slice_ = slice_at(SUM, BEGIN_MS)
        with monkeypatch.context() as patch:
            patch.setattr(publishing, "announce", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run(world, "published and not told")
        telling = planning.make(world.root, None, SUM, "telling", None, clock).plan
        assert slice_.name in telling.unannounced
        planning.make(world.root, None, SUM, "dying", Request(slices=(slice_,), reason="asked"), clock)
        folder = RunFolder.of(world.root, SUM, "telling")
        folder.take({})
        folder.decide({})
        settings: Any = SimpleNamespace(lake_root=world.root, kafka=None)
        publishing.publish(settings, SUM, "telling", now_ms=world.clock_ms)
        run(world, "second")
        header, _ = world.history[-1][slice_.name]
        assert (header.version, header.reason) == (2, "unfinished: asked")
        assert settle(world) == []


def test_a_run_that_only_tells_does_not_close_the_incident_of_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(tmp_path, 3)
    world.bad = set()
    settings: Any = SimpleNamespace(lake_root=world.root, kafka=None)
    with model_of(world):
        slice_ = slice_at(SUM, BEGIN_MS)
        run(world, "first")
        world.bad = {slice_.name}
        run(world, "asked", Request(slices=(slice_,), reason="asked"))
        incidents, key = Incidents.of(world.root), blocked(SUM.name, slice_.name)
        incidents.open(key, "its checks fail")
        publishing.publish(settings, SUM, "first", now_ms=world.clock_ms)
        line = [entry for entry in world.lines if entry.slice == slice_.name][-1]
        assert (line.state, line.version) == (State.BLOCKED, 2)
        assert [incident.key for incident in incidents.still_open(key)] == [key]


def test_who_was_overtaken_leaves_the_folder_of_the_run_to_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(tmp_path, 3)
    world.bad = set()
    clock = lambda: world.clock_ms  # noqa: E731
    with model_of(world):

        def sleep(*_: object) -> None:
            patch.undo()
            world.leases.fall_asleep()
            run(world, "twice")

        with monkeypatch.context() as patch:
            patch.setattr(planning, "_close_incidents", sleep)
            with pytest.raises(LeaseLostError):
                planning.make(world.root, None, SUM, "twice", None, clock)
        assert (RunFolder.of(world.root, SUM, "twice").path / "ended.json").exists()
        assert settle(world) == []


def test_a_run_that_finds_nothing_to_do_is_over(tmp_path: Path) -> None:
    """Each plan looks through the folders of all runs that are not over."""
    world = world_of(tmp_path, 3)
    world.bad = set()
    with model_of(world):
        run(world, "first")
        folder = RunFolder.of(world.root, SUM, "idle")
        assert planning.make(world.root, None, SUM, "idle", None, lambda: world.clock_ms).plan.work == ()
        assert folder.plan().work == ()
        assert (folder.path / "ended.json").exists()
        asked = Request(slices=(slice_at(SUM, BEGIN_MS),), reason="asked")
        planning.make(world.root, None, SUM, "busy", asked, lambda: world.clock_ms)
        assert not (RunFolder.of(world.root, SUM, "busy").path / "ended.json").exists()


def test_a_blocked_slice_stays_blocked_when_its_topic_is_re_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds when the same plan counts late events."""
    world = world_of(tmp_path, 3)
    slice_ = slice_at(SUM, BEGIN_MS)
    world.bad = {slice_.name}
    with model_of(world):
        run(world, "first")
        world.broker.re_create()
        world.clock_ms += 1_000
        world.arrive(*(slice_.start_ms + at for at in range(3)))
        world.broker.land_all()
        monkeypatch.setattr(due, "too_late", lambda *_: False)
        monkeypatch.setattr(late, "_is_late", lambda *_: True)
        planning.make(world.root, None, SUM, "later", None, lambda: world.clock_ms)
        line = [entry for entry in world.lines if entry.slice == slice_.name][-1]
        assert (line.state, line.version, line.run) == (State.BLOCKED, 1, "first")
        assert line.boundary == Boundary(topic_id="t2", ends=world.broker.ends)
        assert line.offsets == {}
        assert line.late > 0


def test_what_was_landed_of_an_earlier_topic_is_not_late_for_what_was_computed_with_it(tmp_path: Path) -> None:
    """The slice was planned after the topic was re-created, and before any record of the new topic had landed."""
    world = world_of(tmp_path, 3)
    world.bad = set()
    with model_of(world):
        world.broker.re_create()
        run(world, "first")
        world.clock_ms += 10 * MINUTE_MS
        world.arrive(world.clock_ms)
        world.broker.land_all()
        run(world, "second")
        assert {header.version for header, _ in world.history[-1].values()} == {1}
        assert settle(world) == []


def test_a_slice_with_a_line_keeps_it_when_it_gets_another_boundary() -> None:
    slice_, old, new = slice_at(SUM, BEGIN_MS), Boundary(topic_id="t1", ends={0: 5}), Boundary(topic_id="t2", ends={})
    line = Entry(slice=slice_.name, state=State.BLOCKED, at_ms=1, run="r", version=1, boundary=old, offsets={0: 5})
    now = planning._bounded(slice_, new, line, "later", 2)
    assert (now.state, now.run, now.version, now.boundary) == (State.BLOCKED, "r", 1, new)
    assert now.offsets == {}, "nothing of the new topic is in it"
    assert planning._bounded(slice_, new, None, "later", 2).state is State.OPEN


def test_a_plan_closes_the_incident_of_a_slice_whose_publisher_died_before_it(tmp_path: Path) -> None:
    world = world_of(tmp_path, 3)
    first, second = slice_at(SUM, BEGIN_MS), slice_at(SUM, BEGIN_MS + MINUTE_MS)
    world.bad = {second.name}
    with model_of(world):
        run(world, "first")
        incidents = Incidents.of(world.root)
        for slice_ in (first, second):
            incidents.open(blocked(SUM.name, slice_.name), "its checks fail")
        run(world, "second")
        assert [incident.key for incident in incidents.still_open("")] == [blocked(SUM.name, second.name)]


def test_one_who_is_overtaken_while_it_sends_begins_no_further_slice(tmp_path: Path, monkeypatch: Any) -> None:
    world = world_of(tmp_path, 3)
    world.bad = set()

    def overtake(name: str) -> None:
        # The first slice is sent, and the second is next.
        if name == "final: read" and world.topic:
            world.leases.overtake(world.root, SUM.recompute_job)

    with model_of(world):
        monkeypatch.setattr(world, "operate", overtake)
        with pytest.raises(LeaseLostError):
            run(world, "overtaken")
    assert len({slice_at(SUM, record.time) for record in world.broker.landed}) > 1
    assert len(world.topic) == 1


def die_while_staging(name: str) -> None:
    if name == "stage: write":
        raise KeyboardInterrupt


# -- The simulation finds planted errors --


def test_a_publish_that_does_not_look_at_the_version_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FinalModel, "require_version", lambda *_: None)
    assert any(simulate(tmp_path, seed) for seed in range(100))


def test_a_run_that_forgets_what_a_dead_one_left_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(due, "_is_unannounced", lambda *_: False)
    assert any(simulate(tmp_path, seed) for seed in range(200))


def test_a_publish_that_does_not_look_at_the_clock_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "early", lambda *_: None)
    assert any(simulate(tmp_path, seed) for seed in range(0, 100, 5))


def test_a_plan_that_forgets_what_came_in_time_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due, "in_time_of", lambda *_: 0)
    monkeypatch.setattr(due, "too_late", lambda *_: False)
    assert any(simulate(tmp_path, seed) for seed in range(0, 500, 5))


def test_a_boundary_that_is_taken_too_early_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jobs.lake.slices import Boundary

    monkeypatch.setattr(Boundary, "is_reached", lambda *_: True)
    assert any(simulate(tmp_path, seed) for seed in range(200))


@pytest.mark.parametrize("begins", [False, True])
def test_late_events_of_an_old_day_reopen_a_slice_whichever_plan_counts_them(old: World, begins: bool) -> None:
    """A plan that waits for ingest counts them, as does a plan for another slice. Neither decides about this one."""
    late, clock = slice_at(SUM, BEGIN_MS + MINUTE_MS), lambda: old.clock_ms
    with model_of(old):
        run(old, "first")
        assert late.name[:8] != slice_at(SUM, old.clock_ms).name[:8]
        old.arrive(late.start_ms)
        old.broker.land_all()
        if begins:
            run(old, "counts", ASKED)
        else:
            planning.make(old.root, None, SUM, "counts", Request(slices=(), reason="looks"), clock, begins=False)
        assert old.counted is not None
        assert old.counted.undecided == (late.name,)
        run(old, "second")
        assert old.history[-1][late.name][0].version == 2
        assert old.counted.undecided == ()
        assert settle(old) == []
