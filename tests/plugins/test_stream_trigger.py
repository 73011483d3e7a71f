"""The trigger of a stream reads a real control folder. It fires when there is something to do, and not before."""

import asyncio
import importlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.control import epochs
from jobs.control import folder as control_module
from jobs.control import lease as lease_module
from jobs.control.epochs import (
    STALE_SECONDS,
    WELL_SECONDS,
    Beat,
    Epoch,
    Owner,
    Phase,
    QueryProgress,
    Stop,
    Wait,
)
from jobs.control.folder import Control
from jobs.control.incident import crash_loop_key, full_disk_key, stalled_key
from jobs.control.incidents import Incidents
from jobs.control.lease import Lease
from jobs.control.room import Room
from jobs.pipelines.layout import INCIDENTS, control_of
from jobs.storage.documents import Documents
from tests.control.made import JOB, elsewhere, ended, write_beat, write_lease
from tests.processes import wait_until
from tideline_airflow.triggers import streaming as module
from tideline_airflow.triggers.streaming import StreamTrigger, progress_of, stall_of

DEADLINE_SECONDS = 20.0
Act = Callable[[], object]


class Watched(StreamTrigger):
    """The real trigger. Its looks at the folder are counted, and it does not look while `at_rest` is held."""

    looks = 0
    at_rest = threading.Lock()

    def _is_over(self) -> bool:
        try:
            with self.at_rest:
                return super()._is_over()
        finally:
            self.looks += 1

    @property
    def delivers(self) -> bool:
        return self._delivery is not None and not self._delivery.done()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(control_module, "LOOK_ON_SECONDS", 0.1)


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control.of(tmp_path, JOB)


@pytest.fixture
def lease(control: Control) -> Iterator[Lease]:
    """A driver that runs, in this process."""
    lease = Lease.acquire(control, {})
    lease.update_heartbeat(phase=Phase.RUNNING, queries=(step(),))
    yield lease
    lease.release(ended())


def trigger(lake: Path, epoch: int | None = 1) -> Watched:
    return Watched(lake_root=str(lake), job=JOB, epoch=epoch)


def step(age: float = 0.0, batch: int = 7) -> QueryProgress:
    return QueryProgress(topic="numbers", stepped=time.time() - age, batch=batch)


def heartbeat(control: Control, **known: Any) -> None:
    """Write a heartbeat of epoch 1, whose query has just made a step."""
    write_beat(control, 1, **{"queries": (step(),), **known})


def fired(watched: Watched, *acts: Act) -> dict[str, Any]:
    """The payload that it fires with after these acts. Before each act it looks a few times, and must not fire."""

    async def follow() -> dict[str, Any]:
        firing = asyncio.ensure_future(anext(watched.run()))
        for act in acts:
            enough = watched.looks + 4
            while (watched.looks < enough or watched.delivers) and not firing.done():
                await asyncio.sleep(0.01)
            if firing.done():
                raise AssertionError("it was over before the act") from firing.exception()
            # A look or a delivery would make the folders again that an act removes.
            with watched.at_rest:
                act()
        return dict((await asyncio.wait_for(firing, DEADLINE_SECONDS)).payload)

    async def in_time() -> dict[str, Any]:
        return await asyncio.wait_for(follow(), DEADLINE_SECONDS)

    return asyncio.run(in_time())


# -- As the triggerer makes it again --


@pytest.mark.parametrize("epoch", [7, None])
def test_it_goes_through_the_database_and_comes_back(epoch: int | None, tmp_path: Path) -> None:
    told = StreamTrigger(lake_root=str(tmp_path), job=JOB, epoch=epoch)
    path, arguments = json.loads(json.dumps(told.serialize()))
    where, _, name = path.rpartition(".")
    again = getattr(importlib.import_module(where), name)(**arguments)
    assert type(again) is StreamTrigger
    assert (again.lake_root, again.job, again.epoch) == (str(tmp_path), JOB, epoch)
    assert again.serialize() == told.serialize()


# -- It follows an epoch --


@pytest.mark.parametrize("clean", [True, False], ids=["stopped", "failed"])
def test_it_fires_when_the_epoch_has_its_receipt_and_not_before(clean: bool, lease: Lease, tmp_path: Path) -> None:
    watched = trigger(tmp_path)
    assert fired(watched, lambda: lease.release(ended("no memory", clean=clean))) == {"job": JOB, "epoch": 1}
    receipt = lease.control.epoch(1).receipt
    assert receipt
    assert receipt.clean is clean


def test_it_fires_when_the_heartbeat_is_stale(control: Control, tmp_path: Path) -> None:
    write_lease(control, 1, age=1000)
    heartbeat(control)
    fired(trigger(tmp_path), lambda: heartbeat(control, age=STALE_SECONDS + 1))
    assert control.epoch(1).receipt is None  # The task writes the receipt.


def test_it_fires_when_the_process_is_gone_though_its_beat_is_fresh(control: Control, tmp_path: Path) -> None:
    write_lease(control, 1)
    heartbeat(control)
    gone = replace(Owner.this_process(), started_seconds=-1000.0)
    fired(trigger(tmp_path), lambda: control.beat(1, Beat(time=time.time(), owner=gone, phase=Phase.RUNNING)))


def test_it_fires_when_the_epoch_was_overtaken_though_its_beat_is_fresh(control: Control, tmp_path: Path) -> None:
    write_lease(control, 1)
    heartbeat(control)
    assert fired(trigger(tmp_path), lambda: write_lease(control, 2)) == {"job": JOB, "epoch": 1}
    assert control.health(control.epoch(1)).alive


def test_it_fires_when_all_that_was_said_of_the_epoch_was_pruned(control: Control, tmp_path: Path) -> None:
    write_lease(control, 12)
    fired(trigger(tmp_path, epoch=1))


@pytest.mark.parametrize("phase", list(Phase))
def test_it_does_not_fire_while_the_driver_lives(phase: Phase, control: Control, tmp_path: Path) -> None:
    write_lease(control, 1)
    heartbeat(control, phase=phase)
    fired(trigger(tmp_path), lambda: heartbeat(control, phase=phase), lambda: control.end(1, ended()))


def test_it_does_not_fire_while_the_driver_stops(lease: Lease, control: Control, tmp_path: Path) -> None:
    asked = Stop(time=time.time(), by="an operator")
    fired(trigger(tmp_path), lambda: control.ask_to_stop(1, asked), lambda: lease.release(ended()))


def test_it_waits_for_a_launched_driver_to_speak(control: Control, tmp_path: Path) -> None:
    assert control.reserve(Owner.this_process(), launched=True) == 1
    fired(trigger(tmp_path), lambda: control.end(1, ended("no such topic", clean=False)))


# -- It waits until the job may start again --


def fail(control: Control) -> float:
    """Make an epoch fail now; the time when the next may begin."""
    number = control.reserve(elsewhere())
    control.end(number, ended("no memory", clean=False))
    waiting = control.next_step()
    assert isinstance(waiting, Wait)
    return waiting.until


def test_without_an_epoch_it_fires_when_the_backoff_is_over(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs, "FIRST_BACKOFF_SECONDS", 1.0)
    until = fail(control)
    assert fired(trigger(tmp_path, None)) == {"job": JOB, "epoch": None}
    assert until <= time.time() < until + 5


def test_without_an_epoch_it_fires_when_the_failures_are_forgiven(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs, "FIRST_BACKOFF_SECONDS", epochs.LONGEST_BACKOFF_SECONDS)
    until = fail(control)
    fired(trigger(tmp_path, None), lambda: control.reset_failures("an operator"))
    assert time.time() < until - 60


def test_without_an_epoch_it_fires_when_somebody_else_has_started_it(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs, "FIRST_BACKOFF_SECONDS", epochs.LONGEST_BACKOFF_SECONDS)
    fail(control)
    fired(trigger(tmp_path, None), lambda: control.reserve(Owner.this_process()))


def test_without_an_epoch_it_books_a_death_and_waits(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs, "FIRST_BACKOFF_SECONDS", epochs.LONGEST_BACKOFF_SECONDS)
    write_lease(control, 1, age=STALE_SECONDS + 1)
    fired(trigger(tmp_path, None), lambda: control.reset_failures("an operator"))
    receipt = control.epoch(1).receipt
    assert receipt
    assert not receipt.clean


# -- The disk of the lake is full --

MORE_THAN_ANY_DISK = 10**18


def test_nothing_is_started_on_a_full_disk(control: Control, tmp_path: Path) -> None:
    """Without the full disk, its first start could begin at once."""
    watched = trigger(tmp_path, None)
    watched._room = room = Room(tmp_path, MORE_THAN_ANY_DISK)
    tmp_path.joinpath("control").mkdir()
    fired(watched, lambda: setattr(room, "_reserve", 1))
    assert [(one.key, one.closed) for one in Incidents.of(tmp_path).all()] == [(full_disk_key(), True)]


def test_a_full_disk_is_told_by_who_follows_a_stream_and_so_is_its_end(control: Control, tmp_path: Path) -> None:
    write_lease(control, 1)
    heartbeat(control)
    watched = trigger(tmp_path)
    watched._room = room = Room(tmp_path, MORE_THAN_ANY_DISK)

    def has_room() -> None:
        assert list(open_incidents(tmp_path)) == [full_disk_key()]
        room._reserve = 1

    def stops() -> None:
        assert open_incidents(tmp_path) == {}
        control.end(1, ended())

    fired(watched, has_room, lambda: heartbeat(control), stops)


# -- Its task is ended or cleared --


def test_a_kill_asks_the_driver_to_stop_and_returns_at_once(lease: Lease, control: Control, tmp_path: Path) -> None:
    watched = trigger(tmp_path)
    began = time.monotonic()
    asyncio.run(watched.on_kill())
    assert time.monotonic() - began < 5
    wait_until(lambda: lease.stop is not None, "the request", 10)
    assert lease.stop
    assert (lease.stop.by, lease.stop.drain) == ("Airflow: its task was ended or cleared", False)
    asyncio.run(watched.on_kill())
    assert control.stop_of(1) == lease.stop
    assert [name for name in control.documents.names() if name.startswith("stop")] == ["stop-0000000001"]


def test_an_earlier_request_stands(lease: Lease, control: Control, tmp_path: Path) -> None:
    drain = Stop(time=time.time(), by="an operator", seconds=3600.0, drain=True)
    control.ask_to_stop(1, drain)
    asyncio.run(trigger(tmp_path).on_kill())
    assert control.stop_of(1) == drain


def test_a_kill_while_it_waits_asks_nobody(control: Control, tmp_path: Path) -> None:
    fail(control)
    before = control.documents.names()
    asyncio.run(trigger(tmp_path, None).on_kill())
    assert control.documents.names() == before


# -- Incidents for operators --


def open_incidents(lake: Path) -> dict[str, str]:
    return {incident.key: incident.text for incident in Incidents.of(lake).all() if not incident.closed}


def test_a_stalled_stream_is_one_incident_and_left_alone_until_it_makes_a_step(
    control: Control, tmp_path: Path
) -> None:
    said = Documents.at(tmp_path / INCIDENTS)
    write_lease(control, 1)
    heartbeat(control, stall_seconds=5.0, queries=(step(age=60),))
    found: dict[str, str] = {}

    def goes_on() -> None:
        found.update(open_incidents(tmp_path))
        assert said.names() == [f"{stalled_key(JOB)}-000001"]
        heartbeat(control, stall_seconds=5.0, queries=(step(batch=8),))

    def stops() -> None:
        assert open_incidents(tmp_path) == {}
        control.end(1, ended())

    fired(trigger(tmp_path), goes_on, stops)
    assert list(found) == [stalled_key(JOB)]
    assert found[stalled_key(JOB)].startswith(f"stream {JOB} runs but makes no step: numbers since ")
    assert said.names() == [f"{stalled_key(JOB)}-{number:06d}" for number in (1, 2)]
    assert [(one.closed, one.text) for one in Incidents.of(tmp_path).all()] == [(True, "the stream makes steps again")]


def test_two_that_follow_one_after_the_other_open_one_incident(control: Control, tmp_path: Path) -> None:
    write_lease(control, 1)
    heartbeat(control, stall_seconds=5.0, queries=(step(age=60),))
    fired(trigger(tmp_path), lambda: None, lambda: write_lease(control, 2))
    control.documents.delete("lease-0000000002")
    fired(trigger(tmp_path), lambda: None, lambda: control.end(1, ended()))
    assert len(Documents.at(tmp_path / INCIDENTS).names()) == 1


@pytest.mark.parametrize("phase", [Phase.LAUNCHED, Phase.STARTING, Phase.STOPPING])
def test_one_that_starts_or_stops_is_not_stalled(phase: Phase, control: Control, tmp_path: Path) -> None:
    write_lease(control, 1)
    heartbeat(control, phase=phase, stall_seconds=5.0, queries=(step(age=60),))
    fired(trigger(tmp_path), lambda: control.end(1, ended()))
    assert Incidents.of(tmp_path).all() == []


def test_a_crash_loop_is_over_when_a_driver_has_lived_long_enough(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TELL_SECONDS", 0.0)
    Incidents.of(tmp_path).open(crash_loop_key(JOB), "it failed five times")
    Incidents.of(tmp_path).open(crash_loop_key("ingest"), "another one")
    write_lease(control, 1, age=WELL_SECONDS - 60)
    heartbeat(control)

    def grows_old() -> None:
        assert set(open_incidents(tmp_path)) == {crash_loop_key(JOB), crash_loop_key("ingest")}
        write_lease(control, 1, age=WELL_SECONDS + 1)

    def stops() -> None:
        assert set(open_incidents(tmp_path)) == {crash_loop_key("ingest")}
        control.end(1, ended())

    fired(trigger(tmp_path), grows_old, stops)
    found = {incident.key: incident for incident in Incidents.of(tmp_path).all()}
    assert found[crash_loop_key(JOB)].text == "epoch 1 has run for more than 10 minutes"


def test_one_that_lives_long_but_is_stalled_is_not_well(control: Control, tmp_path: Path) -> None:
    Incidents.of(tmp_path).open(crash_loop_key(JOB), "it failed five times")
    write_lease(control, 1, age=WELL_SECONDS + 1)
    heartbeat(control, stall_seconds=5.0, queries=(step(age=60),))
    fired(trigger(tmp_path), lambda: control.end(1, ended()))
    assert set(open_incidents(tmp_path)) == {crash_loop_key(JOB), stalled_key(JOB)}


# -- Documents that it cannot read --


def _a_file_in_its_place(folder: Path) -> Act:
    aside = folder.with_name("aside")
    folder.rename(aside)
    folder.write_text("")

    def mend() -> None:
        folder.unlink()
        aside.rename(folder)

    return mend


def _a_document_that_leads_nowhere(folder: Path) -> Act:
    beat = folder / "heartbeat-0000000001"
    whole = beat.read_bytes()
    beat.unlink()
    beat.symlink_to(beat.name)

    def mend() -> None:
        beat.unlink()
        beat.write_bytes(whole)

    return mend


def _a_lake_that_is_not_mounted(folder: Path) -> Act:
    lake = folder.parent.parent
    aside = lake.with_name("unmounted")
    lake.rename(aside)

    def mend() -> None:
        shutil.rmtree(lake, ignore_errors=True)
        aside.rename(lake)

    return mend


@pytest.mark.parametrize("damage", [_a_file_in_its_place, _a_document_that_leads_nowhere, _a_lake_that_is_not_mounted])
def test_a_control_folder_that_cannot_be_read_is_a_warning_and_not_its_end(
    damage: Callable[[Path], Act], control: Control, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lease(control, 1)
    heartbeat(control)
    mends: list[Act] = []
    fired(
        trigger(tmp_path),
        lambda: mends.append(damage(tmp_path / control_of(JOB))),
        lambda: mends.pop()(),
        lambda: control.end(1, ended()),
    )
    assert capsys.readouterr().out.count("the control folder of rolling_sum cannot be read, trying again") == 1


# -- Its log --


def test_it_tells_each_change_of_state_once(
    control: Control, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lease(control, 1)
    heartbeat(control, phase=Phase.STARTING, queries=())
    query = replace(step(), rows=1200, batch_seconds=0.25, lag=5)
    fired(
        trigger(tmp_path),
        lambda: heartbeat(control, queries=(query,)),
        lambda: heartbeat(control, queries=(replace(query, batch=8),)),
        lambda: control.end(1, ended()),
    )
    told = [line for line in capsys.readouterr().out.splitlines() if " epoch 1 is " in line]
    assert [line.split("epoch 1 is ")[1].split(" [")[0].strip() for line in told] == [
        "starting",
        "running (numbers batch 7, 1,200 rows in 0.2 s, lag 5)",
        "stopped (numbers batch 8, 1,200 rows in 0.2 s, lag 5)",
    ]


def test_a_stream_that_runs_for_a_day_writes_a_line_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = [1000.0 + 10 * number for number in range(24 * 360)]
    times = iter(looks)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    watched, running = StreamTrigger(lake_root=str(tmp_path), job=JOB, epoch=1), Epoch(number=1, taken=time.time())
    kept = list[float]()
    monkeypatch.setattr(watched, "_keep_incidents", lambda *_: kept.append(0))
    for _ in looks:
        watched._report(running, epochs.Health.RUNNING)
    assert capsys.readouterr().out.count("rolling_sum epoch 1 is running") == 24
    assert len(kept) == 24 * 60, "incidents are looked at every minute"


def test_progress_is_told_of_queries_that_have_made_a_batch() -> None:
    queries = (step(batch=0), QueryProgress(topic="lines", stepped=0.0), replace(step(batch=4), topic="clicks", lag=0))
    beat = Beat(time=0.0, owner=elsewhere(), phase=Phase.RUNNING, queries=queries)
    assert progress_of(Epoch(number=1, taken=0.0, beat=beat)) == (
        " (numbers batch 0, 0 rows in 0.0 s, lag unknown; clicks batch 4, 0 rows in 0.0 s, lag 0)"
    )
    assert progress_of(Epoch(number=1, taken=0.0)) == ""


def test_a_stall_names_what_is_stuck_since_when_and_what_to_do() -> None:
    queries = (replace(step(), stepped=86400.0), replace(step(), topic="lines"))
    beat = Beat(time=time.time(), owner=elsewhere(), phase=Phase.RUNNING, queries=queries, log="/logs/driver.log")
    told = stall_of(JOB, Epoch(number=1, taken=0.0, beat=beat))
    assert told.startswith(
        f"stream {JOB} runs but makes no step: numbers since 1970-01-02 00:00:00 UTC, after batch 7. Its driver is "
    )
    assert "/logs/driver.log" in told
    assert told.endswith(f"If the driver hangs, run `tideline streams restart {JOB}`")
    assert "lines" not in told
