"""Whole histories: made up from a seed, settled in the end, and judged."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jobs.finality.due import Request
from jobs.finality.rollback import roll_back
from jobs.pipelines import days
from jobs.pipelines.slices import slice_at, slice_named, why_early
from jobs.pipelines.source import CLOCK_TOLERANCE_MS
from jobs.streaming.reset_plan import To
from tests.judges.simulated_broker import SKEW_MS, Broker
from tests.judges.simulated_judges import judge_end
from tests.judges.simulated_live import Stream, judge_account, live_of, or_reset
from tests.judges.simulated_tables import LakeModel
from tests.judges.simulated_world import BEGIN_MS, MINUTE_MS, SUM, World
from tests.judges.simulation import happen, in_turns, model_of, run

HOUR_MS = 60 * MINUTE_MS
# By partition: how far its leader's clock is ahead of the broker's clock.
SKEWS = ((0, -SKEW_MS), (SKEW_MS, 0), (-SKEW_MS // 2, SKEW_MS // 2))
# Histories with a live stream are other ones than those without.
LIVE_SEED = 10_000
WAYS = (To.EARLIEST, To.LATEST, To.LANDED)


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
    kafka: Any = None
    words = {"run": "back", "reason": "a test", "by": "tests"}
    roll_back(LakeModel.of(world), kafka, slice_, 1, **words, now_ms=world.clock_ms)


def names_early(world: World) -> set[str]:
    """The slices that are final but not over."""
    return {name for name in world.history[-1] if why_early(SUM, slice_named(SUM, name), world.clock_ms)}


OLDEST = slice_at(SUM, BEGIN_MS)
ASKED = Request(slices=(OLDEST,), reason="asked")


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt
