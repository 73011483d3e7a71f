"""An Airflow for the tests alone, with a fresh database and a real broker. It runs one DAG after the other."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.settings import PROJECT, KafkaSettings
from local.platform.broker import Broker

HERE = Path(__file__).parent
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaSettings]:
    with Broker(home=tmp_path_factory.mktemp("dags")) as broker:
        yield KafkaSettings(bootstrap=broker.bootstrap)


@pytest.fixture(scope="module")
def run(kafka: KafkaSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a DAG on an Airflow with a fresh database. The answer includes the log of the run."""
    home = tmp_path_factory.mktemp("airflow")
    (home / "probe.py").write_text(_PROBE_DAG)
    bundle = {"classpath": "airflow.dag_processing.bundles.local.LocalDagBundle"}
    folders = {"ours": PROJECT / "dags", "probe": home}
    env = {
        **os.environ,
        "AIRFLOW_HOME": str(home),
        "LAKE_ROOT": str(home / "lake"),
        "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST": json.dumps(
            [{**bundle, "name": name, "kwargs": {"path": str(folder)}} for name, folder in folders.items()]
        ),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(PROJECT / "plugins"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW_CONN_TIDELINE_KAFKA": json.dumps({"conn_type": "tideline_kafka", "host": kafka.bootstrap}),
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[1]"}),
        # Neither may reach a task: tasks take the address of Kafka from the connection.
        "KAFKA_BOOTSTRAP": "127.0.0.1:1",
        "KAFKA_SSL_CAFILE": "/of/another/cluster",
    }
    log = home / "log"
    with log.open("wb") as sink:
        subprocess.run(
            [sys.executable, "-m", "airflow", "db", "migrate"], env=env, stderr=sink, stdout=sink, check=True
        )
        command = [sys.executable, str(HERE / "dag_runner.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": sink, "text": True}
        with subprocess.Popen(command, env=env, **pipes) as process:

            def run(dag_id: str, conf: dict[str, Any] | None = None, **env: str) -> dict[str, Any]:
                start, folder = log.stat().st_size, str(folders["probe" if dag_id == "probe" else "ours"])
                request = {"folder": folder, "dag_id": dag_id, "conf": conf or {}, "env": env}
                print(json.dumps(request), file=process.stdin, flush=True)
                answer = process.stdout.readline()
                logged = log.read_bytes()[start:].decode()
                assert answer, logged[-5000:]
                return {**json.loads(answer), "log": logged}

            yield run
            process.stdin.close()


_PROBE_DAG = """
import os
from unittest.mock import patch
from airflow.sdk import DAG
from tideline_airflow import submission
from tideline_airflow.operators.streaming import StreamingJobOperator

class ProbeOperator(StreamingJobOperator):
    def _submit(self, epoch, log):
        with patch.object(submission, "APPLICATION", os.environ["PROBE"]):
            return super()._submit(epoch, log)

with DAG(dag_id="probe", schedule=None):
    ProbeOperator(task_id="run", job="word_count", retries=int(os.environ.get("PROBE_RETRIES", "0")))
"""
