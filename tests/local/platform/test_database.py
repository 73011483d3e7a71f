"""Rows of ended runs and asset events are removed from Airflow's database, but nothing that runs or waits needs."""

import ast
import logging
import os
import re
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

from jobs.settings import PROJECT
from local.platform import database
from local.platform.database import Cleaning, shrink

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


def clean(env: dict[str, str]) -> int:
    """Run one pass, as the executor does, and return its exit code."""
    command = [sys.executable, "-m", "local.platform.old_rows"]
    return subprocess.run(command, env=env, cwd=PROJECT, check=False, timeout=120).returncode


def insert(connection: sqlite3.Connection, table: str, **values: Any) -> int:
    """Insert a row, and return its id; other columns that need a value get a meaningless one."""
    for _, name, type_, must, default, key in connection.execute(f"PRAGMA table_info({table})").fetchall():
        is_number = type_.startswith(("INTEGER", "BIGINT", "BOOLEAN", "FLOAT", "SMALLINT"))
        if must and default is None and name not in values and not (key and is_number):
            values[name] = 0 if is_number else f"{name} {time.monotonic_ns()}"
    marks = ", ".join("?" * len(values))
    added = connection.execute(
        f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", tuple(values.values())
    ).lastrowid
    assert added is not None
    return added


def ago(days: float) -> str:
    return f"{datetime.now(UTC) - timedelta(days=days):%F %T.000000}"


def run_of(
    connection: sqlite3.Connection, dag_id: str, run_id: str, days: float, state: str = "success", ran_days: float = 0
) -> int:
    """A run with a task that began so many days ago. Return the run's id."""
    began, ended = ago(days), None if state == "running" else ago(days - ran_days)
    run = {"run_type": "scheduled", "start_date": began, "end_date": ended, "state": state}
    added = insert(connection, "dag_run", dag_id=dag_id, run_id=run_id, **run)
    insert(connection, "task_instance", dag_id=dag_id, run_id=run_id, task_id="t", map_index=-1, start_date=began)
    insert(connection, "log", dag_id=dag_id, run_id=run_id, dttm=began)
    return added


def names(connection: sqlite3.Connection, table: str) -> list[str]:
    # Airflow notes each of its commands in its log.
    return sorted(name for (name,) in connection.execute(f"SELECT run_id FROM {table} WHERE run_id IS NOT NULL"))


def test_runs_that_are_over_go_and_an_old_stream_stays(home: Path, rows: sqlite3.Connection) -> None:
    for number in range(3):
        run_of(rows, "stream_ingest", f"crashed-{number}", 103 - number, "failed")
    run_of(rows, "stream_ingest", "stream", 100, "running")
    run_of(rows, "stream_word_count", "crashed", 100, "failed")
    run_of(rows, "stream_word_count", "last crash of a paused stream", 99, "failed")
    run_of(rows, "check_rolling_sum", "ended yesterday", 60, ran_days=59)
    for number in range(3):
        run_of(rows, "check_rolling_sum", f"old-{number}", 40 - number)
    run_of(rows, "check_rolling_sum", "new", 1)
    insert(rows, "trigger", created_date=f"{datetime.now(UTC) - timedelta(days=100):%F %T}", classpath="stream")
    began = time.monotonic()
    assert clean(of(home)) == 0
    kept = ["ended yesterday", "last crash of a paused stream", "new", "stream"]
    assert names(rows, "dag_run") == kept
    assert names(rows, "task_instance") == kept
    assert names(rows, "log") == ["new"]
    assert rows.execute("SELECT classpath FROM trigger").fetchall() == [("stream",)]
    left = rows.execute("SELECT name FROM sqlite_master WHERE name LIKE '_airflow_deleted%'").fetchall()
    assert left == [], f"after {time.monotonic() - began:.1f} s"


def test_asset_events_go_unless_a_run_or_a_waiting_partition_has_them(home: Path, rows: sqlite3.Connection) -> None:
    def event(name: str, days: float) -> int:
        return insert(rows, "asset_event", asset_id=1, extra="{}", partition_key=name, timestamp=ago(days))

    def partition(event_id: int, run: int | None, days: float) -> int:
        added = insert(rows, "asset_partition_dag_run", target_dag_id="mine", created_dag_run_id=run)
        link = {"asset_event_id": event_id, "asset_partition_dag_run_id": added, "created_at": ago(days)}
        insert(rows, "partitioned_asset_key_log", asset_id=1, **link)
        return added

    event("new", 1)
    for number in range(3):
        event(f"old-{number}", 40)
    for name, state in (("of a run that goes", "success"), ("of a run that works", "running")):
        run = run_of(rows, "mine", name, 40, state)
        insert(rows, "dagrun_asset_event", dag_run_id=run, event_id=event(name, 40))
    partition(event("waits", 40), None, 40)
    gone = partition(event("ran long ago", 40), None, 40)
    rows.execute("DELETE FROM asset_partition_dag_run WHERE id = ?", (gone,))
    run_of(rows, "mine", "newest", 1)
    assert clean(of(home)) == 0
    kept = sorted(key for (key,) in rows.execute("SELECT partition_key FROM asset_event"))
    assert kept == ["new", "of a run that works", "waits"]
    links = rows.execute("SELECT count(*) FROM partitioned_asset_key_log").fetchone()
    assert links == (1,), "of the partition that waits"


# Rows of these come with definitions, or with what people save and ask for, not with time. Airflow itself deletes
# triggers that no task waits for, and requests that are done.
_NOT_BY_TIME = """
    asset asset_active asset_alias asset_alias_asset asset_dag_run_queue asset_state_store asset_watcher
    backfill backfill_dag_run connection connection_test_request
    dag dag_bundle dag_bundle_team dag_code dag_favorite dag_owner_attributes dag_priority_parsing_request
    dag_schedule_asset_alias_reference dag_schedule_asset_name_reference dag_schedule_asset_reference
    dag_schedule_asset_uri_reference dag_tag dag_version dag_warning deadline_alert
    log_template serialized_dag slot_pool task_inlet_asset_reference task_outlet_asset_reference team trigger variable
"""


def test_every_table_that_grows_with_time_is_cleaned(rows: sqlite3.Connection) -> None:
    """A table is cleaned by itself, or because its rows go with those of a table that is cleaned."""
    tables = {name for (name,) in rows.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    tables = {name for name in tables if not name.startswith("sqlite_")}
    keys = {table: rows.execute(f"PRAGMA foreign_key_list({table})").fetchall() for table in tables}
    goes_with = {table: {key[2] for key in found if key[6] == "CASCADE"} for table, found in keys.items()}
    code = (PROJECT / "local" / "platform" / "old_rows.py").read_text()
    by_age = re.search(r"^_BY_AGE = (\(.+\))$", code, re.MULTILINE)
    assert by_age
    cleaned = {"dag_run", "asset_event", *ast.literal_eval(by_age[1])}
    while more := {table for table in tables - cleaned if goes_with[table] & cleaned}:
        cleaned |= more
    assert tables - cleaned == set(_NOT_BY_TIME.split())


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
    assert started[0][1:] == [sys.executable, "-m", "local.platform.old_rows"]
    said = [(record.levelno, record.getMessage()) for record in caplog.records]
    words = "cleaning Airflow's database ended with exit code"
    assert said == [(logging.INFO, f"{words} 0"), (logging.WARNING, f"{words} 1")]
