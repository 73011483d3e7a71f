"""How the request of a run is read, and how slices become partitions: as tables of cases."""

import itertools
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from croniter import croniter

from jobs.pipelines import PIPELINES
from jobs.pipelines.rules import RefusedDefinitionError
from jobs.pipelines.slices import CLOCK_SKEW_MS, Slice, over_at, slice_named
from jobs.refusal import Refusal
from tideline_airflow.scheduling.asked_slices import Asked, Outdated, asked
from tideline_airflow.scheduling.partitions import (
    cron_of,
    key_of,
    seconds_until_over,
    slice_of,
    slices_until_over,
    wait_until_over,
)

SUM = PIPELINES["rolling_sum"]
KEY = "2026-01-31T12:00:00"
OWN = slice_named(SUM, "20260131T120000Z")
NEXT = slice_named(SUM, "20260131T120100Z")
INTERVAL = {"from": "2026-01-31T12:00:00Z", "to": "2026-01-31T12:02:00Z"}
FORM = {"from": None, "to": None, "dry_run": True, "reason": None, "outdated": False}


@dataclass(frozen=True)
class Run:
    run_type: str
    partition_key: str | None = KEY
    clear_number: int = 0
    run_id: str = "r"


def ask(run: Run, taken: tuple[Slice, ...] = (), **params: Any) -> tuple[tuple[Slice, ...] | None, str, bool]:
    found = asked(SUM, run, {**FORM, **params}, lambda: taken)
    return found.request.slices if found.request else None, found.request.reason if found.request else "", found.dry_run


def test_a_scheduled_run_takes_what_is_due_whatever_the_form_says() -> None:
    assert ask(Run("scheduled"), **INTERVAL) == (None, "", False)


def test_a_backfill_takes_its_slice() -> None:
    assert ask(Run("backfill")) == ((OWN,), "backfill r", False)


@pytest.mark.parametrize("kind", ["scheduled", "backfill"])
def test_a_cleared_run_takes_what_it_took_else_its_slice(kind: str) -> None:
    assert ask(Run(kind, clear_number=1), taken=(OWN, NEXT)) == ((OWN, NEXT), "cleared", False)
    assert ask(Run(kind, clear_number=1)) == ((OWN,), "cleared", False)


def test_a_run_by_hand_is_dry_unless_told_otherwise() -> None:
    by_hand = Run("manual", partition_key=None)
    assert ask(by_hand) == (None, "", True)
    assert ask(by_hand, **INTERVAL) == ((OWN, NEXT), "dry run", True)
    assert ask(by_hand, dry_run=False) == (None, "", False)
    assert ask(by_hand, dry_run=False, reason="why", **INTERVAL) == ((OWN, NEXT), "why", False)
    assert ask(Run("manual"), dry_run=False, reason="why") == ((OWN,), "why", False)
    assert ask(replace(by_hand, clear_number=1), taken=(NEXT,), dry_run=False) == ((NEXT,), "cleared", False)


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({**INTERVAL, "dry_run": False}, "needs a reason: set reason"),
        ({**INTERVAL, "dry_run": False, "reason": "  "}, "needs a reason: set reason"),
        ({"outdated": True, "dry_run": False}, "needs a reason: set reason"),
        ({"from": INTERVAL["from"]}, "an interval needs two ends, but from=2026-01-31T12:00:00Z and to=None"),
        ({"from": INTERVAL["to"], "to": INTERVAL["from"]}, "is not before to="),
        ({"from": "yesterday", "to": INTERVAL["to"]}, "no ISO 8601 time"),
        ({**INTERVAL, "outdated": True}, "not both"),
    ],
)
def test_a_form_that_is_not_clear_is_refused(params: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refusal, match=sentence):
        ask(Run("manual", partition_key=None), **params)


def test_outdated_slices_are_asked_for_by_name_of_nothing_else() -> None:
    found = asked(SUM, Run("manual", None), {**FORM, "outdated": True, "dry_run": False, "reason": "new"}, tuple)
    assert found == Asked(request=Outdated(reason="new"), dry_run=False)


@pytest.mark.parametrize("seconds", [60, 300, 900, 1800, 3600, 7200, 21600, 43200, 86400])
def test_a_run_begins_with_every_slice_and_finds_its_own_over(seconds: int) -> None:
    pipeline = replace(SUM, slice_seconds=seconds)
    ticks = croniter(cron_of(pipeline), datetime(2026, 1, 30, 23, 30, tzinfo=UTC))
    moments = [ticks.get_next(datetime) for _ in range(5)]
    assert {later - moment for moment, later in itertools.pairwise(moments)} == {timedelta(seconds=seconds)}
    assert all(moment.timestamp() % seconds == 0 for moment in moments)
    now_ms = round(moments[0].timestamp() * 1000)
    start = now_ms - slices_until_over(pipeline) * seconds * 1000
    own, later = Slice(start, start + seconds * 1000), Slice(start + seconds * 1000, start + 2 * seconds * 1000)
    assert over_at(pipeline, own) - CLOCK_SKEW_MS <= now_ms < over_at(pipeline, later) - CLOCK_SKEW_MS
    assert now_ms + seconds_until_over(pipeline, key_of(own), now_ms) * 1000 >= over_at(pipeline, own)


@pytest.mark.parametrize(
    ("late_ms", "seconds"), [(-35_001, 0.0), (-35_000, 35.0), (-5000, 5.0), (-1, 0.001), (0, 0.0), (60_000, 0.0)]
)
def test_a_run_waits_for_two_clocks_and_for_nothing_else(late_ms: int, seconds: float) -> None:
    assert seconds_until_over(SUM, KEY, over_at(SUM, OWN) + late_ms) == seconds
    assert seconds_until_over(SUM, None, over_at(SUM, OWN) + late_ms) == 0.0


@pytest.mark.parametrize("speed", [1.0, 0.5], ids=["of the same speed", "of half the speed"])
def test_a_run_that_comes_early_by_the_brokers_clock_waits_for_its_slice(speed: float) -> None:
    begin = time.monotonic()

    def clock() -> float:
        return over_at(SUM, OWN) - 50 + (time.monotonic() - begin) * 1000 * speed

    wait_until_over(SUM, KEY, clock)
    assert over_at(SUM, OWN) <= clock() < over_at(SUM, NEXT)


@pytest.mark.parametrize("seconds", [1, 30, 90, 420, 5400, 18000, 172800])
def test_slices_that_cron_cannot_say_are_refused(seconds: int) -> None:
    with pytest.raises(RefusedDefinitionError, match=f"slice_seconds={seconds}: choose minutes"):
        cron_of(replace(SUM, slice_seconds=seconds))


def test_a_key_is_the_begin_of_its_slice() -> None:
    assert key_of(OWN) == KEY
    assert slice_of(SUM, KEY) == OWN
