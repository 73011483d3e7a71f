"""The process that the traffic task starts."""

import json
import sys
from pathlib import Path

import pytest

from jobs.scratch import Scratch
from tideline_airflow.operators.traffic import GenerateTrafficOperator
from tideline_airflow.submission import submission

OPTIONS = {"rate": 100, "seconds": 3, "late": 0.5, "duplicate": 0.25, "corrupt": 0, "seed": 7}


def test_a_command_is_a_list_of_words() -> None:
    command = GenerateTrafficOperator(task_id="t", sources=["lines"], **OPTIONS).command("lines; rm -rf /")
    assert command[:5] == [sys.executable, "-m", "jobs", "generate", "lines; rm -rf /"]
    assert " ".join(command[5:]) == "--rate 100 --count 300 --seed 7 --late 0.5 --duplicate 0.25 --corrupt 0"


# SECRETS are settings of Airflow's own processes; NEEDED are those that a child process may need.
SECRETS = (
    "AIRFLOW__CORE__FERNET_KEY",
    "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN",
    "AIRFLOW__API_AUTH__JWT_SECRET",
    "AIRFLOW_CONN_TIDELINE_KAFKA",
    "AIRFLOW_CONN_TIDELINE_AIRFLOW",
    "AIRFLOW_VAR_TOKEN",
    "_AIRFLOW_WWW_USER_PASSWORD",
)
NEEDED = ("JAVA_HOME", "HADOOP_CONF_DIR", "YARN_CONF_DIR", "KUBECONFIG", "AWS_REGION", "LAKE_ROOT", "HTTPS_PROXY")


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a task."""
    for name in (*SECRETS, *NEEDED):
        monkeypatch.setenv(name, f"{name} of the task")
    monkeypatch.setenv("AIRFLOW_CONN_TIDELINE_KAFKA", json.dumps({"conn_type": "tideline_kafka", "host": "there:1"}))
    monkeypatch.setenv("KAFKA_BOOTSTRAP", "elsewhere:1")
    monkeypatch.setenv("LAKE_ROOT", "/lake")


@pytest.mark.usefixtures("around")
def test_what_a_task_starts_does_not_see_airflow_s_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = GenerateTrafficOperator(task_id="t", sources=["lines"], **OPTIONS)
    seen = tmp_path / "seen.json"
    write = f"import json, os; open({str(seen)!r}, 'w').write(json.dumps(dict(os.environ)))"
    monkeypatch.setattr(operator, "command", lambda source: [sys.executable, "-c", write])
    operator.execute({})
    check_environment(json.loads(seen.read_text()))


@pytest.mark.usefixtures("around")
def test_nor_does_a_driver() -> None:
    _, environment = submission(["live", "rolling_sum"], Scratch(folder=Path("/scratch/1"), lock=0))
    check_environment(environment)


def check_environment(environment: dict[str, str]) -> None:
    assert [name for name in environment if "AIRFLOW" in name] == []
    assert {name for name in NEEDED if not environment.get(name)} == set()
    assert environment["PATH"]
    assert environment["KAFKA_BOOTSTRAP"] == "there:1"


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
