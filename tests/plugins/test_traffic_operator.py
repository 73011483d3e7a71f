"""What the traffic task starts."""

import json
import sys

import pytest

from tideline_airflow.operators.traffic import GenerateTrafficOperator

OPTIONS = {"rate": 100, "seconds": 3, "late": 0.5, "duplicate": 0.25, "corrupt": 0, "seed": 7}


def test_a_command_is_a_list_of_words() -> None:
    command = GenerateTrafficOperator(task_id="t", sources=["lines"], **OPTIONS).command("lines; rm -rf /")
    assert command[:5] == [sys.executable, "-m", "jobs", "generate", "lines; rm -rf /"]
    assert " ".join(command[5:]) == "--rate 100 --count 300 --seed 7 --late 0.5 --duplicate 0.25 --corrupt 0"


def test_one_failing_source_fails_the_task_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_TIDELINE_KAFKA", json.dumps({"conn_type": "tideline_kafka"}))
    operator = GenerateTrafficOperator(task_id="t", sources=["good", "bad"], **OPTIONS)
    monkeypatch.setattr(operator, "command", lambda source: [sys.executable, "-c", f"exit({source == 'bad':d})"])
    with pytest.raises(RuntimeError, match=r"exit codes \{'bad': 1\}"):
        operator.execute({})


def test_a_killed_task_ends_what_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_TIDELINE_KAFKA", json.dumps({"conn_type": "tideline_kafka"}))
    operator = GenerateTrafficOperator(task_id="t", sources=["endless"], **OPTIONS)
    monkeypatch.setattr(operator, "command", lambda source: [sys.executable, "-c", "import time; time.sleep(3600)"])
    started = operator.start()
    operator.on_kill()
    assert [process.wait(timeout=30) for process in started.values()] == [-15]
