"""The protocol of recompute on tables in memory. Actors are paused, killed and overtaken at any operation.

Plan, publish and lease are the product's own code. Tables, topics and clocks are models, and verdicts are made up.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from greenlet import getcurrent, greenlet

from jobs.broker import clock
from jobs.finality import planning, publishing
from jobs.finality.due import Request
from jobs.finality.planning import Planner
from jobs.finality.publishing import Published
from jobs.finality.run.folder import RunFolder, Work
from jobs.finality.run.tries import StagedSlice, Try
from jobs.lake.slices import State
from jobs.pipelines.slices import over_at
from jobs.pipelines.source import CLOCK_TOLERANCE_MS
from jobs.refusal import Refusal
from jobs.storage.parquet import write
from tests.judges.simulated_broker import SKEW_MS, AdminModel
from tests.judges.simulated_tables import LakeModel
from tests.judges.simulated_world import BEGIN_MS, MINUTE_MS, SEND, SUM, Killed, World, slice_of


@contextmanager
def model_of(world: World) -> Iterator[None]:
    """Run the product's protocol on the world's tables."""

    def send(_kafka: object, _topic: str, wanted: Any) -> int:
        count = 0
        for key, value in wanted:
            world.operate(SEND)
            world.topic[key] = value
            count += 1
        return count

    with pytest.MonkeyPatch.context() as patch:
        world.leases.install(patch)
        # Ingest lands no records while this process waits for it.
        patch.setattr(planning, "INGEST_PATIENCE_SECONDS", 0.0)
        patch.setattr(publishing, "send", send)
        patch.setattr(clock, "_stamped_ms", lambda _: world.clock_ms)
        patch.setattr(clock, "time", SimpleNamespace(time=lambda: (world.clock_ms + world.off_ms) / 1000))
        yield


def run(
    world: World, name: str, request: Request | None = None, *, ahead_ms: int = 0, off_ms: int = 0
) -> Published | None:
    """Run one DAG run: plan, stage, audit, publish. Tasks may be killed; their work so far stays in the world.

    ``ahead_ms``: it plans by a clock that is so far ahead of the broker's clock, as an older version may do.
    ``off_ms``: the clock of its machine is ahead of the broker's clock by so much, or behind.
    """
    lake = LakeModel.of(world)
    world.machines[getcurrent()] = off_ms
    world.plans_ahead = world.plans_ahead or ahead_ms > 0
    now = partial(clock._now_ms, None)  # type: ignore[arg-type]
    plan_clock = (lambda: world.clock_ms + ahead_ms) if ahead_ms else now
    planner = planner_of(world, plan_clock)
    planner.await_ingest(name, request)
    planned = planner.plan(name, request)
    if abs(off_ms) > CLOCK_TOLERANCE_MS:
        world.defects.append(f"run {name} has planned on a machine whose clock is off by {off_ms} ms")
    if not planned.plan.work and not planned.plan.unannounced:
        return None
    folder = RunFolder.of(lake, name)
    own = Try.begin(folder.path, planned.plan.names)
    staged = {}
    for work in planned.plan.work:
        world.operate("stage: write")
        staged[work.slice] = stage_slice(own, work)
    world.operate("stage: say so")
    own.write_result(staged)
    world.operate("stage: take it")
    folder.keep_staged(own.result())
    planning.write_states(lake, [planned.plan.line(w, State.AUDITING, at_ms=world.clock_ms) for w in planned.plan.work])
    world.operate("audit: decide")
    folder.keep_verdicts(
        {
            work.slice: {"passed": work.slice not in world.bad, "failures": [], "rows": 1, "checksum": str(work.events)}
            for work in planned.plan.work
        }
    )
    blocked = [work for work in planned.plan.work if work.slice in world.bad]
    planning.write_states(lake, [planned.plan.line(w, State.BLOCKED, at_ms=world.clock_ms) for w in blocked])
    published = publish(world, name, now())
    world.reported += list(published.versions.items())
    return published


def planner_of(world: World, clock: Callable[[], int] | None = None) -> Planner:
    """The planner of the product, on the tables of the world."""
    client: Any = AdminModel(world.broker)
    return Planner(lake=LakeModel.of(world), client=client, clock=clock or (lambda: world.clock_ms))


def publish(world: World, name: str, now_ms: int) -> Published:
    """Publish a run by the product's code."""
    kafka: Any = None
    return publishing.publish(LakeModel.of(world), kafka, name, now_ms=now_ms)


def stage_slice(own: Try, work: Work) -> StagedSlice:
    """Stage a file that holds the number of events of its window; stage no file for a slice without events."""
    if not work.events:
        return StagedSlice()
    file = own.stage / f"slice={work.slice}" / "rows.parquet"
    write(pa.table({"events": [work.events]}), file)
    return StagedSlice(read=work.events, expected=work.events, rows=1, files=(str(file.relative_to(own.run)),))


def in_turns(
    world: World, actors: Mapping[str, Sequence[Callable[[], object]]], steps: int, news: int = 100
) -> list[str]:
    """Run actors in random order, each paused at every operation. Some are killed, some are overtaken.

    The holder of the lease may be suspended for many steps. Then another actor takes over, and the first goes on later.
    ``news``: after so many steps no new events happen.
    """
    told: list[str] = []
    alive = {name: begin(work, told) for name, work in actors.items()}
    suspended: dict[str, int] = {}
    for step in range(steps):
        for name in [name for name, until in suspended.items() if until <= step or suspended.keys() >= alive.keys()]:
            world.leases.wake(alive[name])
            del suspended[name]
        if not alive:
            break
        name = world.chance.choice(sorted(alive.keys() - suspended.keys()))
        happening = world.chance.random()
        if happening < 0.01:
            _kill(world, alive.pop(name))
            continue
        sleepy = 0.3 if world.operations[-1:] == ["final: read"] else 0.04
        if world.chance.random() < sleepy and (sleeper := world.leases.fall_asleep()):
            names = {actor: name for name, actor in alive.items()}
            suspended[names[sleeper]] = step + world.chance.choice((20, 400))
            continue
        # Later no news happens: news would cause a slice to be done again, and hide an earlier error.
        if happening < 0.15 and step < news:
            happen(world)
        _step(world, alive[name])
        if alive[name].dead:
            alive.pop(name)
    for left in alive.values():
        _kill(world, left)
    return told


def _step(world: World, actor: greenlet) -> None:
    """Go on to the next operation. Between the messages of a slice an actor may be killed, but is not suspended.

    The product checks its lease before each slice. Kafka has no fence against an actor that is suspended after it.
    """
    while actor.switch() == SEND:
        if world.chance.random() < 0.05:
            return _kill(world, actor)


def begin(works: Sequence[Callable[[], object]], told: list[str]) -> greenlet:
    """An actor that does its works in order. A refused work does not stop the next one; a kill ends the actor."""

    def main() -> None:
        with suppress(Killed):
            for work in works:
                try:
                    work()
                except (Refusal, Killed) as error:
                    told.append(f"{type(error).__name__}: {error}")
                    if isinstance(error, Killed):
                        raise

    return greenlet(main)


def _kill(world: World, actor: greenlet) -> None:
    world.leases.killing = True
    # An actor that has not begun has nothing to end.
    if actor:
        actor.throw(Killed())
    world.leases.killing = False
    world.leases.bury(actor)


def happen(world: World) -> None:
    """Let time pass and events come, some of them late; ingest lands some of them."""
    chance = world.chance
    # Sometimes stop when a slice is over: brokers with clocks that are behind then stamp new arrivals too early.
    over_ms = over_at(SUM, slice_of(0)) % MINUTE_MS - world.clock_ms % MINUTE_MS
    over_ms -= chance.choice((0, 10_000))
    world.clock_ms += chance.choice((0, 1_000, over_ms % MINUTE_MS, 30_000, MINUTE_MS))
    if world.re_creates and chance.random() < 0.1:
        world.broker.re_create()
        # A re-creation takes longer than the brokers' clocks differ.
        world.clock_ms += 2 * SKEW_MS
    for _ in range(chance.randrange(4)):
        ago_ms = chance.choice((0, 0, 0, 30_000, 90_000, 200_000))
        world.arrive(max(BEGIN_MS, world.clock_ms - ago_ms))
    world.broker.land(chance)
