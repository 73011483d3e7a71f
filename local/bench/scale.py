"""The effect of more workers and partitions: the same drain on a standalone cluster of one or two workers."""

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from jobs.refusal import Refusal
from jobs.settings import JVM_OPTIONS, Settings, fast_local_files
from local.jars.fetch import pyspark_folder
from local.jars.java import find_java
from local.platform.ports import LOOPBACK, free_ports

WORKERS = (1, 2)
PARTITIONS = (1, 3, 6)
WORKLOAD = "rolling_sum"
_READY_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """Drains of some records from a topic with some partitions, by workers of one core each."""

    workers: int
    partitions: int
    records: int
    seconds: list[float]

    @property
    def per_second(self) -> float:
        """Throughput of the median drain."""
        return self.records / median(self.seconds)


@contextmanager
def cluster(settings: Settings, workers: int, home: Path) -> Iterator[dict[str, str]]:
    """Run a master and its workers, one core each. Yield the environment of a driver that uses them."""
    port, page = free_ports(2)
    folder = home / f"cluster-{workers}"
    folder.mkdir()
    conf = {
        "spark.executor.memory": "1g",
        "spark.executor.cores": "1",
        "spark.executor.extraJavaOptions": " ".join(JVM_OPTIONS),
        **fast_local_files(settings, everywhere=True),
    }
    (folder / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in conf.items()))
    # Without this setting, a worker reads Scala's version from a file that PySpark's wheel does not have.
    version = {"SPARK_SCALA_VERSION": "2.13"}
    env = {**os.environ, **version, "SPARK_HOME": str(pyspark_folder()), "SPARK_LOCAL_IP": LOOPBACK}
    master = f"spark://{LOOPBACK}:{port}"
    with ExitStack() as stack:
        words = ["master.Master", "--host", LOOPBACK, "--port", str(port), "--webui-port", str(page)]
        stack.enter_context(_service(words, env, folder / "master.log"))
        for number in range(workers):
            own = ["--cores", "1", "--memory", "2g", "--work-dir", str(folder / f"work-{number}"), "--webui-port", "0"]
            words = ["worker.Worker", "--host", LOOPBACK, *own, master]
            stack.enter_context(_service(words, env, folder / f"worker-{number}.log"))
        _await_workers(page, workers, folder)
        yield {"SPARK_MASTER": master, "SPARK_CONF_DIR": str(folder), "SPARK_LOCAL_IP": LOOPBACK}


@contextmanager
def _service(words: list[str], env: Mapping[str, str], log: Path) -> Iterator[None]:
    java, jars = str(find_java(env).binary), f"{pyspark_folder()}/jars/*"
    command = [java, "-Xmx256m", "-cp", jars, f"org.apache.spark.deploy.{words[0]}", *words[1:]]
    with log.open("w") as output:
        process = subprocess.Popen(command, env=dict(env), stdout=output, stderr=output)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def _await_workers(page: int, workers: int, folder: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{page}/json/", timeout=5) as answer:
                if json.load(answer)["aliveworkers"] == workers:
                    return
        except OSError:
            pass
        time.sleep(0.2)
    logs = "\n".join(log.read_text()[-1500:] for log in folder.glob("*.log"))
    raise Refusal(f"the cluster did not have {workers} workers within {_READY_SECONDS} s:\n{logs}")
