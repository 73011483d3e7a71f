"""Builds the `spark-submit` command that starts a job's driver, from the Spark provider's connection."""

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from airflow.providers.apache.spark.hooks import spark_submit
from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook

from jobs.refusal import Refusal
from jobs.scratch import Scratch
from jobs.settings import DRIVER_OPTIONS, PROJECT, Settings, spark_conf
from tideline_airflow.environment import of_child

APPLICATION = str(PROJECT / "jobs" / "__main__.py")
# The provider's hook uses its Kubernetes client in cluster mode only. But for a master on Kubernetes it refuses to
# build any command if the client is missing. With this placeholder the client's package need not be installed. Its
# import would cost each task two seconds.
vars(spark_submit).setdefault("kube_client", "not needed in client mode")
_WARNINGS = logging.getLogger(__name__)
_WARNINGS.setLevel(logging.WARNING)


class _QuietHook(SparkSubmitHook):
    """The provider's hook. It does not log the whole command, a line of 3,000 characters."""

    @property
    def log(self) -> Any:
        """A logger for warnings only. Airflow's own loggers get their level from its configuration."""
        return _WARNINGS


def submission(arguments: Sequence[str], scratch: Scratch, *, brief: bool = False) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of `spark-submit`. Kafka's settings are never arguments.

    The driver must inherit the lock of ``scratch``. A ``brief`` job ends before optimized code would pay off. So the
    JVM compiles its code once and does not optimize it. The job then takes 60 % of the processor time that it takes
    otherwise.
    """
    connection = _QuietHook()._connection
    if connection["deploy_mode"] == "cluster":
        raise Refusal("connection 'spark_default': jobs run in client mode; set deploy-mode to client")
    settings = replace(Settings.from_env(), spark_master=connection["master"])
    conf = spark_conf(settings)
    conf[DRIVER_OPTIONS] += f" {scratch.java_option}"
    if brief:
        conf[DRIVER_OPTIONS] += " -XX:TieredStopAtLevel=1"
        conf["spark.ui.enabled"] = "false"
    name = f"tideline {' '.join(arguments[:2])}"
    hook = _QuietHook(conf=conf, name=name, application_args=list(arguments))
    # The hook's own `submit` would wait for the end on a worker, and pass on its whole environment.
    return hook._build_spark_submit_command(APPLICATION), _environment(settings)


def _environment(settings: Settings) -> dict[str, str]:
    """The driver's environment: for Spark, Kafka and the lake, without any settings or secrets of Airflow."""
    python = Path(sys.executable)
    return {
        **of_child(),
        "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)]),
        "PYSPARK_PYTHON": str(python),
        "SPARK_MASTER": settings.spark_master,
    }
