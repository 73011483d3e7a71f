"""Which Airflow gets the requests, and a task's log as a person reads it."""

import os
import subprocess
import sys

import pytest

from jobs.airflow_api.client import AirflowApi, _line
from jobs.refusal import Refusal
from jobs.settings import PROJECT

MEMORY = {"exc_type": "MemoryError", "exc_value": "no memory", "frames": []}
LINES = {
    "text alone": ("Running command", "Running command"),
    "empty text": ("", ""),
    "an event": ({"event": "Task started", "level": "info", "timestamp": "2026-01-01T00:00:00Z"}, "Task started"),
    "an event without errors": ({"event": "Done", "error_detail": []}, "Done"),
    "an event whose errors are none": ({"event": "Done", "error_detail": None}, "Done"),
    "an error": ({"event": "Task failed", "error_detail": [MEMORY]}, "Task failed: MemoryError: no memory"),
    "an error and its cause": (
        {"event": "Task failed", "error_detail": [MEMORY, {"exc_type": "OSError", "exc_value": "[Errno 28] full"}]},
        "Task failed: MemoryError: no memory: OSError: [Errno 28] full",
    ),
}


@pytest.mark.parametrize(("line", "told"), LINES.values(), ids=LINES)
def test_a_line_tells_the_event_and_the_words_of_its_errors(line: object, told: str) -> None:
    assert _line(line) == told


def test_an_airflow_elsewhere_is_named_by_the_environment(tmp_path):
    file = tmp_path / "password"
    file.write_text("hunter2\n")
    named = {"AIRFLOW_API": "http://127.0.0.1:1"}
    assert AirflowApi.from_env({**named, "AIRFLOW_ADMIN_PASSWORD_FILE": str(file)}).password == "hunter2"
    given = AirflowApi.from_env({**named, "AIRFLOW_ADMIN_USER": "ann", "AIRFLOW_ADMIN_PASSWORD": "secret"})
    assert (given.username, given.password) == ("ann", "secret")
    assert "secret" not in repr(given)
    assert given.pages == given.url
    assert (
        AirflowApi.from_env({**named, "AIRFLOW_ADMIN_PASSWORD": "x", "AIRFLOW__API__BASE_URL": "http://a"}).pages
        == "http://a"
    )
    with pytest.raises(Refusal, match="AIRFLOW_ADMIN_PASSWORD_FILE"):
        AirflowApi.from_env(named)


def test_streams_of_an_airflow_elsewhere_are_asked_through_its_lake():
    env = {**os.environ, "AIRFLOW_API": "http://127.0.0.1:1", "AIRFLOW_ADMIN_PASSWORD": "x", "LAKE_ROOT": ""}
    command = [sys.executable, "-m", "jobs", "streams", "status"]
    asked = subprocess.run(command, cwd=PROJECT, env=env, text=True, capture_output=True, check=False)
    assert asked.returncode == 1
    assert "set LAKE_ROOT" in asked.stderr
