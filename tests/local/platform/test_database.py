"""Rows of old runs are removed from Airflow's database, but not those of a stream that has run for months."""

import logging
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from local.platform import database
from local.platform.database import Cleaning, clean, shrink

_MAKE = """
from airflow import settings
from airflow.models.base import Base
from airflow.utils.db import import_all_models
import_all_models()
Base.metadata.create_all(settings.engine)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of an Airflow with empty tables."""
    home = tmp_path_factory.mktemp("airflow")
    subprocess.run([sys.executable, "-c", _MAKE], env=of(home), check=True, timeout=120)
    return home


@pytest.fixture
def rows(home: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(home / "airflow.db", isolation_level=None)) as connection:
        yield connection


def of(home: Path) -> dict[str, str]:
    return {**os.environ, "AIRFLOW_HOME": str(home), "AIRFLOW__CORE__LOAD_EXAMPLES": "False", "AIRFLOW_KEPT_DAYS": "30"}


def insert(connection: sqlite3.Connection, table: str, **values: Any) -> None:
    """Insert a row; other columns that need a value get a meaningless one."""
    for _, name, type_, must, default, key in connection.execute(f"PRAGMA table_info({table})").fetchall():
        is_number = type_.startswith(("INTEGER", "BIGINT", "BOOLEAN", "FLOAT", "SMALLINT"))
        if must and default is None and name not in values and not (key and is_number):
            values[name] = 0 if is_number else f"{name} {time.monotonic_ns()}"
    marks = ", ".join("?" * len(values))
    connection.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", tuple(values.values()))


def run_of(connection: sqlite3.Connection, dag_id: str, run_id: str, days: float, state: str = "success") -> None:
    began = f"{datetime.now(UTC) - timedelta(days=days):%F %T.000000}"
    insert(connection, "dag_run", dag_id=dag_id, run_id=run_id, run_type="scheduled", start_date=began, state=state)
    insert(connection, "task_instance", dag_id=dag_id, run_id=run_id, task_id="t", map_index=-1, start_date=began)
    insert(connection, "log", dag_id=dag_id, run_id=run_id, dttm=began)


def names(connection: sqlite3.Connection, table: str) -> list[str]:
    # Airflow notes each of its commands in its log.
    return sorted(name for (name,) in connection.execute(f"SELECT run_id FROM {table} WHERE run_id IS NOT NULL"))


def test_runs_that_are_over_go_and_an_old_stream_stays(home: Path, rows: sqlite3.Connection) -> None:
    run_of(rows, "stream_ingest", "stream", 100, "running")
    for number in range(3):
        run_of(rows, "check_rolling_sum", f"old-{number}", 40 - number)
    run_of(rows, "check_rolling_sum", "new", 1)
    insert(rows, "trigger", created_date=f"{datetime.now(UTC) - timedelta(days=100):%F %T}", classpath="stream")
    began = time.monotonic()
    assert clean(of(home)) == 0
    assert names(rows, "dag_run") == ["new", "stream"]
    assert names(rows, "task_instance") == ["new", "stream"]
    assert names(rows, "log") == ["new"]
    assert rows.execute("SELECT classpath FROM trigger").fetchall() == [("stream",)]
    left = rows.execute("SELECT name FROM sqlite_master WHERE name LIKE '_airflow_deleted%'").fetchall()
    assert left == [], f"after {time.monotonic() - began:.1f} s"


def test_a_database_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert clean({**of(tmp_path), "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": "sqlite:////nowhere/airflow.db"}) != 0


def test_empty_pages_are_given_back_when_that_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "airflow.db"
    assert shrink(file) == 0
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE log (words TEXT)")
        connection.executemany("INSERT INTO log VALUES (?)", [("w" * 1000,)] * 1000)
        monkeypatch.setattr(database, "_WORTH_BYTES", 500_000)
        assert shrink(file) == 0
        connection.execute("DELETE FROM log WHERE rowid > 10")
    size = file.stat().st_size
    freed = shrink(file)
    assert freed > 500_000
    assert file.stat().st_size == size - freed


def test_it_is_started_once_a_day_and_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str], **_: Any) -> None:
            started.append(list(command))
            self.ended: int | None = None

        def poll(self) -> int | None:
            return self.ended

    monkeypatch.setattr(database.subprocess, "Popen", Process)
    caplog.set_level(logging.INFO)
    cleaning = Cleaning()
    cleaning.look()
    assert started == [], "a start of the platform is not slower"
    for hours, ended in ((0, None), (25, None), (25, 0), (25, 1)):
        cleaning.next_at = min(cleaning.next_at, time.monotonic()) - hours * 3600
        if isinstance(cleaning.process, Process):
            cleaning.process.ended = ended
        cleaning.look()
    assert len(started) == 3
    assert started[0][1:] == [sys.executable, "-m", "local.platform.database"]
    said = [(record.levelno, record.getMessage()) for record in caplog.records]
    words = "cleaning Airflow's database ended with exit code"
    assert said == [(logging.INFO, f"{words} 0"), (logging.WARNING, f"{words} 1")]
