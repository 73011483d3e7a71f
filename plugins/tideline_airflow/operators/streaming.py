"""How Airflow runs a streaming job: one `spark-submit` through the Spark provider's connection."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import Context

from jobs import pipelines
from jobs.refusal import Refusal
from jobs.settings import PROJECT, Settings, spark_conf
from tideline_airflow.hooks.kafka import KafkaHook


class StreamOperator(SparkSubmitOperator):
    """Runs one streaming job until it ends. Kafka's settings reach the driver as environment, never as arguments."""

    def __init__(self, *, job: str, kafka_conn_id: str = KafkaHook.default_conn_name, **kwargs: Any) -> None:
        """Nothing is looked up before the task runs: neither connection, nor settings, nor jars."""
        super().__init__(
            application=str(PROJECT / "jobs" / "__main__.py"),
            application_args=[job] if job == pipelines.INGEST else ["live", job],
            name=f"tideline {job}",
            **kwargs,
        )
        self.kafka_conn_id = kafka_conn_id

    def execute(self, context: Context) -> None:
        """Submit, and follow the driver's log until it ends."""
        connection = self._get_hook()._connection
        if connection["deploy_mode"] == "cluster":
            raise Refusal(f"connection {self._conn_id!r}: streaming jobs run in client mode; set deploy-mode to client")
        settings = replace(Settings.from_env(), spark_master=connection["master"])
        self.conf = {**spark_conf(settings), **(self.conf or {})}
        self._hook = self._get_hook()
        # As environment of the process: the operator's own `env_vars` become arguments on YARN and Kubernetes.
        self._hook.submit(self.application, env=self._environment(settings))

    def _environment(self, settings: Settings) -> dict[str, str]:
        python = Path(sys.executable)
        return {
            **os.environ,
            "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)]),
            "PYSPARK_PYTHON": str(python),
            "SPARK_MASTER": settings.spark_master,
            **KafkaHook(self.kafka_conn_id).environment(),
        }
