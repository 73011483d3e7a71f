"""Decisions from the known state of a job's drivers: one table per decision, and rules that hold for every state."""

import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.control.epochs import (
    BEAT_SECONDS,
    DEAD_SECONDS,
    FIRST_BACKOFF_SECONDS,
    LAUNCH_SECONDS,
    LONGEST_BACKOFF_SECONDS,
    LOOK_ON_SECONDS,
    STALE_SECONDS,
    STOP_SECONDS,
    WELL_SECONDS,
    Attach,
    Beat,
    Epoch,
    Health,
    Launch,
    Owner,
    Phase,
    QueryProgress,
    Receipt,
    Stop,
    Wait,
    backoff_seconds,
    failures,
    health,
    next_step,
    stalled_queries,
)
from tests import processes

NOW = 1_000_000.0
STALL_SECONDS = 60.0
SOMEONE = Owner(host="another-host", pid=1, started_seconds=0.0)
AIRFLOW = Owner(host="airflow-host", pid=2, started_seconds=0.0)


def query(topic: str = "numbers", *, idle: float = 0.0, lag: int | None = None) -> QueryProgress:
    return QueryProgress(topic=topic, stepped=NOW - idle, lag=lag)


def beat(phase: Phase, *, age: float = 0.0, queries: tuple[QueryProgress, ...] = ()) -> Beat:
    return Beat(time=NOW - age, owner=SOMEONE, phase=phase, stall_seconds=STALL_SECONDS, queries=queries)


def epoch(number: int = 1, *, taken: float = 0.0, **known: Any) -> Epoch:
    return Epoch(number=number, taken=NOW - taken, **known)


def launch(**known: Any) -> Epoch:
    """An epoch that Airflow reserved for a driver to come."""
    return epoch(owner=AIRFLOW, launched=True, **known)


def ended(number: int, *, clean: bool, lived: float = 1.0, ago: float = 0.0) -> Epoch:
    receipt = Receipt(time=NOW - ago, clean=clean, cause="it ended")
    return epoch(number, taken=ago + lived, owner=SOMEONE, beat=beat(Phase.STOPPING, age=ago), receipt=receipt)


CLEAN = Receipt(time=NOW, clean=True, cause="drained")
FAILED = Receipt(time=NOW, clean=False, cause="no memory")
STOP = Stop(time=NOW, by="an operator")


# -- The health of an epoch --

HEALTH: dict[str, tuple[Epoch, bool, Health]] = {
    "just taken by its driver": (epoch(owner=SOMEONE), False, Health.STARTING),
    "taken by its driver, almost stale": (epoch(taken=STALE_SECONDS, owner=SOMEONE), False, Health.STARTING),
    "taken by its driver, never beaten": (epoch(taken=STALE_SECONDS + 0.1, owner=SOMEONE), False, Health.DEAD),
    "taken by its driver, which is gone": (epoch(owner=SOMEONE), True, Health.DEAD),
    "just taken for a driver to come": (launch(), False, Health.STARTING),
    "a launch has longer than a driver": (launch(taken=STALE_SECONDS + 0.1), False, Health.STARTING),
    "a launch on a busy machine": (launch(taken=LAUNCH_SECONDS), False, Health.STARTING),
    "a launch that never came": (launch(taken=LAUNCH_SECONDS + 0.1), False, Health.DEAD),
    "a launch whose launcher is gone": (launch(), True, Health.DEAD),
    "a launch that is spoken for": (
        launch(taken=LAUNCH_SECONDS + 5, beat=beat(Phase.LAUNCHED, age=LAUNCH_SECONDS)),
        False,
        Health.STARTING,
    ),
    "a launch that is spoken for no more": (launch(beat=beat(Phase.LAUNCHED)), True, Health.DEAD),
    "a launch long ago": (
        launch(taken=LAUNCH_SECONDS + 9, beat=beat(Phase.LAUNCHED, age=LAUNCH_SECONDS + 0.1)),
        False,
        Health.DEAD,
    ),
    "a launch by a clock that runs ahead": (launch(taken=-LAUNCH_SECONDS), False, Health.STARTING),
    "a launch by a clock that runs far ahead": (launch(taken=-LAUNCH_SECONDS - 0.1), False, Health.DEAD),
    "a lease that a power cut emptied": (epoch(taken=NOW), False, Health.DEAD),
    "starts": (epoch(taken=100, beat=beat(Phase.STARTING)), False, Health.STARTING),
    "a driver that spoke has no longer the time of a launch": (
        launch(taken=100, beat=beat(Phase.STARTING, age=STALE_SECONDS + 0.1)),
        False,
        Health.DEAD,
    ),
    "runs": (epoch(taken=100, beat=beat(Phase.RUNNING)), False, Health.RUNNING),
    "runs, before its queries are known": (epoch(taken=1, beat=beat(Phase.RUNNING, queries=())), False, Health.RUNNING),
    "runs, almost stale": (epoch(taken=100, beat=beat(Phase.RUNNING, age=STALE_SECONDS)), False, Health.RUNNING),
    "beats no more": (epoch(taken=100, beat=beat(Phase.RUNNING, age=STALE_SECONDS + 0.1)), False, Health.DEAD),
    "gone, though its beat is fresh": (epoch(taken=100, beat=beat(Phase.RUNNING)), True, Health.DEAD),
    "a clock that runs ahead a little": (
        epoch(taken=100, beat=beat(Phase.RUNNING, age=-STALE_SECONDS)),
        False,
        Health.RUNNING,
    ),
    "a sign from the future is as old as one from the past": (
        epoch(taken=100, beat=beat(Phase.RUNNING, age=-STALE_SECONDS - 0.1)),
        False,
        Health.DEAD,
    ),
    "steps": (epoch(beat=beat(Phase.RUNNING, queries=(query(idle=STALL_SECONDS),))), False, Health.RUNNING),
    "steps no more": (epoch(beat=beat(Phase.RUNNING, queries=(query(idle=STALL_SECONDS + 1),))), False, Health.STALLED),
    "one of two steps no more": (
        epoch(beat=beat(Phase.RUNNING, queries=(query("a"), query("b", idle=STALL_SECONDS + 1)))),
        False,
        Health.STALLED,
    ),
    "a start is no stall": (
        epoch(beat=beat(Phase.STARTING, queries=(query(idle=STALL_SECONDS + 1),))),
        False,
        Health.STARTING,
    ),
    "stalled, and then dead": (
        epoch(taken=100, beat=beat(Phase.RUNNING, age=STALE_SECONDS + 1, queries=(query(idle=STALL_SECONDS + 1),))),
        False,
        Health.DEAD,
    ),
    "asked to stop": (epoch(beat=beat(Phase.RUNNING), stop=STOP), False, Health.STOPPING),
    "asked to stop while it stalls": (
        epoch(beat=beat(Phase.RUNNING, queries=(query(idle=STALL_SECONDS + 1),)), stop=STOP),
        False,
        Health.STOPPING,
    ),
    "asked to stop before it came": (launch(stop=STOP), False, Health.STOPPING),
    "asked to stop, and died": (epoch(beat=beat(Phase.RUNNING), stop=STOP), True, Health.DEAD),
    "asked to stop, and beats no more": (
        epoch(taken=100, beat=beat(Phase.STOPPING, age=STALE_SECONDS + 1), stop=STOP),
        False,
        Health.DEAD,
    ),
    "stops by itself": (epoch(beat=beat(Phase.STOPPING)), False, Health.STOPPING),
    "ended in order": (epoch(beat=beat(Phase.STOPPING), receipt=CLEAN), False, Health.STOPPED),
    "ended in order as asked": (
        epoch(beat=beat(Phase.STOPPING), stop=STOP, receipt=CLEAN),
        True,
        Health.STOPPED,
    ),
    "ended long ago": (epoch(taken=9000, beat=beat(Phase.STOPPING, age=9000), receipt=CLEAN), True, Health.STOPPED),
    "failed": (epoch(beat=beat(Phase.STOPPING), receipt=FAILED), False, Health.FAILED),
    "failed, and is gone": (epoch(taken=9000, owner=SOMEONE, receipt=FAILED), True, Health.FAILED),
    "declared dead, though it beats": (epoch(beat=beat(Phase.RUNNING), receipt=FAILED), False, Health.FAILED),
}


@pytest.mark.parametrize(("known", "gone", "expected"), HEALTH.values(), ids=HEALTH)
def test_health(known: Epoch, gone: bool, expected: Health) -> None:
    assert health(known, NOW, gone=gone) is expected


def test_every_health_is_in_the_table() -> None:
    assert {expected for _, _, expected in HEALTH.values()} == set(Health)


@pytest.mark.parametrize("state", Health)
def test_what_has_ended_is_not_alive(state: Health) -> None:
    assert state.alive == (state not in (Health.STOPPED, Health.FAILED, Health.DEAD))


QUERIES: dict[str, tuple[tuple[QueryProgress, ...], list[str]]] = {
    "none yet": ((), []),
    "all step": ((query("a"), query("b", idle=STALL_SECONDS)), []),
    "one does not": ((query("a"), query("b", idle=STALL_SECONDS + 1)), ["b"]),
    "none does": ((query("a", idle=STALL_SECONDS + 1), query("b", idle=9000)), ["a", "b"]),
    "a clock that runs ahead": ((query("a", idle=-9000),), []),
}


@pytest.mark.parametrize(("queries", "stalled"), QUERIES.values(), ids=QUERIES)
def test_stalled_queries(queries: tuple[QueryProgress, ...], stalled: list[str]) -> None:
    known = epoch(beat=beat(Phase.RUNNING, queries=queries))
    assert [found.topic for found in stalled_queries(known, NOW)] == stalled


def test_before_its_first_beat_nothing_stalls() -> None:
    assert stalled_queries(epoch(taken=9000), NOW) == []


HOLDERS: dict[str, tuple[Epoch, Owner | None, Phase]] = {
    "a launch": (launch(), AIRFLOW, Phase.LAUNCHED),
    "a launch that is spoken for": (launch(beat=beat(Phase.LAUNCHED)), SOMEONE, Phase.LAUNCHED),
    "taken by its driver": (epoch(owner=SOMEONE), SOMEONE, Phase.STARTING),
    "a launch that became a driver": (launch(beat=beat(Phase.RUNNING)), SOMEONE, Phase.RUNNING),
    "a lease that a power cut emptied": (epoch(), None, Phase.STARTING),
}


@pytest.mark.parametrize(("known", "holder", "phase"), HOLDERS.values(), ids=HOLDERS)
def test_who_runs_and_what_it_says(known: Epoch, holder: Owner | None, phase: Phase) -> None:
    assert (known.holder, known.phase, known.is_launch) == (holder, phase, phase is Phase.LAUNCHED)


@pytest.mark.parametrize(
    ("lags", "total"),
    [((), None), ((None,), None), ((0,), 0), ((3, None), 3), ((3, 4), 7)],
    ids=["no query", "none knows", "caught up", "one knows", "both know"],
)
def test_the_lag_of_all_queries_that_know(lags: Sequence[int | None], total: int | None) -> None:
    assert epoch(beat=beat(Phase.RUNNING, queries=tuple(query(lag=lag) for lag in lags))).lag == total


def test_before_its_first_beat_no_lag_is_known() -> None:
    assert epoch().lag is None


@pytest.mark.parametrize(
    ("stop", "patience"),
    [
        (Stop(time=NOW, by="x"), STOP_SECONDS),
        (Stop(time=NOW, by="x", seconds=5), 5),
        (Stop(time=NOW, by="x", seconds=600, drain=True), 600 + STOP_SECONDS),
    ],
    ids=["at once", "with less patience", "drained"],
)
def test_how_long_a_driver_may_still_be_there(stop: Stop, patience: float) -> None:
    assert stop.patience_seconds == patience


def test_a_death_is_noticed_in_the_time_that_users_are_told() -> None:
    """A supervisor looks every second, and then waits for longer than a heartbeat takes."""
    assert BEAT_SECONDS < LOOK_ON_SECONDS
    assert 2 * BEAT_SECONDS < STALE_SECONDS, "one heartbeat may be late"
    assert 1 + STALE_SECONDS + LOOK_ON_SECONDS <= DEAD_SECONDS


# -- How many failed, and how long to wait --


def bad(number: int, **known: float) -> Epoch:
    return ended(number, clean=False, **known)


def good(number: int) -> Epoch:
    return ended(number, clean=True)


FAILURES: dict[str, tuple[list[Epoch], int]] = {
    "nothing is known": ([], 0),
    "the first runs": ([epoch(1)], 0),
    "the first ended in order": ([good(1)], 0),
    "the first failed": ([bad(1)], 1),
    "one after the other": ([bad(1), bad(2), bad(3)], 3),
    "an end in order begins anew": ([bad(1), good(2), bad(3)], 1),
    "the last ended in order": ([bad(1), bad(2), good(3)], 0),
    "the one that runs does not count": ([bad(1), bad(2), epoch(3)], 2),
    "one that ran well and failed begins anew": ([bad(1), bad(2), bad(3, lived=WELL_SECONDS)], 1),
    "those after one that ran well": ([bad(1), bad(2, lived=WELL_SECONDS), bad(3), epoch(4)], 2),
    "almost well": ([bad(1), bad(2, lived=WELL_SECONDS - 0.1)], 2),
    "one that died at once and was found hours later was never well": (
        [bad(1), epoch(2, taken=9000, beat=beat(Phase.STARTING, age=8999), receipt=FAILED)],
        2,
    ),
    "one without a receipt between": ([bad(1), epoch(2, taken=9000), bad(3)], 2),
}


@pytest.mark.parametrize(("history", "expected"), FAILURES.values(), ids=FAILURES)
def test_failures(history: list[Epoch], expected: int) -> None:
    assert failures(history) == expected


@pytest.mark.parametrize(
    ("failed", "longest"),
    [(1, 5.0), (2, 10.0), (3, 20.0), (4, 40.0), (5, 80.0), (6, 160.0), (7, 300.0), (8, 300.0), (1000, 300.0)],
)
def test_the_wait_doubles_up_to_its_longest(failed: int, longest: float) -> None:
    waits = [backoff_seconds(failed, f"job {number}") for number in range(200)]
    assert longest / 2 <= min(waits) < 0.6 * longest
    assert 0.9 * longest < max(waits) <= longest


def test_without_a_failure_there_is_no_wait() -> None:
    assert backoff_seconds(0, "job 1") == 0.0


@given(failed=st.integers(1, 1000), seed=st.text())
def test_a_wait_is_within_its_bounds_and_the_same_for_all_who_ask(failed: int, seed: str) -> None:
    wait = backoff_seconds(failed, seed)
    assert FIRST_BACKOFF_SECONDS / 2 <= wait <= LONGEST_BACKOFF_SECONDS
    assert wait == backoff_seconds(failed, seed)
    assert wait <= backoff_seconds(failed + 1, seed)


# -- The next step of a supervisor --

STEPS: dict[str, tuple[list[Epoch], bool, Attach | Launch]] = {
    "nobody ever ran": ([], False, Launch()),
    "it runs": ([epoch(1, beat=beat(Phase.RUNNING))], False, Attach(1)),
    "it starts": ([epoch(1, owner=SOMEONE)], False, Attach(1)),
    "a launch under way": ([launch(taken=100)], False, Attach(1)),
    "it stalls and is left alone": (
        [epoch(4, beat=beat(Phase.RUNNING, queries=(query(idle=9000),)))],
        False,
        Attach(4),
    ),
    "it stops": ([epoch(4, beat=beat(Phase.RUNNING), stop=STOP)], False, Attach(4)),
    "the newest counts": ([bad(1), good(2), bad(3), epoch(4, beat=beat(Phase.RUNNING))], False, Attach(4)),
    "an old one that beats again does not": (
        [epoch(1, beat=beat(Phase.RUNNING)), good(2)],
        False,
        Launch(),
    ),
    "it ended in order": ([bad(1), good(2)], False, Launch()),
    "it is gone, the first of its kind": ([epoch(1, beat=beat(Phase.RUNNING))], True, Launch()),
    "it beats no more": ([epoch(1, taken=100, beat=beat(Phase.RUNNING, age=50))], False, Launch()),
    "it ended in order, by a clock that runs ahead": ([ended(1, clean=True, ago=-3600)], False, Launch()),
    "a launch whose launcher is gone, the first of its kind": ([launch()], True, Launch()),
    "it failed, by a clock that runs ahead": ([bad(1), bad(2, ago=-0.1)], False, Launch()),
    "it failed long ago": ([bad(1, ago=LONGEST_BACKOFF_SECONDS)], False, Launch()),
}


@pytest.mark.parametrize(("history", "gone", "expected"), STEPS.values(), ids=STEPS)
def test_next_step(history: list[Epoch], gone: bool, expected: Attach | Launch) -> None:
    assert next_step(history, NOW, job="ingest", gone=gone) == expected


WAITS: dict[str, tuple[list[Epoch], bool, int]] = {
    "it just failed": ([bad(1)], False, 1),
    "it failed again": ([bad(1), bad(2)], False, 2),
    "it failed after an end in order": ([bad(1), good(2), bad(3)], False, 1),
    "it died after one that failed": ([bad(1), epoch(2, beat=beat(Phase.RUNNING))], True, 1),
    "it was well and failed": ([bad(1), bad(2), bad(3, lived=WELL_SECONDS)], False, 1),
}


@pytest.mark.parametrize(("history", "gone", "failed"), WAITS.values(), ids=WAITS)
def test_after_a_failure_it_waits_and_then_launches(history: list[Epoch], gone: bool, failed: int) -> None:
    step = next_step(history, NOW, job="ingest", gone=gone)
    until = NOW + backoff_seconds(failed, f"ingest {history[-1].number}")
    assert step == Wait(until, failed)
    assert next_step(history, until - 0.01, job="ingest", gone=gone) == step
    assert next_step(history, until + 0.01, job="ingest", gone=gone) == Launch()


def test_the_wait_counts_from_the_failure_and_not_from_the_look() -> None:
    history = [bad(number, ago=4 * (5 - number)) for number in range(1, 5)]
    step = next_step(history, NOW, job="ingest")
    assert isinstance(step, Wait)
    assert step.until == NOW - 4 + backoff_seconds(4, "ingest 4")


def test_jobs_that_fail_together_do_not_start_together() -> None:
    history = [bad(1), bad(2), bad(3), bad(4)]
    waits = {next_step(history, NOW, job=f"pipeline_{number}") for number in range(20)}
    assert len(waits) == 20


# -- For every known state --

moments = st.floats(-1e4, 1e4).map(lambda ago: NOW - ago)
queries = st.builds(QueryProgress, topic=st.just("t"), stepped=moments, lag=st.none() | st.integers(0, 10))
beats = st.builds(
    Beat,
    time=moments,
    owner=st.just(SOMEONE),
    phase=st.sampled_from(Phase),
    stall_seconds=st.floats(1, 1000),
    queries=st.lists(queries, max_size=2).map(tuple),
)
stops = st.builds(Stop, time=moments, by=st.just("x"), seconds=st.floats(0, 1000), drain=st.booleans())
receipts = st.builds(Receipt, time=moments, clean=st.booleans(), cause=st.just("x"))
epochs = st.builds(
    Epoch,
    number=st.just(0),
    taken=moments,
    owner=st.none() | st.just(SOMEONE),
    launched=st.booleans(),
    beat=st.none() | beats,
    stop=st.none() | stops,
    receipt=st.none() | receipts,
)
histories = st.lists(epochs, max_size=6).map(
    lambda known: [replace(one, number=number) for number, one in enumerate(known, 1)]
)


@given(history=histories, gone=st.booleans())
def test_it_attaches_exactly_to_what_lives_and_launches_only_when_nothing_does(
    history: list[Epoch], gone: bool
) -> None:
    step = next_step(history, NOW, job="ingest", gone=gone)
    alive = bool(history) and health(history[-1], NOW, gone=gone).alive
    assert (step == Attach(len(history))) if alive else not isinstance(step, Attach)


@given(history=histories, gone=st.booleans())
def test_a_wait_has_a_reason_and_an_end(history: list[Epoch], gone: bool) -> None:
    step = next_step(history, NOW, job="ingest", gone=gone)
    if isinstance(step, Wait):
        assert step.failures == failures(history) >= 1
        assert NOW <= step.until <= NOW + LONGEST_BACKOFF_SECONDS
        assert next_step(history, step.until + 0.01, job="ingest", gone=True) == Launch()


@given(history=histories)
def test_failures_are_counted_from_the_last_end_in_order(history: list[Epoch]) -> None:
    count = failures(history)
    assert 0 <= count <= sum(one.receipt is not None and not one.receipt.clean for one in history)
    assert failures([*history, ended(9, clean=True)]) == 0
    assert failures([*history, ended(9, clean=False)]) == count + 1
    assert failures([*history, ended(9, clean=False, lived=WELL_SECONDS)]) == 1
    assert failures([*history, epoch(9)]) == count


@given(known=epochs, later=st.floats(0, 1e5))
def test_who_is_dead_does_not_rise(known: Epoch, later: float) -> None:
    """By one clock only: a sign from the future may become a sign of now."""
    ended = known.receipt is not None or known.last_sign <= NOW
    if ended and not health(known, NOW).alive:
        assert health(known, NOW + later) is health(known, NOW)
    assert not health(known, NOW, gone=True).alive


@given(known=epochs)
def test_by_the_clock_of_its_last_sign_it_lives_until_its_receipt(known: Epoch) -> None:
    assert health(known, known.last_sign).alive == (known.receipt is None)


# -- The identity of a process --


def test_this_process_lives() -> None:
    owner = Owner.this_process()
    assert owner == Owner.of(psutil.Process().pid)
    assert owner.host == socket.gethostname()
    assert not owner.is_gone()


def test_a_process_that_ended_is_gone_also_before_it_is_buried() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner.of(process.pid)
    assert not owner.is_gone()
    process.kill()
    processes.wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, "its end", 10)
    assert owner.is_gone()
    process.communicate()
    assert owner.is_gone()


def test_a_recycled_process_id_is_another_process() -> None:
    me = Owner.this_process()
    assert replace(me, started_seconds=me.started_seconds - 60).is_gone()


def test_a_process_of_another_machine_is_never_known_to_be_gone() -> None:
    assert not replace(Owner.this_process(), host="another-host", started_seconds=0.0).is_gone()


def test_a_process_in_another_container_is_never_known_to_be_gone() -> None:
    """Containers may share a host name, and each counts its processes from one."""
    me = Owner.this_process()
    assert me.pid_namespace == Path("/proc/self/ns/pid").stat().st_ino
    for started in (me.started_seconds, 0.0):
        assert not replace(me, pid_namespace=me.pid_namespace + 1, started_seconds=started).is_gone()


def test_an_owner_of_whom_no_namespace_is_known_is_never_known_to_be_gone() -> None:
    """An earlier version wrote such an owner."""
    me = Owner.this_process()
    assert not Owner(host=me.host, pid=me.pid, started_seconds=0.0).is_gone()


def test_a_clock_set_anew_kills_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux computes a process's start from the clock: an hour forward moves it, and the boot, by an hour."""
    owner = Owner.this_process()
    started, booted = psutil.Process().create_time() + 3600, psutil.boot_time() + 3600
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: started)
    monkeypatch.setattr(psutil, "boot_time", lambda: booted)
    assert not owner.is_gone()
