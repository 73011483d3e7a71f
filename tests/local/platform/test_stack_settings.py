import json
import re
from pathlib import Path

import pytest

from jobs.refusal import Refusal
from jobs.settings import PROJECT
from local.platform.airflow import Airflow
from local.platform.ports import free_port, is_free
from local.platform.settings import StackSettings

READERS = ("jobs/settings.py", "local/platform/settings.py", "jobs/airflow_api/client.py")


def test_the_broker_listens_where_jobs_connect():
    settings = StackSettings.from_env({"KAFKA_BOOTSTRAP": "localhost:19092"})
    assert settings.jobs.kafka.bootstrap == "127.0.0.1:19092"
    assert settings.ports() == {"KAFKA_BOOTSTRAP": 19092, "KAFKA_CONTROLLER_PORT": 19093, "AIRFLOW_PORT": 8080}


@pytest.mark.parametrize("bootstrap", ["broker-1:9092", "0.0.0.0:9092", "127.0.0.1", "127.0.0.1:x"])
def test_a_kafka_elsewhere_is_refused(bootstrap):
    with pytest.raises(Refusal, match="the embedded broker listens on this machine only"):
        StackSettings.from_env({"KAFKA_BOOTSTRAP": bootstrap})


def test_a_port_that_is_none_is_refused():
    with pytest.raises(Refusal, match="AIRFLOW_PORT=70000 is no port"):
        StackSettings.from_env({"AIRFLOW_PORT": "70000"})


def test_the_password_never_shows(tmp_path):
    settings = StackSettings.from_env({"AIRFLOW_ADMIN_PASSWORD": "hunter2", "TIDELINE_HOME": str(tmp_path)})
    assert settings.airflow_password == "hunter2"
    assert "hunter2" not in repr(settings)


def test_where_alerts_go_reaches_airflow_and_never_shows(tmp_path, monkeypatch):
    example = (PROJECT / ".env.example").read_text()
    (tmp_path / ".env").write_text(re.sub("^#(AIRFLOW_CONN_TIDELINE_SMTP)", r"\1", example, flags=re.MULTILINE))
    monkeypatch.setattr("jobs.settings.PROJECT", tmp_path)
    settings = StackSettings.from_env({"TIDELINE_HOME": str(tmp_path), "AIRFLOW_ADMIN_PASSWORD": "hunter2"})
    connections = Airflow(settings=settings, java=None)._connections()
    mail = json.loads(connections["AIRFLOW_CONN_TIDELINE_SMTP"])
    assert mail["extra"]["to"] == ["on-call@example.org"]
    assert "AIRFLOW_CONN_TIDELINE_APPRISE" not in connections
    assert "mail.example.org" not in repr(settings)


def test_every_setting_is_explained():
    """`.env.example` names exactly the settings that the code and the containers read."""
    explained = set(re.findall(r"^#?([A-Z0-9_]+)=", (PROJECT / ".env.example").read_text(), re.MULTILINE))
    code = "".join((PROJECT / name).read_text() for name in READERS)
    read = set(re.findall(r'"((?:TIDELINE|KAFKA|LAKE|SPARK|STREAM|INGEST|LIVE|AIRFLOW|AWS)_[A-Z][A-Z_]+)"', code))
    kafka = {f"KAFKA_{name}" for name in _kafka_fields()}
    compose = (PROJECT / "docker-compose.yml").read_text()
    containers = set(re.findall(r"\$\{([A-Z0-9_]+):-|\{ environment: ([A-Z_]+) \}", compose))
    # Settings that only the libraries of object stores read.
    clients = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ALLOW_HTTP"}
    # Our code reads it only to refuse it.
    read -= {"AWS_CONDITIONAL_PUT"}
    assert explained == read | kafka | clients | {name for found in containers for name in found if name}


def _kafka_fields() -> set[str]:
    from jobs.settings import KafkaSettings

    return {name.upper() for name in KafkaSettings.__annotations__}


def test_no_default_is_a_machine_of_ours():
    home = str(Path.home())
    assert home not in (PROJECT / ".env.example").read_text()


def test_a_free_port_is_free():
    assert is_free(free_port())
