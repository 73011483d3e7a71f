"""The upkeep as a task: it reports the removed files, and leaves logs alone that may belong to others."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.upkeep import logs
from tideline_airflow.listeners import RUN_NOTE
from tideline_airflow.operators import streaming
from tideline_airflow.operators.upkeep import UpkeepOperator


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As in the embedded platform, with one old log of a task and one of the DAG processor."""
    for name in ("tasks/dag_id=a/run_id=1/attempt=1.log", "dag-processor/2026-01-01/upkeep.py.log"):
        log = tmp_path / "logs" / name
        log.parent.mkdir(parents=True)
        log.write_text("ten bytes.")
        os.utime(log, (0, 0))
    (tmp_path / "logs" / "tasks" / "dag_id=a" / "run_id=2").mkdir()
    os.utime(tmp_path / "logs" / "tasks" / "dag_id=a" / "run_id=1", (0, 0))
    monkeypatch.setenv("TIDELINE_HOME", str(tmp_path))
    monkeypatch.setenv("LAKE_ROOT", str(tmp_path / "lake"))
    monkeypatch.setenv("AIRFLOW__LOGGING__BASE_LOG_FOLDER", str(tmp_path / "logs" / "tasks"))
    processor = str(tmp_path / "logs" / "dag-processor")
    monkeypatch.setenv("AIRFLOW__LOGGING__DAG_PROCESSOR_CHILD_PROCESS_LOG_DIRECTORY", processor)
    return tmp_path


def note() -> str:
    """The note that the task puts on its run."""
    said: dict[str, Any] = {}
    context: Any = {"ti": SimpleNamespace(xcom_push=said.__setitem__)}
    UpkeepOperator(task_id="remove").execute(context)
    return str(said[RUN_NOTE])


def test_it_says_what_was_removed_and_then_that_there_is_nothing(home: Path) -> None:
    assert note() == "logs in tasks: 1 files, 10 bytes\n\nlogs in dag-processor: 1 files, 10 bytes"
    assert [file for file in home.rglob("*") if file.is_file()] == []
    assert note() == "There was nothing to remove."


def test_logs_of_an_airflow_that_is_not_ours_are_left_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDELINE_HOME", str(home / "elsewhere"))
    assert note() == "There was nothing to remove."
    assert len(list(home.rglob("*.log"))) == 2


_DRIVER = """
import sys, time, pathlib
print("before", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
print("after", flush=True)
"""


def test_a_drivers_log_that_is_begun_anew_has_no_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver runs for months, and its log is one file."""
    begun, log = tmp_path / "begun", tmp_path / "epoch-1.log"
    command = [sys.executable, "-c", _DRIVER, str(begun)]
    monkeypatch.setattr(streaming, "submission", lambda *_, **__: (command, dict(os.environ)))
    monkeypatch.setattr(logs, "LOG_BYTES", 1)
    driver = streaming.StreamingJobOperator(task_id="run", job="ingest")._submit(1, log)
    deadline = time.monotonic() + 30
    while not log.stat().st_size and time.monotonic() < deadline:
        time.sleep(0.01)
    assert logs.trim(tmp_path).files == 1
    begun.touch()
    assert driver.wait(30) == 0
    assert log.read_bytes() == b"after\n"
