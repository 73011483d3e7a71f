"""Tasks on a full disk: they wait without a worker, blame no slice, and open no further incident."""

import asyncio
import importlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import TaskDeferred
from airflow.triggers.base import BaseTrigger
from deltalake import DeltaTable

from jobs.control.epochs import Owner
from jobs.control.folder import Control
from jobs.control.incident import full_disk_key
from jobs.control.incidents import Incidents
from jobs.control.room import Room
from jobs.finality.run.isolation import ComputeError
from jobs.lake.delta.reading import files_with_sizes
from tests.lake.delta.test_freeing import with_replaced_files
from tests.lake.test_final import plan_of, work_of
from tests.lake.test_stream_tables import files_on_disk, rows
from tests.small_disk import can_mount, fill, small_disk
from tideline_airflow.notifiers.incident import Event, IncidentNotifier
from tideline_airflow.operators.account import AccountOperator
from tideline_airflow.operators.audit import AuditOperator
from tideline_airflow.operators.batch import DriverError, PipelineOperator
from tideline_airflow.operators.check import CheckOperator
from tideline_airflow.operators.plan import PlanOperator
from tideline_airflow.operators.publish import PublishOperator
from tideline_airflow.operators.recompute import RecomputeOperator
from tideline_airflow.operators.streaming import StreamingJobOperator
from tideline_airflow.triggers import room as module
from tideline_airflow.triggers import streaming
from tideline_airflow.triggers.room import RoomTrigger
from tideline_airflow.triggers.streaming import StreamTrigger

NO_CONTEXT: Any = {}
OPERATORS = (PlanOperator, RecomputeOperator, AuditOperator, PublishOperator, AccountOperator, CheckOperator)


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lake with a reserve that is larger than any disk."""
    monkeypatch.setenv("LAKE_ROOT", str(tmp_path))
    monkeypatch.setenv("LAKE_RESERVE_MB", str(10**12))
    return tmp_path


def has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAKE_RESERVE_MB", "1")


def open_incidents(lake: Path) -> list[str]:
    return [incident.key for incident in Incidents.of(lake).still_open("")]


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_task_waits_for_room_before_it_begins(
    operator: type[PipelineOperator], lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = operator(task_id="a_task", pipeline="rolling_sum")
    monkeypatch.setattr(task, "execute", lambda context: "done")
    with pytest.raises(TaskDeferred) as deferred:
        task.pre_execute(NO_CONTEXT)
    assert isinstance(deferred.value.trigger, RoomTrigger)
    assert open_incidents(lake) == [full_disk_key()]
    has_room(monkeypatch)
    task.pre_execute(NO_CONTEXT)
    assert task.resume_execution(deferred.value.method_name, {"event": {}}, NO_CONTEXT) == "done"


def test_the_trigger_fires_when_there_is_room_and_not_before(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.02)
    path, arguments = json.loads(json.dumps(RoomTrigger(lake_root=str(lake)).serialize()))
    where, _, name = path.rpartition(".")
    trigger = getattr(importlib.import_module(where), name)(**arguments)
    rooms = list[Room]()
    of = Room.of
    monkeypatch.setattr(module.Room, "of", lambda root: rooms.append(of(root)) or rooms[-1])

    async def follow() -> None:
        firing = asyncio.ensure_future(anext(trigger.run()))
        while not open_incidents(lake):
            await asyncio.sleep(0.01)
        assert not firing.done()
        rooms[0]._reserve = 1
        await firing

    asyncio.run(asyncio.wait_for(follow(), 20))
    assert open_incidents(lake) == []


@pytest.mark.skipif(not can_mount(), reason="only root can mount a disk that is to be filled")
@pytest.mark.parametrize("waits", [RoomTrigger, partial(StreamTrigger, job="rolling_sum", epoch=None)])
def test_who_waits_makes_room_though_no_driver_lives(
    waits: Callable[..., BaseTrigger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaced files of two tables fill the disk. Neither of them alone would make enough room."""
    monkeypatch.setenv("LAKE_RESERVE_MB", "2")
    for each in (module, streaming):
        monkeypatch.setattr(each, "POLL_SECONDS", 0.02)
    with small_disk(tmp_path / "lake", 8) as lake:
        for table in ("live/rolling_sum", "final/rolling_sum"):
            with_replaced_files(lake / table)
            with_large_files(lake / table, 1_500_000)
        fill(lake, leave=300_000)
        assert Room.of(lake).is_short()
        asyncio.run(asyncio.wait_for(anext(waits(lake_root=str(lake)).run()), 30))
        assert open_incidents(lake) == []
        assert [rows(lake / table) for table in ("live/rolling_sum", "final/rolling_sum")] == [[*range(5)]] * 2


def with_large_files(path: Path, size: int) -> None:
    """Make a file large that the table does not need any more."""
    needed = {path / file for file in files_with_sizes(DeltaTable(path))}
    replaced = min(path / file for file in files_on_disk(path) if path / file not in needed)
    seen = replaced.stat()
    replaced.write_bytes(bytes(size))
    os.utime(replaced, (seen.st_mtime, seen.st_mtime))


def test_a_stream_is_neither_judged_nor_started_on_a_full_disk(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its driver is gone. That counts as one failure when there is room again, and not as a failed try."""
    control = Control.of(lake, "rolling_sum")
    control.reserve(Owner(host="another-host", pid=1, started_seconds=0.0))
    task = StreamingJobOperator(task_id="run", job="rolling_sum")
    for step in (lambda: task.execute(NO_CONTEXT), lambda: task.resume(NO_CONTEXT, {"epoch": 1})):
        with pytest.raises(TaskDeferred) as deferred:
            step()
        assert isinstance(deferred.value.trigger, StreamTrigger)
        assert deferred.value.trigger.epoch is None
    assert control.newest() == 1
    assert control.epoch(1).receipt is None
    assert open_incidents(lake) == [full_disk_key()]


def test_no_slice_is_blamed_for_a_full_disk(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = RecomputeOperator(task_id="recompute", pipeline="rolling_sum")
    part = plan_of("r", work_of("20260131T120000Z"))

    def fails(*_: object) -> None:
        raise DriverError("No space left on device")

    monkeypatch.setattr(task, "_compute", fails)
    monkeypatch.setattr(task, "settings", lambda: SimpleNamespace(lake_root=lake))
    with pytest.raises(DriverError):
        task._compute_group(SimpleNamespace(), part)  # type: ignore[arg-type]
    has_room(monkeypatch)
    with pytest.raises(ComputeError):
        task._compute_group(SimpleNamespace(), part)  # type: ignore[arg-type]


def happens(event: Event, **words: Any) -> None:
    run = {"dag_id": "recompute_sums", "dag_run_id": "run 1", "queued_at": "12:00", "state": "running"}
    context = {"dag": DAG("recompute_sums", schedule=None), "run_id": "run 1", "reason": "timed_out", "dag_run": run}
    IncidentNotifier(event)({**context, "deadline": {"deadline_time": "13:00"}, **words})  # type: ignore[arg-type]


def test_what_fails_or_is_late_on_a_full_disk_is_no_incident_of_its_own(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = SimpleNamespace(dag_id="recompute_sums", task_id="publish", run_id="run 1", log_url="http://log")
    happens(Event.TASK_FAILED, ti=task, exception=OSError(28, "No space left on device"))
    happens(Event.RUN_FAILED)
    happens(Event.DEADLINE_MISSED)
    assert open_incidents(lake) == [full_disk_key()]
    has_room(monkeypatch)
    # The end of the same run is reported later, when there is room.
    happens(Event.RUN_FAILED, reason="task_failure", ti=task)
    assert not Room.of(lake).is_short()
    assert open_incidents(lake) == []
    happens(Event.RUN_FAILED)
    assert len(open_incidents(lake)) == 1
