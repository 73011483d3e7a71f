"""Histories that once went wrong, each written down."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.control.events_needed import read_needed_from
from jobs.control.incident import blocked_key
from jobs.control.incidents import Incidents
from jobs.control.lease import LeaseLostError
from jobs.finality import due, late, planning, publishing
from jobs.finality.due import Request, SliceSurvey
from jobs.finality.planning import Planner
from jobs.finality.run import folder as runs
from jobs.finality.run.folder import RunFolder
from jobs.lake.slices import Boundary, LedgerLine, State
from jobs.pipelines.slices import CLOCK_SKEW_MS, over_at, slice_at, slices_between
from tests.judges.histories import ASKED, HOUR_MS, OLDEST, back, interrupted, names_early, settle, world_of
from tests.judges.simulated_tables import LakeModel
from tests.judges.simulated_world import BEGIN_MS, MINUTE_MS, SUM, World
from tests.judges.simulation import model_of, planner_of, publish, run


@pytest.fixture
def hasty(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world with a slice that was final before it was over: a publish of an older version did not check that."""
    world.clock_ms = HASTY.start_ms + 30_000
    for at in range(1000):
        world.arrive(HASTY.start_ms + at)
    world.broker.land_all()
    with model_of(world), monkeypatch.context() as patch:
        patch.setattr(publishing, "why_early", lambda *_: None)
        run(world, "hasty", ahead_ms=5 * MINUTE_MS)
    assert HASTY.name in names_early(world)
    world.defects.clear()
    for at in range(9):
        world.arrive(HASTY.start_ms + 30_000 + at)
    world.broker.land_all()
    return world


HASTY = slice_at(SUM, BEGIN_MS + 6 * MINUTE_MS)


def as_older(lines: list[LedgerLine]) -> list[LedgerLine]:
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
    assert header.reason == "9 missing events that had arrived in time"
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
    needed = lambda: read_needed_from(old.root, SUM.recompute_job)  # noqa: E731
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
        planner_of(old, lambda: later_ms).plan("fourth", Request(slices=(line[-1],), reason="asked"))
        assert needed() == at_most(OLDEST.start_ms)


def test_a_run_that_dies_while_it_begins_again_leaves_its_plan(old: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with model_of(old):
        run(old, "first")
        plan = planner_of(old).plan("dying", ASKED).plan
        with monkeypatch.context() as patch:
            patch.setattr(runs, "write_whole", no_space)
            with pytest.raises(OSError, match="No space left"):
                RunFolder.of(LakeModel.of(old), "dying").begin(plan)
        judge_taken_up(old)


def no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_who_tells_an_older_version_does_not_hide_the_run_on_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model_of(world):
        slice_ = slice_at(SUM, BEGIN_MS)
        with monkeypatch.context() as patch:
            patch.setattr(publishing, "announce", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run(world, "published and not told")
        telling = planner_of(world).plan("telling").plan
        assert slice_.name in telling.unannounced
        planner_of(world).plan("dying", Request(slices=(slice_,), reason="asked"))
        folder = RunFolder.of(LakeModel.of(world), "telling")
        folder.keep_staged({})
        folder.keep_verdicts({})
        publish(world, "telling", world.clock_ms)
        run(world, "second")
        header, _ = world.history[-1][slice_.name]
        assert (header.version, header.reason) == (2, "unfinished: asked")
        assert settle(world) == []


def test_a_run_that_only_tells_does_not_close_the_incident_of_a_block(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model_of(world):
        slice_ = slice_at(SUM, BEGIN_MS)
        run(world, "first")
        world.bad = {slice_.name}
        run(world, "asked", Request(slices=(slice_,), reason="asked"))
        incidents, key = Incidents.of(world.root), blocked_key(SUM.name, slice_.name)
        incidents.open(key, "its checks fail")
        publish(world, "first", world.clock_ms)
        line = [entry for entry in world.lines if entry.slice == slice_.name][-1]
        assert (line.state, line.version) == (State.BLOCKED, 2)
        assert [incident.key for incident in incidents.still_open(key)] == [key]


def test_who_was_overtaken_leaves_the_folder_of_the_run_to_its_successor(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model_of(world):

        def sleep(*inputs: Any) -> SliceSurvey:
            patch.undo()
            world.leases.fall_asleep()
            run(world, "twice")
            return due.survey(*inputs)

        with monkeypatch.context() as patch:
            patch.setattr(planning, "survey", sleep)
            with pytest.raises(LeaseLostError):
                planner_of(world).plan("twice")
        assert (RunFolder.of(LakeModel.of(world), "twice").path / "ended.json").exists()
        assert settle(world) == []


def test_a_run_that_finds_nothing_to_do_is_over(world: World) -> None:
    """Each plan looks through the folders of all runs that are not over."""
    with model_of(world):
        run(world, "first")
        folder = RunFolder.of(LakeModel.of(world), "idle")
        assert planner_of(world).plan("idle").plan.work == ()
        assert folder.plan().work == ()
        assert (folder.path / "ended.json").exists()
        asked = Request(slices=(slice_at(SUM, BEGIN_MS),), reason="asked")
        planner_of(world).plan("busy", asked)
        assert not (RunFolder.of(LakeModel.of(world), "busy").path / "ended.json").exists()


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
        monkeypatch.setattr(due, "reopens", lambda *_: False)
        monkeypatch.setattr(late, "_is_late", lambda *_: True)
        planner_of(world).plan("later")
        line = [entry for entry in world.lines if entry.slice == slice_.name][-1]
        assert (line.state, line.version, line.run) == (State.BLOCKED, 1, "first")
        assert line.boundary == Boundary(topic_id="t2", ends=world.broker.ends)
        assert line.offsets == {}
        assert line.late > 0


def test_what_was_landed_of_an_earlier_topic_is_not_late_for_what_was_computed_with_it(world: World) -> None:
    """The slice was planned after the topic was re-created, and before any record of the new topic had landed."""
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
    line = LedgerLine(slice=slice_.name, state=State.BLOCKED, at_ms=1, run="r", version=1, boundary=old, offsets={0: 5})
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
            incidents.open(blocked_key(SUM.name, slice_.name), "its checks fail")
        run(world, "second")
        assert [incident.key for incident in incidents.still_open("")] == [blocked_key(SUM.name, second.name)]


def test_one_who_is_overtaken_while_it_sends_begins_no_further_slice(world: World, monkeypatch: Any) -> None:

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


@pytest.mark.parametrize(
    ("owner", "step", "done"),
    [(RunFolder, "begin", 0), (Planner, "_close_incidents", 1), (planning, "_write_lines", 2)],
)
def test_a_planner_that_has_lost_its_lease_writes_nothing_more(
    world: World, monkeypatch: pytest.MonkeyPatch, owner: Any, step: str, done: int
) -> None:
    """It was suspended after a step. The next steps close incidents, write the ledger, and say what is needed."""
    said, real = list[object](), getattr(owner, step)

    def overtaken(*arguments: Any, **more: Any) -> Any:
        found = real(*arguments, **more)
        world.leases.overtake(world.root, SUM.recompute_job)
        return found

    with model_of(world):
        run(world, "first")
        incidents, lines = Incidents.of(world.root), len(world.lines)
        incidents.open(blocked_key(SUM.name, OLDEST.name), "its checks fail")
        world.arrive(OLDEST.start_ms)
        world.broker.land_all()
        monkeypatch.setattr(planning, "write_needed_from", lambda *arguments: said.append(arguments))
        monkeypatch.setattr(owner, step, overtaken)
        with pytest.raises(LeaseLostError):
            planner_of(world).plan("overtaken")
    assert (not incidents.still_open(""), len(world.lines) > lines, said) == (done > 0, done > 1, [])


def die_while_staging(name: str) -> None:
    if name == "stage: write":
        raise KeyboardInterrupt
