"""The right to write: one driver per epoch, even if others start, end or are suspended. Stop requests and receipts."""

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from queue import Queue
from typing import Any

import psutil
import pytest
from obstore.store import MemoryStore

from jobs.control import epochs
from jobs.control import folder as module
from jobs.control import lease as lease_module
from jobs.control.epochs import (
    DEAD_SECONDS,
    LAUNCH_SECONDS,
    STALE_SECONDS,
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
)
from jobs.control.folder import KEPT_EPOCHS, Control, death_of, last_words
from jobs.control.lease import EPOCH_VARIABLE, LOG_VARIABLE, Lease, LeaseLostError
from jobs.refusal import Refusal
from jobs.storage.documents import Documents
from tests import processes
from tests.processes import repeated, wait_until

JOB = "rolling_sum"
_HOLD = """
import sys
from pathlib import Path
from jobs.control.folder import Control
from jobs.control.lease import Lease
lease = Lease.acquire(Control.of(Path(sys.argv[1]), "rolling_sum"))
print(lease.epoch, flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["folder", "object store"])
def control(request: pytest.FixtureRequest, tmp_path: Path) -> Control:
    if request.param == "folder":
        return Control.of(tmp_path, JOB)
    return Control(Documents(MemoryStore()), JOB)


@pytest.fixture
def shared(tmp_path: Path) -> Control:
    """A control folder that other processes see, too."""
    return Control.of(tmp_path, JOB)


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the looks; they are still long enough to see a heartbeat every hundredth of a second."""
    monkeypatch.setattr(module, "LOOK_ON_SECONDS", 0.5)
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.02)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 0.02)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds epoch 1."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    yield process
    process.kill()
    process.communicate()


@contextmanager
def held(control: Control, **options: Any) -> Iterator[Lease]:
    """Hold a lease while the block runs; it ends in order."""
    lease = Lease.acquire(control, {}, **options)
    try:
        yield lease
    finally:
        lease.release(ended())


def ended(cause: str = "drained", *, clean: bool = True) -> Receipt:
    return Receipt(time=time.time(), clean=clean, cause=cause)


def elsewhere() -> Owner:
    return Owner(host="another-host", pid=1, started_seconds=0.0)


def write_lease(control: Control, epoch: int, owner: Owner, *, age: float = 0.0, launched: bool = False) -> None:
    taken = {"owner": asdict(owner), "time": time.time() - age, "launched": launched}
    control.documents.replace(f"lease-{epoch:010d}", taken)


def write_beat(control: Control, epoch: int, *, age: float, owner: Owner | None = None, **known: Any) -> None:
    known = {"phase": Phase.RUNNING, **known}
    control.beat(epoch, Beat(time=time.time() - age, owner=owner or elsewhere(), **known))


def newest_health(control: Control) -> Health:
    return control.health(control.epoch(control.newest()))


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
    assert f"died without a word (killed, or out of memory): process {holder.pid} on" in receipt.cause


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
        with pytest.raises(LeaseLostError, match=r"epoch 1 of 'rolling_sum' was overtaken"):
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
    write_lease(control, 2, elsewhere())
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
    write_lease(control, 2, elsewhere())
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
    write_lease(control, 1, elsewhere(), age=1000)
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
    write_lease(control, 3, elsewhere(), age=lease_age)
    if beat_age is not None:
        write_beat(control, 3, age=beat_age)
    write_beat(control, 2, age=0)  # A heartbeat of the epoch before does not count.
    if is_held:
        with pytest.raises(Refusal, match=f"wait {DEAD_SECONDS:.0f} s after it has died"):
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
    write_lease(control, 1, elsewhere(), age=taken)
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
    write_lease(control, 1, elsewhere(), age=taken)
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
    write_lease(control, 1, elsewhere(), age=age)

    def beat() -> None:
        query = QueryProgress(topic="numbers", stepped=time.time() - age - idle)
        write_beat(control, 1, age=age, stall_seconds=60, queries=(query,))

    beat()
    with repeated(beat):
        assert newest_health(control) is state


def test_one_that_says_how_it_ended_while_it_is_looked_at_has_ended(control: Control) -> None:
    write_lease(control, 1, elsewhere(), age=1000)
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
    write_beat(control, 1, age=0, owner=gone)
    write_lease(control, 2, elsewhere(), age=1000)
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
    write_lease(shared, 1, elsewhere())
    (tmp_path / "control" / JOB / "heartbeat-0000000001").write_text("")
    with pytest.raises(Refusal, match="another-host holds epoch 1"):
        Lease.acquire(shared, {})


@pytest.mark.parametrize("kind", ["lease", "receipt", "stop"])
def test_what_a_power_cut_emptied_stops_no_start(kind: str, shared: Control, tmp_path: Path) -> None:
    """No process survives a power cut."""
    write_lease(shared, 1, elsewhere(), age=1000)
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
    write_lease(control, 19, elsewhere())
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
    write_lease(control, 1, elsewhere(), age=LAUNCH_SECONDS + 1, launched=True)
    assert control.reserve(elsewhere()) == 2
    receipt = control.epoch(1).receipt
    assert receipt
    assert receipt.cause == (
        f"the driver did not start: process 1 on another-host showed nothing for {LAUNCH_SECONDS:.0f} s; "
        "the last line of its log: no log is known"
    )
    with pytest.raises(Refusal, match="epoch 1 of stream 'rolling_sum' is over or taken: this start was given up"):
        Lease.acquire(control, {EPOCH_VARIABLE: "1"})
    assert control.epoch(1).beat is None


def test_a_launch_whose_process_ended_is_given_up_at_once(control: Control, tmp_path: Path) -> None:
    launched(control)
    log_file = tmp_path / "driver.log"
    log_file.write_text("starting\nno such topic\n\n")
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    write_beat(control, 1, age=0, owner=Owner.of(process.pid), phase=Phase.LAUNCHED, log=str(log_file))
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
    with pytest.raises(Refusal, match="over or taken"):
        Lease.acquire(control, env)
    lease.release(ended("no memory", clean=False))
    with pytest.raises(Refusal, match="over or taken"):
        Lease.acquire(control, env)


# -- Heartbeats and receipts --


def test_a_heartbeat_tells_what_is_shown(control: Control, quick: None) -> None:
    with held(control, stall_seconds=33.0) as lease:
        assert newest_health(control) is Health.STARTING
        numbers = QueryProgress(topic="numbers", stepped=time.time(), batch=7, rows=12, lag=3, watermark="2026")
        lease.show(phase=Phase.RUNNING, queries=(numbers,), ui="http://here:4040")
        wait_until(lambda: newest_health(control) is Health.RUNNING, "the beat", 10)
        beat = control.epoch(1).beat
        assert beat
        assert beat == Beat(
            time=beat.time,
            owner=Owner.this_process(),
            phase=Phase.RUNNING,
            stall_seconds=33.0,
            ui="http://here:4040",
            queries=(numbers,),
        )
        wait_until(lambda: control.epoch(1).last_sign > beat.time, "the next beat", 10)


def test_a_receipt_is_told_as_it_was_written(control: Control) -> None:
    receipt = Receipt(
        time=12.5, clean=True, cause="drained", batches={"numbers": 4}, offsets={"numbers": {0: 7, 11: 10**12}}
    )
    Lease.acquire(control, {}).release(receipt)
    assert control.epoch(1).receipt == receipt


def test_the_first_receipt_counts(control: Control) -> None:
    assert control.end(1, ended("first", clean=False))
    assert not control.end(1, ended("second"))
    receipt = control.epoch(1).receipt
    assert receipt
    assert receipt.cause == "first"


def test_after_its_release_it_beats_no_more(control: Control, quick: None) -> None:
    with held(control) as lease:
        pass
    assert not lease._beating.is_alive()
    assert newest_health(control) is Health.STOPPED


def test_the_death_of_a_driver_tells_how_far_it_came(control: Control) -> None:
    write_lease(control, 1, elsewhere(), age=1000)
    done = (
        QueryProgress(topic="numbers", stepped=0, batch=7),
        QueryProgress(topic="lines", stepped=0),
        QueryProgress(topic="clicks", stepped=0, batch=0),
    )
    control.beat(1, Beat(time=86400.0, owner=elsewhere(), phase=Phase.RUNNING, queries=done))
    assert death_of(control.epoch(1)) == (
        "the driver died without a word (killed, or out of memory): process 1 on another-host, "
        "last heartbeat 1970-01-02 00:00:00 UTC, after numbers batch 7, clicks batch 0"
    )
    control.beat(1, Beat(time=86400.0, owner=elsewhere(), phase=Phase.STARTING))
    assert death_of(control.epoch(1)).endswith(", after no batch")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\nb\n", "b"),
        ("a\n\n  \n", "a"),
        ("tideline: no topic clicks\nTraceback\n", "tideline: no topic clicks"),
        ("tideline: one\ntideline: two\nbye", "tideline: two"),
        ("", "it is empty"),
        ("x" * 10**6 + "\nthe end", "the end"),
        ("tideline: long ago\n" + "INFO x\n" * 10**5, "INFO x"),
    ],
    ids=["the last line", "that says something", "a refusal", "the last refusal", "nothing", "of many", "of its end"],
)
def test_the_last_words_of_a_log(text: str, words: str, tmp_path: Path) -> None:
    log_file = tmp_path / "driver.log"
    log_file.write_text(text)
    beat = Beat(time=0.0, owner=elsewhere(), phase=Phase.LAUNCHED, log=str(log_file))
    assert last_words(Epoch(number=1, taken=0.0, beat=beat)) == words


def test_a_log_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    beat = Beat(time=0.0, owner=elsewhere(), phase=Phase.LAUNCHED, log=str(tmp_path / "none.log"))
    told = last_words(Epoch(number=1, taken=0.0, beat=beat))
    assert told == f"{tmp_path / 'none.log'} cannot be read here (No such file or directory)"


# -- Documents of another version --

DOCUMENTS: dict[str, dict[str, Any]] = {
    "lease": {"time": 1.0, "owner": asdict(elsewhere()), "launched": True},
    "heartbeat": {
        "time": 2.0,
        "owner": asdict(elsewhere()),
        "phase": "running",
        "queries": [{"topic": "numbers", "stepped": 3.0, "lag": 4}],
    },
    "stop": {"time": 5.0, "by": "an operator", "drain": True},
    "receipt": {"time": 6.0, "clean": False, "cause": "no memory", "offsets": {"numbers": {"0": 7}}},
}


def told(kind: str, epoch: Epoch) -> object:
    """The part of an epoch that comes from one kind of document."""
    if kind == "lease":
        return (epoch.taken, epoch.owner, epoch.launched)
    return {"heartbeat": epoch.beat, "stop": epoch.stop, "receipt": epoch.receipt}[kind]


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_one_that_says_more_is_understood(kind: str, control: Control, caplog: pytest.LogCaptureFixture) -> None:
    control.documents.replace(f"{kind}-0000000001", DOCUMENTS[kind])
    control.documents.replace(f"{kind}-0000000002", saying_more(DOCUMENTS[kind]))
    understood = told(kind, control.epoch(2))
    assert understood == told(kind, control.epoch(1)) != told(kind, control.epoch(3))
    assert caplog.messages == []


def saying_more(value: Any, path: tuple[str, ...] = ()) -> Any:
    """The same document with one more field in each object, except in tables of topics and partitions."""
    if isinstance(value, list):
        return [saying_more(one, path) for one in value]
    if not isinstance(value, dict):
        return value
    more = {} if "offsets" in path else {"mood": "calm"}
    return {**{name: saying_more(one, (*path, name)) for name, one in value.items()}, **more}


UNREADABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "a lease whose owner says something else": ("lease", {"time": 1.0, "owner": {"name": "x"}}),
    "a lease whose owner is no object": ("lease", {"time": 1.0, "owner": "x"}),
    "a heartbeat without an owner": ("heartbeat", {"time": 1.0, "phase": "running", "queries": []}),
    "a heartbeat with another phase": ("heartbeat", {**DOCUMENTS["heartbeat"], "phase": "resting"}),
    "a heartbeat with other queries": ("heartbeat", {**DOCUMENTS["heartbeat"], "queries": ["numbers"]}),
    "a stop by nobody": ("stop", {"time": 1.0}),
    "a receipt without a cause": ("receipt", {"time": 1.0, "clean": True}),
    "a receipt with other partitions": ("receipt", {**DOCUMENTS["receipt"], "offsets": {"numbers": {"first": 7}}}),
}


@pytest.mark.parametrize(("kind", "document"), UNREADABLE.values(), ids=UNREADABLE)
def test_one_that_cannot_be_understood_tells_nothing(
    kind: str, document: dict[str, Any], control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    control.documents.replace(f"{kind}-0000000001", document)
    assert told(kind, control.epoch(1)) in (told(kind, control.epoch(3)), (1.0, None, False))
    assert f"{kind}-0000000001 of {JOB} cannot be read" in caplog.messages


# -- What follows --


def test_one_that_died_without_a_word_gets_its_receipt_once(control: Control) -> None:
    control.settle()
    write_lease(control, 1, elsewhere(), age=1000)
    assert newest_health(control) is Health.DEAD
    control.settle()
    receipt = control.epoch(1).receipt
    assert receipt
    assert not receipt.clean
    control.settle()
    assert control.epoch(1).receipt == receipt


def test_one_that_lives_or_ended_is_not_settled(control: Control) -> None:
    with held(control):
        control.settle()
        assert control.epoch(1).receipt is None
    control.settle()
    assert newest_health(control) is Health.STOPPED


def test_a_supervisor_launches_attaches_waits_and_launches_again(control: Control) -> None:
    assert control.next_step() == Launch()
    with held(control):
        assert control.next_step() == Attach(1)
    assert control.next_step() == Launch()
    for failed in (1, 2):
        write_lease(control, failed + 1, elsewhere(), age=STALE_SECONDS + 1)
        step = control.next_step()  # This look sees the death, and writes the receipt.
        assert isinstance(step, Wait)
        assert step.failures == failed
        assert 0 < step.until - time.time() <= 5.0 * failed


def test_one_whose_process_is_gone_counts_as_failed_though_its_beat_is_fresh(
    shared: Control, holder: subprocess.Popen[str]
) -> None:
    assert shared.next_step() == Attach(1)
    holder.kill()
    holder.wait()
    step = shared.next_step()
    assert isinstance(step, Wait)
    assert step.failures == 1


def test_an_operator_forgives_the_failures_so_far(control: Control) -> None:
    control.forgive("an operator")
    assert control.next_step() == Launch()
    write_lease(control, 2, elsewhere(), age=1000)
    assert isinstance(control.next_step(), Wait)
    control.forgive("an operator")
    assert control.next_step() == Launch()
    receipt = control.history()[-1].receipt
    assert receipt
    assert (receipt.clean, receipt.cause) == (True, "failures forgotten: an operator")
    with held(control), pytest.raises(Refusal, match="already running"):
        control.forgive("an operator")


class Full(Documents):
    """A store that refuses the next writes of a kind."""

    def __init__(self, refused: int, kind: str) -> None:
        super().__init__(MemoryStore())
        self.refused, self.kind = refused, kind
        self.armed = threading.Event()

    def create(self, name: str, document: dict[str, Any]) -> bool:
        self._refuse(name)
        return super().create(name, document)

    def replace(self, name: str, document: dict[str, Any], *, durable: bool = True) -> None:
        self._refuse(name)
        super().replace(name, document, durable=durable)

    def _refuse(self, name: str) -> None:
        if self.armed.is_set() and name.startswith(self.kind) and self.refused:
            self.refused -= 1
            raise OSError(28, "No space left on device")


def test_a_beat_that_fails_is_tried_again(quick: None, caplog: pytest.LogCaptureFixture) -> None:
    full = Full(3, "heartbeat")
    control = Control(full, JOB)
    with held(control) as lease:
        full.armed.set()
        lease.show(phase=Phase.RUNNING)
        wait_until(lambda: newest_health(control) is Health.RUNNING, "a beat after those that failed", 10)
        lease.check()
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in told] == [f"no heartbeat of {JOB} could be written"] * 3


# -- Stop requests, and the end of patience --


def test_a_stop_request_is_seen_and_the_later_one_counts(control: Control, quick: None) -> None:
    with held(control) as lease:
        assert lease.stop is None
        first = Stop(time=time.time(), by="an operator", drain=True, seconds=99.0)
        control.ask_to_stop(1, first)
        wait_until(lambda: lease.stop == first, "the request", 10)
        assert newest_health(control) is Health.STOPPING
        second = Stop(time=time.time(), by="somebody in a hurry")
        control.ask_to_stop(1, second)
        wait_until(lambda: lease.stop == second, "the later request", 10)
        lease.check()


def test_a_request_to_another_epoch_is_not_obeyed(control: Control, quick: None) -> None:
    with held(control):
        control.ask_to_stop(1, Stop(time=time.time(), by="an operator"))
    with held(control) as lease:
        seen = control.epoch(2).last_sign
        wait_until(lambda: control.epoch(2).last_sign > seen, "a look at what is asked", 10)
        assert lease.stop is None


# The request, its age by this clock, and whether the driver is ended at once.
STOPS: dict[str, tuple[Stop, float, bool]] = {
    "asked just now": (Stop(time=0, by="x"), 0, False),
    "asked long ago, or by a clock that is behind": (Stop(time=0, by="x"), 3600, False),
    "in a hurry": (Stop(time=0, by="x", seconds=0.2), 0, True),
    "in a hurry, by a clock that is ahead": (Stop(time=0, by="x", seconds=0.2), -3600, True),
    "in a hurry, by a clock that is behind": (Stop(time=0, by="x", seconds=0.2), 3600, True),
    "a drain stops first, and then has the time of a stop": (Stop(time=0, by="x", drain=True, seconds=0.2), 0, False),
}


@pytest.mark.parametrize(("stop", "age", "dies"), STOPS.values(), ids=STOPS)
def test_one_that_does_not_stop_in_time_is_ended(
    stop: Stop, age: float, dies: bool, control: Control, quick: None
) -> None:
    died = threading.Event()
    lease, asked = acquire(control, died), time.monotonic()
    control.ask_to_stop(1, replace(stop, time=time.time() - age))
    wait_until(lambda: lease.stop is not None, "the request", 10)
    if dies:
        assert died.wait(10)
        assert time.monotonic() - asked >= 0.2
        cause = hard_end(control)
        assert cause.startswith("the micro-batch under way did not end within ")
        assert cause.endswith(" s of the stop request by x; it will be run again")
    else:
        assert not died.wait(0.5)
        assert control.epoch(1).receipt is None
    lease.release(ended())


def test_a_drain_that_does_not_stop_in_time_is_ended(
    control: Control, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs, "STOP_SECONDS", 0.2)
    died = threading.Event()
    lease, asked = acquire(control, died), time.monotonic()
    control.ask_to_stop(1, Stop(time=time.time(), by="x", drain=True, seconds=0.2))
    assert died.wait(10)
    assert time.monotonic() - asked >= 0.4
    assert "of the stop request by x; it will be run again" in hard_end(control)
    lease.release(ended())


def test_a_later_request_has_a_patience_of_its_own(control: Control, quick: None) -> None:
    """A driver that drains for an hour and is then asked to stop may still end its micro-batch."""
    died = threading.Event()
    lease, asked = acquire(control, died), time.monotonic()
    control.ask_to_stop(1, Stop(time=time.time(), by="an operator", drain=True, seconds=3600))
    wait_until(lambda: lease.stop is not None, "the request", 10)
    assert not died.wait(0.6)
    control.ask_to_stop(1, Stop(time=time.time(), by="somebody in a hurry", seconds=0.5))
    assert died.wait(10)
    assert time.monotonic() - asked >= 1.1
    assert "of the stop request by somebody in a hurry" in hard_end(control)
    lease.release(ended())


def acquire(control: Control, died: threading.Event, phase: Phase = Phase.RUNNING) -> Lease:
    """A lease that sets an event instead of killing the process."""
    epoch = control.reserve(Owner.this_process())
    lease = Lease(control, epoch, Beat(time=time.time(), owner=Owner.this_process(), phase=phase), died.set)
    lease._beating.start()
    return lease


def hard_end(control: Control) -> str:
    """The cause in the receipt of a driver that was killed."""
    receipt = control.epoch(1).receipt
    assert receipt
    assert not receipt.clean
    return receipt.cause


def test_one_that_hangs_while_it_starts_is_ended(
    control: Control, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "START_SECONDS", 0.3)
    died = threading.Event()
    began, lease = time.monotonic(), acquire(control, died, Phase.STARTING)
    assert died.wait(10)
    assert time.monotonic() - began >= 0.3
    assert re.fullmatch(r"no query had begun \d+ s after the start", hard_end(control))
    lease.release(ended())


def test_one_that_hangs_while_it_stops_is_ended(control: Control, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds however long it ran before, and however often it reports that it stops."""
    monkeypatch.setattr(lease_module, "START_SECONDS", 0.1)
    monkeypatch.setattr(lease_module, "STOP_SECONDS", 0.2)
    monkeypatch.setattr(lease_module, "GRACE_SECONDS", 0.2)
    died = threading.Event()
    lease = acquire(control, died)
    assert not died.wait(0.6)
    began = time.monotonic()
    lease.show(phase=Phase.STOPPING)
    with repeated(lambda: lease.show(phase=Phase.STOPPING, ui="http://here:4040")):
        assert died.wait(10)
    assert time.monotonic() - began >= 0.4
    assert re.fullmatch(r"the driver hung for \d+ s while it stopped", hard_end(control))
    lease.release(ended())


def test_one_that_was_overtaken_is_ended_after_its_grace(
    control: Control, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    died = threading.Event()
    lease = acquire(control, died)
    write_lease(control, 2, elsewhere())
    wait_until(lambda: lease.is_lost, "the look for a newer epoch", 10)
    assert not died.wait(10 * lease_module.BEAT_SECONDS)
    monkeypatch.setattr(lease_module, "GRACE_SECONDS", 0.1)
    assert died.wait(10)
    assert control.epoch(2).receipt is None
    lease.release(ended())


def test_one_that_is_past_its_deadline_is_ended_also_where_nothing_can_be_written(quick: None) -> None:
    full = Full(1, "receipt")
    control, died = Control(full, JOB), threading.Event()
    lease = acquire(control, died)
    full.armed.set()
    control.ask_to_stop(1, Stop(time=time.time(), by="an operator", seconds=0.1))
    assert died.wait(10)
    lease.release(ended())


_STUCK = """
import signal, subprocess, sys
from pathlib import Path
from jobs.control import lease as lease_module
from jobs.control.folder import Control
from jobs.control.lease import Lease
lease_module.BEAT_SECONDS = 0.05
lease = Lease.acquire(Control.of(Path(sys.argv[1]), "rolling_sum"))
jvm = subprocess.Popen([sys.argv[2], "600"])
print(jvm.pid, flush=True)
signal.pause()
"""


def test_a_hard_end_takes_the_jvm_along(shared: Control, tmp_path: Path) -> None:
    """Only the name of the process matters: here `sleep` runs under the name java."""
    java = tmp_path / "java"
    shutil.copy(shutil.which("sleep") or "", java)
    driver = subprocess.Popen(
        [sys.executable, "-c", _STUCK, str(tmp_path), str(java)], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    jvm = psutil.Process(int(driver.stdout.readline()))
    try:
        shared.ask_to_stop(1, Stop(time=time.time(), by="an operator", seconds=0.5))
        assert driver.wait(30) == -signal.SIGKILL
        wait_until(lambda: not jvm.is_running() or jvm.status() == psutil.STATUS_ZOMBIE, "the JVM's end", 10)
    finally:
        if jvm.is_running():
            jvm.kill()
        driver.kill()
        driver.communicate()
    receipt = shared.epoch(1).receipt
    assert receipt
    assert "did not end within" in receipt.cause
    assert newest_health(shared) is Health.FAILED
    with held(shared) as lease:
        assert lease.epoch == 2


@pytest.mark.parametrize(("environment", "ended_by"), [({"PYSPARK_GATEWAY_PORT": "1"}, -signal.SIGKILL), ({}, 7)])
def test_a_hard_end_takes_a_parent_along_only_under_spark_submit(
    environment: dict[str, str], ended_by: int, tmp_path: Path
) -> None:
    """Only the name of the process matters: here `sh` runs under the name java."""
    java = tmp_path / "java"
    shutil.copy(shutil.which("sh") or "", java)
    end = "from jobs.control.lease import end_this_process; end_this_process()"
    done = subprocess.run(
        [java, "-c", '"$0" -c "$1"; exit 7', sys.executable, end],
        env={name: value for name, value in os.environ.items() if name != "PYSPARK_GATEWAY_PORT"} | environment,
        timeout=60,
    )
    assert done.returncode == ended_by


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
            write_lease(control, 1, elsewhere(), age=100)
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
        told = ("holds the lease", "already running", "over or taken")
        assert all(any(words in text for words in told) for text in refused), refused
    assert wrong == {}
