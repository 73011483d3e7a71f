import os
import shutil
import socket
from collections import namedtuple
from dataclasses import replace

import pytest

from jobs.refusal import Refusal
from local.platform import doctor
from local.platform.ports import free_ports
from local.platform.settings import StackSettings


@pytest.fixture
def settings(tmp_path):
    broker, controller, airflow = free_ports(3)
    return StackSettings.from_env(
        {
            "TIDELINE_HOME": str(tmp_path / "home"),
            "KAFKA_BOOTSTRAP": f"127.0.0.1:{broker}",
            "KAFKA_CONTROLLER_PORT": str(controller),
            "AIRFLOW_PORT": str(airflow),
        }
    )


def test_a_sound_environment_passes(settings):
    checks = doctor.checks(settings)
    assert [name for name in checks] == ["Python", "Spark", "Java", "disk", "ports", "lake", "jars"]
    assert checks["Spark"]() == "4.2.0"
    assert "(free)" in checks["ports"]()
    doctor.preflight(settings)
    assert not settings.home.exists()


def test_a_taken_port_is_refused_with_its_holder_and_the_setting(settings):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", settings.airflow_port))
        taken.listen()
        with pytest.raises(Refusal, match=rf"port \d+ is taken by process {os.getpid()} \(.+\).*set AIRFLOW_PORT"):
            doctor.preflight(settings)


def test_one_port_for_two_is_refused(settings):
    with pytest.raises(Refusal, match="are the same port"):
        doctor.preflight(replace(settings, airflow_port=settings.kafka_port))


def test_a_full_disk_is_refused(settings, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12, 10**8))
    with pytest.raises(Refusal, match=r"has 0\.1 GB left, 3 GB are needed: free some space, or set TIDELINE_HOME"):
        doctor.preflight(settings)


def test_unequal_spark_packages_are_refused(settings, monkeypatch):
    found = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: "4.3.0" if name == "pyspark-client" else found(name))
    with pytest.raises(Refusal, match=r"pyspark=4\.2\.0, pyspark-client=4\.3\.0, its jars=4\.2\.0 differ"):
        doctor.preflight(settings)


def test_an_old_python_is_refused(settings, monkeypatch):
    monkeypatch.setattr(doctor.sys, "version_info", (3, 10, 12, "final", 0))
    with pytest.raises(Refusal, match=r"Python 3\.10: use 3\.11, 3\.12 or 3\.13"):
        doctor.preflight(settings)


def test_missing_java_is_refused(settings, monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refusal, match="no Java: install Java 17 or 21"):
        doctor.preflight(settings)
