"""The operators build the command lines of docs/clusters.md from the connections of the same page."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.scratch import Scratch
from jobs.settings import PROJECT, Settings, spark_conf
from tideline_airflow.submission import submission

PAGE = (PROJECT / "docs" / "clusters.md").read_text()
_CONNECTION = re.compile(r"^AIRFLOW_CONN_SPARK_DEFAULT='(.+)'$", re.M)
_COMMAND = re.compile(r"^spark-submit (.+)$", re.M)


def pairs() -> list[tuple[str, str]]:
    return list(zip(_CONNECTION.findall(PAGE), _COMMAND.findall(PAGE), strict=True))


def test_the_page_tells_of_three_clusters():
    assert [json.loads(connection)["host"].partition(":")[0] for connection, _ in pairs()] == ["spark", "yarn", "k8s"]


@pytest.mark.parametrize(("connection", "shown"), pairs())
def test_a_stream_is_submitted_as_the_page_says(monkeypatch, connection, shown):
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", connection)
    monkeypatch.setenv("AIRFLOW_CONN_TIDELINE_KAFKA", '{"conn_type": "tideline_kafka", "host": "broker:9092"}')
    command, environment = submission(["live", "rolling_sum"], Scratch(folder=Path("/scratch/1"), lock=0))
    said = [str(PROJECT / word) if word.endswith(".py") else word for word in shlex.split(shown)]
    assert without_our_conf(command[1:]) == said
    assert environment["SPARK_MASTER"] == shlex.split(shown)[1]
    assert environment["KAFKA_BOOTSTRAP"] == "broker:9092"


def without_our_conf(words: list[str]) -> list[str]:
    """The words without the settings that a job makes itself, since those are the same on every cluster."""
    ours = spark_conf(Settings.from_env())
    found, rest = [], iter(words)
    for word in rest:
        if word == "--conf":
            setting = next(rest)
            if setting.partition("=")[0] in ours:
                continue
            found += [word, setting]
        else:
            found.append(word)
    return found


def test_a_jobs_own_settings_are_those_of_no_machine():
    settings = replace(Settings.from_env(), spark_master="spark://elsewhere:7077")
    assert not [name for name in spark_conf(settings) if name.startswith(("spark.driver.host", "spark.hadoop.fs.file"))]
