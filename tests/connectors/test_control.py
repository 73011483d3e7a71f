"""Who may write: one driver per epoch, whatever starts, dies or sleeps beside it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from queue import Queue
from typing import Any

import psutil
import pytest

from jobs.connectors import control
from jobs.connectors.control import Lease, LeaseLostError, Owner, newest_epoch, write_new
from jobs.refusal import Refusal
from tests import processes

JOB = "rolling_sum"
_HOLD = """
import sys
from pathlib import Path
from jobs.connectors.control import Lease
lease = Lease.acquire(Path(sys.argv[1]), "rolling_sum")
print(lease.epoch, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "control" / JOB


@pytest.fixture
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds epoch 1."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    yield process
    process.kill()
    process.communicate()


def write_lease(folder: Path, epoch: int, owner: Owner, *, age: float = 0.0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    taken = {"owner": asdict(owner), "time": time.time() - age}
    (folder / f"lease-{epoch:010d}").write_text(json.dumps(taken))


def write_beat(folder: Path, epoch: int, *, age: float) -> None:
    (folder / "heartbeat").write_text(json.dumps({"epoch": epoch, "time": time.time() - age}))


def elsewhere() -> Owner:
    return Owner(host="another-host", pid=1, started_seconds=0.0)


def unused_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_first_epoch_is_one_and_a_live_holder_is_left_alone(folder: Path) -> None:
    assert newest_epoch(folder) == 0
    lease = Lease.acquire(folder, JOB)
    try:
        assert lease.epoch == newest_epoch(folder) == 1
        lease.check()
        with pytest.raises(Refusal, match=rf"'{JOB}' is already running: process {os.getpid()} on .* holds epoch 1"):
            Lease.acquire(folder, JOB)
        assert newest_epoch(folder) == 1
    finally:
        lease.release()


def test_a_released_lease_is_taken_at_once(folder: Path) -> None:
    for epoch in range(1, 4):
        lease = Lease.acquire(folder, JOB)
        assert lease.epoch == epoch
        lease.release()


def test_another_process_is_refused_until_it_is_killed(folder: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(Refusal, match=f"process {holder.pid} "):
        Lease.acquire(folder, JOB)
    holder.kill()
    wait_until(lambda: psutil.Process(holder.pid).status() == psutil.STATUS_ZOMBIE)
    lease = Lease.acquire(folder, JOB)  # Dead, though nobody has buried it and its heartbeat is fresh.
    assert lease.epoch == 2
    lease.release()


def test_a_paused_holder_is_overtaken_and_sees_it(folder: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(holder.pid).status() == psutil.STATUS_STOPPED)
    write_beat(folder, 1, age=control.STALE_SECONDS + 1)
    successor = Lease.acquire(folder, JOB)
    try:
        overtaken = Lease(folder, 1)
        with pytest.raises(LeaseLostError, match=r"epoch 1 .* was overtaken"):
            overtaken.check()
        successor.check()
    finally:
        successor.release()


def test_an_overtaken_holder_beats_no_more_and_releases_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "BEAT_SECONDS", 0.01)
    lease = Lease.acquire(folder, JOB)
    write_lease(folder, 2, elsewhere())
    lease._beating.join(10)
    assert not lease._beating.is_alive()
    write_beat(folder, 2, age=0)
    before = (folder / "heartbeat").read_text()
    lease.release()
    assert (folder / "heartbeat").read_text() == before
    with pytest.raises(Refusal, match="another-host holds epoch 2"):
        Lease.acquire(folder, JOB)


@pytest.mark.parametrize(
    ("lease_age", "beat", "held"),
    [
        (0, None, True),
        (100, None, False),
        (100, (3, 1), True),
        (100, (3, 100), False),
        (0, (2, 100), True),
        (0, (2, 0), True),
        (100, (2, 0), False),
        (0, (3, 100), False),
        (-3600, None, True),
    ],
    ids=[
        "just taken, no beat yet",
        "taken long ago, never beaten",
        "beats",
        "beats no more",
        "just taken from one that had died",
        "just taken, the old holder beat once more",
        "died before its first beat, the old holder's is still fresh",
        "a beat of this epoch counts, not the lease",
        "a clock that runs ahead",
    ],
)
def test_a_holder_on_another_machine_is_judged_by_its_signs(
    folder: Path, lease_age: float, beat: tuple[int, float] | None, held: bool
) -> None:
    write_lease(folder, 3, elsewhere(), age=lease_age)
    if beat:
        write_beat(folder, beat[0], age=beat[1])
    if held:
        with pytest.raises(Refusal, match=f"wait {control.STALE_SECONDS:.0f} s after it has died"):
            Lease.acquire(folder, JOB)
    else:
        lease = Lease.acquire(folder, JOB)
        assert lease.epoch == 4
        lease.release()


def test_a_heartbeat_that_a_power_cut_emptied_tells_nothing(folder: Path) -> None:
    write_lease(folder, 1, elsewhere())
    (folder / "heartbeat").write_text("")
    with pytest.raises(Refusal, match="holds epoch 1"):
        Lease.acquire(folder, JOB)


def test_a_recycled_process_id_holds_nothing(folder: Path) -> None:
    me = Owner.this_process()
    assert not me.is_gone()
    write_lease(folder, 1, replace(me, started_seconds=me.started_seconds - 60))
    lease = Lease.acquire(folder, JOB)
    assert lease.epoch == 2
    lease.release()
    write_lease(folder, 3, replace(me, pid=unused_pid()))
    lease = Lease.acquire(folder, JOB)
    assert lease.epoch == 4
    lease.release()


def test_a_clock_set_anew_kills_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux tells a process's start by the clock: an hour forward moves it, and the boot, by an hour."""
    owner = Owner.this_process()
    started, booted = psutil.Process().create_time() + 3600, psutil.boot_time() + 3600
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: started)
    monkeypatch.setattr(psutil, "boot_time", lambda: booted)
    assert not owner.is_gone()


def test_old_leases_are_pruned(folder: Path) -> None:
    for _ in range(12):
        Lease.acquire(folder, JOB).release()
    left = sorted(file.name for file in folder.iterdir())
    assert left == ["heartbeat", *(f"lease-{epoch:010d}" for epoch in range(7, 13))]


def test_a_starter_that_slept_past_the_pruning_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looked when nobody held the lease, and wakes when the epoch it wanted has come, gone and been pruned."""
    write_lease(folder, 9, elsewhere())
    long_ago = iter([0])
    monkeypatch.setattr(control, "newest_epoch", lambda at: next(long_ago, newest_epoch(at)))
    with pytest.raises(Refusal, match="holds the lease"):
        Lease.acquire(folder, JOB)
    assert not (folder / "heartbeat").exists()


def test_a_beat_that_fails_is_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = Lease.acquire(folder, JOB)
    lease.release()
    full = iter([True, True])
    beaten = threading.Event()

    def beat(file: Path, text: str) -> None:
        if next(full, False):
            raise OSError(28, "No space left on device")
        beaten.set()

    monkeypatch.setattr(control, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(control, "replace", beat)
    again = Lease(folder, 1)
    again._beating.start()
    assert beaten.wait(10)
    again._ended.set()
    again._beating.join()


def test_what_could_not_be_written_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    folder.mkdir(parents=True)
    monkeypatch.setattr(os, "fsync", full)
    for write in (write_new, control.replace):
        with pytest.raises(OSError, match="No space left"):
            write(folder / "lease-0000000001", "text")
    assert list(folder.iterdir()) == []


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    """A reader that never rests sees only whole documents, while two writers replace them."""
    file, texts = tmp_path / "heartbeat", [letter * 100_000 for letter in "ab"]
    control.replace(file, texts[0])
    done = threading.Event()

    def write(text: str) -> None:
        while not done.is_set():
            control.replace(file, text)

    writers = [threading.Thread(target=write, args=(text,)) for text in texts]
    for writer in writers:
        writer.start()
    seen = {file.read_text() for _ in range(300)}
    done.set()
    for writer in writers:
        writer.join()
    assert seen <= set(texts)
    with pytest.raises(FileExistsError):
        write_new(file, "other")
    assert file.read_text() in texts
    assert list(tmp_path.iterdir()) == [file]


ROUNDS, RACERS = 60, 3


def race(root: str, start: Barrier, results: "Queue[tuple[int, Any]]") -> None:
    """Ask for the lease of each round at the same moment as the others; hold it until all have asked."""
    for number in range(ROUNDS):
        start.wait(60)
        try:
            lease = Lease.acquire(Path(root) / str(number), JOB)
            results.put((number, lease.epoch))
        except Refusal as refusal:
            results.put((number, str(refusal)))
            lease = None
        start.wait(60)
        if lease:
            lease.check()
            lease.release()


def test_of_drivers_that_start_together_one_wins(tmp_path: Path) -> None:
    """Half the rounds begin with a lease of a dead driver, so that a take-over is raced for as well."""
    for number in range(0, ROUNDS, 2):
        write_lease(tmp_path / str(number), 1, elsewhere(), age=100)
    found = processes.race(race, tmp_path, racers=RACERS, answers=ROUNDS * RACERS)
    for number in range(ROUNDS):
        answers = [answer for at, answer in found if at == number]
        winners = [answer for answer in answers if isinstance(answer, int)]
        assert winners == [1 if number % 2 else 2], answers
        refused = [answer for answer in answers if isinstance(answer, str)]
        assert all("holds the lease" in text or "already running" in text for text in refused), refused


def wait_until(condition: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
