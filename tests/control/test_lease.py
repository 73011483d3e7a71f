"""The right to write: one driver per epoch, even if others start, end or are suspended. Stop requests and receipts."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from queue import Queue
from typing import Any

import psutil
import pytest

from jobs.control import folder as module
from jobs.control import lease as lease_module
from jobs.control.epochs import (
    DEAD_SECONDS,
    LAUNCH_SECONDS,
    STALE_SECONDS,
    Attach,
    Beat,
    Health,
    Launch,
    Owner,
    Phase,
    QueryProgress,
    Stop,
    Wait,
)
from jobs.control.folder import KEPT_EPOCHS, Control
from jobs.control.lease import EPOCH_VARIABLE, LOG_VARIABLE, Lease, LeaseLostError
from jobs.refusal import Refusal
from tests import processes
from tests.control.made import JOB, elsewhere, ended, held, newest_health, write_beat, write_lease
from tests.control.test_stop import acquire
from tests.processes import repeated, wait_until

# -- Who holds --


def test_the_first_epoch_is_one_and_a_live_holder_is_left_alone(control: Control) -> None:
    assert control.newest() == 0
    assert control.history() == []
    with held(control) as lease:
        assert lease.epoch == control.newest() == 1
        lease.check()
        with pytest.raises(Refusal, match=rf"'{JOB}' is already running: process {os.getpid()} on .* holds epoch 1"):
            Lease.acquire(control, {})
        assert control.newest() == 1
        lease.check()


def test_a_released_lease_is_taken_at_once(control: Control) -> None:
    for epoch in range(1, 4):
        with held(control) as lease:
            assert lease.epoch == epoch
    assert [known.receipt.cause for known in control.history() if known.receipt] == ["drained"] * 3


def test_each_job_has_a_folder_of_its_own(tmp_path: Path) -> None:
    with held(Control.of(tmp_path, "a")) as a, held(Control.of(tmp_path, "b")) as b:
        assert (a.epoch, b.epoch) == (1, 1)


def test_another_process_is_refused_until_it_is_killed(shared: Control, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(Refusal, match=f"process {holder.pid} "):
        Lease.acquire(shared, {})
    holder.kill()
    wait_until(lambda: psutil.Process(holder.pid).status() == psutil.STATUS_ZOMBIE, "its end", 10)
    with held(shared) as lease:  # The process is dead, though its parent has not reaped it and its heartbeat is fresh.
        assert lease.epoch == 2
    receipt = shared.epoch(1).receipt
    assert receipt
    assert not receipt.clean
    assert f"died without a receipt (killed, or out of memory): process {holder.pid} on" in receipt.cause


def test_a_paused_holder_is_overtaken_and_sees_it(shared: Control, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(holder.pid).status() == psutil.STATUS_STOPPED, "its pause", 10)
    known = shared.epoch(1)
    assert known.beat
    assert known.owner
    write_lease(shared, 1, known.owner, age=STALE_SECONDS + 1)
    shared.beat(1, replace(known.beat, time=time.time() - STALE_SECONDS - 1))
    with held(shared) as successor:
        overtaken = Lease(shared, 1, known.beat)
        with pytest.raises(LeaseLostError, match=r"epoch 1 of 'rolling_sum' has lost its lease"):
            overtaken.check()
        successor.check()


def test_one_that_was_declared_dead_holds_no_more(control: Control, quick: None) -> None:
    """This holds even before another driver starts in its place."""
    lease = Lease.acquire(control, {})
    assert control.end(1, ended("declared dead", clean=False))
    with pytest.raises(LeaseLostError):
        lease.check()
    lease.release(ended())
    receipt = control.epoch(1).receipt
    assert receipt
    assert (receipt.clean, receipt.cause) == (False, "declared dead")


def test_the_heartbeat_sees_that_a_lease_is_lost_for_good(control: Control, quick: None) -> None:
    lease = Lease.acquire(control, {})
    assert not lease.is_lost
    write_lease(control, 2)
    wait_until(lambda: lease.is_lost, "the look for a newer epoch", 10)
    control.documents.delete("lease-0000000002")
    assert not control.is_over(1)
    assert lease.is_lost
    with pytest.raises(LeaseLostError):
        lease.check()
    lease.release(ended())


def test_the_look_before_a_commit_waits_for_no_heartbeat(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 600)
    lease = Lease.acquire(control, {})
    control.end(1, ended("declared dead", clean=False))
    with pytest.raises(LeaseLostError):
        lease.check()
    assert not lease.is_lost
    lease.release(ended())


def test_an_overtaken_holder_beats_no_more_and_its_successor_stays(
    control: Control, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "GRACE_SECONDS", 10 * lease_module.BEAT_SECONDS)
    many_beats = threading.Event()
    lease = acquire(control, many_beats)
    write_lease(control, 2)
    wait_until(lambda: lease.is_lost, "the look for a newer epoch", 10)
    before = control.epoch(1).beat
    assert many_beats.wait(10)
    lease.release(ended())
    assert control.epoch(1).beat == before
    assert control.epoch(2).receipt is None
    with pytest.raises(Refusal, match="another-host holds epoch 2"):
        Lease.acquire(control, {})


def test_an_overtaken_holder_stays_so_after_its_successors_were_pruned(control: Control) -> None:
    """A laptop was suspended for a night, while its stream was started elsewhere again and again."""
    sleeper = Lease(control, 1, Beat(time=time.time(), owner=elsewhere(), phase=Phase.RUNNING))
    write_lease(control, 1, age=1000)
    for _ in range(KEPT_EPOCHS + 3):
        with held(control), pytest.raises(LeaseLostError):
            sleeper.check()
    with pytest.raises(LeaseLostError):
        sleeper.check()


@pytest.mark.parametrize(
    ("lease_age", "beat_age", "is_held"),
    [
        (0, None, True),
        (STALE_SECONDS + 5, None, False),
        (1000, 1, True),
        (1000, STALE_SECONDS + 5, False),
        (-3600, None, False),
    ],
    ids=[
        "just taken, no beat yet",
        "taken long ago, never beaten",
        "beats",
        "beats no more",
        "taken by a clock that was wrong, never beaten",
    ],
)
def test_a_holder_on_another_machine_is_judged_by_its_signs(
    control: Control, lease_age: float, beat_age: float | None, is_held: bool
) -> None:
    write_lease(control, 3, age=lease_age)
    if beat_age is not None:
        write_beat(control, 3, age=beat_age)
    write_beat(control, 2)  # A heartbeat of the epoch before does not count.
    if is_held:
        with pytest.raises(Refusal, match=f"wait until its last heartbeat is {DEAD_SECONDS:.0f} s old"):
            Lease.acquire(control, {})
        assert control.newest() == 3
    else:
        with held(control) as lease:
            assert lease.epoch == 4


# The ages of the lease, of its last heartbeat and of the following ones, by the reader's clock.
CLOCKS: dict[str, tuple[float, float, float]] = {
    "paused for a while": (7200, 60, 0),
    "set forward": (3660, 3600, 0),
    "set back": (-3540, -3600, 0),
    "the driver's is behind": (3660, 3600, 3600),
    "the driver's is ahead": (-3540, -3600, -3600),
    "the driver's is behind its launcher's": (60, 3600, 3600),
    "the driver's is ahead of its launcher's": (60, -3600, -3600),
}


@pytest.mark.parametrize(("taken", "last", "following"), CLOCKS.values(), ids=CLOCKS)
def test_whatever_the_clocks_say_one_that_beats_holds_the_lease(
    taken: float, last: float, following: float, control: Control
) -> None:
    write_lease(control, 1, age=taken)
    write_beat(control, 1, age=last)
    with repeated(lambda: write_beat(control, 1, age=following)):
        assert newest_health(control) is Health.RUNNING
        assert control.next_step() == Attach(1)
        with pytest.raises(Refusal, match="process 1 on another-host holds epoch 1"):
            control.reserve(elsewhere())
    assert control.epoch(1).receipt is None
    assert control.newest() == 1


@pytest.mark.parametrize(("taken", "last", "_following"), CLOCKS.values(), ids=CLOCKS)
def test_whatever_the_clocks_say_one_that_beats_no_more_is_dead(
    taken: float, last: float, _following: float, control: Control
) -> None:
    write_lease(control, 1, age=taken)
    write_beat(control, 1, age=last)
    began = time.monotonic()
    assert newest_health(control) is Health.DEAD
    assert time.monotonic() - began > module.LOOK_ON_SECONDS
    step = control.next_step()
    assert isinstance(step, Wait)
    assert step.failures == 1
    assert control.reserve(elsewhere()) == 2


@pytest.mark.parametrize(("idle", "state"), [(0, Health.RUNNING), (59, Health.RUNNING), (61, Health.STALLED)])
@pytest.mark.parametrize("age", [3600, -3600])
def test_one_with_another_clock_stalls_by_its_own(age: float, idle: float, state: Health, control: Control) -> None:
    write_lease(control, 1, age=age)

    def beat() -> None:
        query = QueryProgress(topic="numbers", stepped=time.time() - age - idle)
        write_beat(control, 1, age=age, stall_seconds=60, queries=(query,))

    beat()
    with repeated(beat):
        assert newest_health(control) is state


def test_one_that_says_how_it_ended_while_it_is_looked_at_has_ended(control: Control) -> None:
    write_lease(control, 1, age=1000)
    write_beat(control, 1, age=1000)
    with repeated(lambda: control.end(1, ended()), 0.1):
        assert newest_health(control) is Health.STOPPED
    assert control.next_step() == Launch()


def test_one_that_is_gone_or_never_came_is_not_looked_at_for_long(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_ON_SECONDS", 60)
    me = Owner.this_process()
    gone = replace(me, started_seconds=me.started_seconds - 60)
    write_lease(control, 1, gone)
    write_beat(control, 1, owner=gone)
    write_lease(control, 2, age=1000)
    began = time.monotonic()
    assert [control.health(control.epoch(number)) for number in (1, 2)] == [Health.DEAD] * 2
    assert time.monotonic() - began < 5


def test_a_recycled_process_id_holds_nothing(control: Control) -> None:
    me = Owner.this_process()
    write_lease(control, 1, replace(me, started_seconds=me.started_seconds - 60))
    with held(control) as lease:
        assert lease.epoch == 2
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    write_lease(control, 3, replace(me, pid=process.pid))
    with held(control) as lease:
        assert lease.epoch == 4


def test_a_heartbeat_that_a_power_cut_emptied_tells_nothing(shared: Control, tmp_path: Path) -> None:
    write_lease(shared, 1)
    (tmp_path / "control" / JOB / "heartbeat-0000000001").write_text("")
    with pytest.raises(Refusal, match="another-host holds epoch 1"):
        Lease.acquire(shared, {})


@pytest.mark.parametrize("kind", ["lease", "receipt", "stop"])
def test_what_a_power_cut_emptied_stops_no_start(kind: str, shared: Control, tmp_path: Path) -> None:
    """No process survives a power cut."""
    write_lease(shared, 1, age=1000)
    (tmp_path / "control" / JOB / f"{kind}-0000000001").write_text("")
    assert newest_health(shared) is Health.DEAD
    with held(shared) as lease:
        assert lease.epoch == 2
        lease.check()


def test_old_epochs_are_pruned_with_all_that_was_said_of_them(control: Control) -> None:
    for epoch in range(1, KEPT_EPOCHS + 4):
        with held(control):
            control.ask_to_stop(epoch, Stop(time=time.time(), by="an operator"))
    last = KEPT_EPOCHS + 3
    kept = [f"{number:010d}" for number in range(last - KEPT_EPOCHS + 1, last + 1)]
    kinds = ("heartbeat", "lease", "receipt", "stop")
    found = [name for name in control.documents.names() if name != "probe"]
    assert found == [f"{kind}-{number}" for kind in kinds for number in kept]
    assert [known.number for known in control.history()] == [int(number) for number in kept]


def test_a_starter_that_slept_past_the_pruning_is_refused(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """The starter saw no holder and was suspended. Meanwhile the epoch it wanted was taken, ended and pruned."""
    write_lease(control, 19)
    newest, long_ago = Control.newest, iter([0])
    monkeypatch.setattr(Control, "newest", lambda at: next(long_ago, newest(at)))
    with pytest.raises(Refusal, match="holds the lease"):
        Lease.acquire(control, {})
    assert not control.documents.exists("heartbeat-0000000001")
    assert control.newest() == 19


# -- A lease that was taken for the driver --


def launched(control: Control) -> dict[str, str]:
    """The environment that a launcher gives to its driver."""
    number = control.reserve(Owner.this_process(), launched=True)
    return {EPOCH_VARIABLE: str(number), LOG_VARIABLE: "/logs/driver.log"}


def test_a_launched_driver_takes_the_epoch_that_was_reserved_for_it(control: Control) -> None:
    env = launched(control)
    assert newest_health(control) is Health.STARTING
    taken = control.epoch(1)
    assert (taken.launched, taken.phase, taken.holder) == (True, Phase.LAUNCHED, Owner.this_process())
    lease = Lease.acquire(control, env, stall_seconds=7.0)
    beat = control.epoch(1).beat
    assert lease.epoch == control.newest() == 1
    assert beat
    assert (beat.owner, beat.phase) == (Owner.this_process(), Phase.STARTING)
    assert (beat.log, beat.stall_seconds) == ("/logs/driver.log", 7.0)
    lease.check()
    lease.release(ended())


def test_the_environment_is_the_process_s(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EPOCH_VARIABLE, launched(control)[EPOCH_VARIABLE])
    lease = Lease.acquire(control)
    assert lease.epoch == 1
    lease.release(ended())


def test_beside_a_launch_under_way_nobody_starts(control: Control) -> None:
    launched(control)
    with pytest.raises(Refusal, match=f"already running: process {os.getpid()} on .* holds epoch 1"):
        Lease.acquire(control, {})
    with pytest.raises(Refusal, match="already running"):
        control.reserve(elsewhere(), launched=True)


def test_a_launch_that_never_came_is_given_up(control: Control) -> None:
    write_lease(control, 1, age=LAUNCH_SECONDS + 1, launched=True)
    assert control.reserve(elsewhere()) == 2
    receipt = control.epoch(1).receipt
    assert receipt
    assert receipt.cause == (
        f"the driver did not start: process 1 on another-host wrote no heartbeat for {LAUNCH_SECONDS:.0f} s; "
        "the last line of its log: no log is known"
    )
    with pytest.raises(Refusal, match="epoch 1 of job 'rolling_sum' has ended, or has another driver: this start ends"):
        Lease.acquire(control, {EPOCH_VARIABLE: "1"})
    assert control.epoch(1).beat is None


def test_a_launch_whose_process_ended_is_given_up_at_once(control: Control, tmp_path: Path) -> None:
    launched(control)
    log_file = tmp_path / "driver.log"
    log_file.write_text("starting\nno such topic\n\n")
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    write_beat(control, 1, owner=Owner.of(process.pid), phase=Phase.LAUNCHED, log=str(log_file))
    assert newest_health(control) is Health.STARTING
    process.communicate(b"\n")
    assert newest_health(control) is Health.DEAD
    assert control.reserve(elsewhere()) == 2
    receipt = control.epoch(1).receipt
    assert receipt
    assert receipt.cause.startswith(f"the driver did not start: process {process.pid} on ")
    assert receipt.cause.endswith(" has ended; the last line of its log: no such topic")


def test_a_launch_whose_launcher_ended_is_given_up_at_once(control: Control) -> None:
    """The launcher is a task that was killed before it had started a driver."""
    launcher = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    control.reserve(Owner.of(launcher.pid), launched=True)
    assert control.next_step() == Attach(1)
    launcher.communicate(b"\n")
    assert newest_health(control) is Health.DEAD
    assert isinstance(control.next_step(), Wait)
    receipt = control.epoch(1).receipt
    assert receipt
    assert receipt.cause.startswith(f"the driver did not start: process {launcher.pid} on ")
    assert receipt.cause.endswith(" has ended; the last line of its log: no log is known")


def test_the_launcher_may_end_when_the_driver_has_spoken(control: Control) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    number = control.reserve(Owner.of(launcher.pid), launched=True)
    lease = Lease.acquire(control, {EPOCH_VARIABLE: str(number)})
    launcher.communicate(b"\n")
    assert newest_health(control) is Health.STARTING
    assert control.next_step() == Attach(1)
    lease.release(ended())


def test_an_epoch_is_taken_by_one_driver_only(control: Control) -> None:
    """A cluster that starts a failed driver again by itself starts it under the same epoch."""
    env = launched(control)
    lease = Lease.acquire(control, env)
    with pytest.raises(Refusal, match="has another driver"):
        Lease.acquire(control, env)
    lease.release(ended("no memory", clean=False))
    with pytest.raises(Refusal, match="has another driver"):
        Lease.acquire(control, env)


# -- Races --

ROUNDS, RACERS = 60, 3


def race(root: str, start: Barrier, results: "Queue[tuple[int, Any]]") -> None:
    """Ask for the lease of each round at the same moment as the others; hold it until all have asked."""
    for number in range(ROUNDS):
        control = Control.of(Path(root) / str(number), JOB)
        env = {EPOCH_VARIABLE: "1"} if number % 3 == 2 else {}
        start.wait(60)
        lease, answer = None, None
        try:
            lease = Lease.acquire(control, env)
            start.wait(60)
            lease.check()
            answer = lease.epoch
        except Refusal as refusal:
            answer = str(refusal)
            if lease is None:
                start.wait(60)
        results.put((number, answer))
        start.wait(60)
        if lease:
            lease.release(ended())


def test_of_drivers_that_start_together_one_wins(tmp_path: Path) -> None:
    """Of the rounds, a third begins empty, a third with a dead driver's lease, a third with a lease for a launch."""
    for number in range(ROUNDS):
        control = Control.of(tmp_path / str(number), JOB)
        if number % 3 == 1:
            write_lease(control, 1, age=100)
        if number % 3 == 2:
            control.reserve(elsewhere(), launched=True)
    found = processes.race(race, tmp_path, racers=RACERS, answers=ROUNDS * RACERS)
    wrong = {}
    for number in range(ROUNDS):
        answers = [answer for at, answer in found if at == number]
        refused = [answer for answer in answers if isinstance(answer, str)]
        expected = [2 if number % 3 == 1 else 1]
        if [answer for answer in answers if isinstance(answer, int)] != expected:
            wrong[number] = answers
        told = ("holds the lease", "already running", "has another driver")
        assert all(any(words in text for words in told) for text in refused), refused
    assert wrong == {}
