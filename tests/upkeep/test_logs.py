"""Old logs are removed, logs of running processes stay, and no line is lost after a log was cut."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs.upkeep import logs
from jobs.upkeep.logs import discard_old, trim

DAYS = 24 * 3600.0


def plant(file: Path, days: float) -> Path:
    """A log that was written this number of days ago."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("ten bytes.")
    moment = time.time() - days * DAYS
    os.utime(file, (moment, moment))
    return file


def age_folders(root: Path, days: float) -> None:
    for folder in (each for each in root.rglob("*") if each.is_dir()):
        moment = time.time() - days * DAYS
        os.utime(folder, (moment, moment))


def test_logs_of_tasks_go_but_the_newest_run_of_each_dag_stays(tmp_path: Path) -> None:
    old = [plant(tmp_path / "dag_id=a" / f"run_id={n}" / "task_id=t" / "attempt=1.log", 8) for n in range(3)]
    streams = plant(tmp_path / "dag_id=stream_a" / "run_id=1" / "task_id=run" / "attempt=1.log", 100)
    age_folders(tmp_path, 8)
    new = plant(tmp_path / "dag_id=a" / "run_id=9" / "task_id=t" / "attempt=1.log", 6)
    driver = plant(tmp_path / "drivers" / "ingest" / "epoch-1.log", 100)
    found = discard_old(tmp_path, 7 * DAYS)
    assert (found.files, found.bytes) == (3, 30)
    assert not any(log.parent.parent.exists() for log in old), "with their folders"
    assert all(log.is_file() for log in (new, streams, driver))
    assert discard_old(tmp_path, 7 * DAYS).files == 0


def test_logs_of_the_dag_processor_go_and_its_link_stays(tmp_path: Path) -> None:
    old = plant(tmp_path / "2026-01-01" / "dags" / "upkeep.py.log", 8)
    new = plant(tmp_path / "2026-01-09" / "dags" / "upkeep.py.log", 0)
    (tmp_path / "latest").symlink_to(tmp_path / "2026-01-09")
    age_folders(tmp_path / "2026-01-01", 8)
    assert discard_old(tmp_path, 7 * DAYS).files == 1
    assert not old.parent.exists()
    assert (tmp_path / "latest" / "dags" / "upkeep.py.log").read_text() == new.read_text()


def test_a_folder_that_was_made_just_now_stays_and_one_that_is_not_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "dag_id=a" / "run_id=1").mkdir(parents=True)
    (tmp_path / "dag_id=a" / "run_id=2").mkdir()
    assert discard_old(tmp_path, 0.0).files == 0
    assert len(list((tmp_path / "dag_id=a").iterdir())) == 2
    assert discard_old(tmp_path / "nowhere", 0.0).files == 0


_WRITER = """
import subprocess, sys
print("first", flush=True)
sys.stdin.readline()
print("python", flush=True)
subprocess.run(["sh", "-c", "echo child"], check=True)
"""


def test_a_large_log_is_begun_anew_while_processes_write_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LOG_BYTES", 4)
    log, small = tmp_path / "epoch-1.log", tmp_path / "small.log"
    small.write_text("abc")
    with log.open("ab") as output:
        writer = subprocess.Popen([sys.executable, "-c", _WRITER], stdin=subprocess.PIPE, stdout=output, text=True)
    deadline = time.monotonic() + 30
    while not log.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert trim(tmp_path).files == 1
    writer.communicate("go on\n", timeout=30)
    assert log.read_text() == "python\nchild\n", "and no hole before it"
    assert (tmp_path / f"epoch-1.log{logs.OLDER_SUFFIX}").read_text() == "first\n"
    found = trim(tmp_path)
    assert (found.files, found.bytes) == (1, 6)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["epoch-1.log", "epoch-1.log.1", "small.log"]
