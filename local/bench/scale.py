"""The effect of more workers and partitions: the same drain on a standalone cluster of one or two workers."""

import json
import os
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from jobs.settings import JVM_OPTIONS, Settings, fast_local_files
from local.jars.fetch import pyspark_folder
from local.jars.java import find_java
from local.platform.ports import LOOPBACK, free_ports
from local.platform.process import Service

WORKERS = (1, 2)
PARTITIONS = (1, 3, 6)
WORKLOAD = "rolling_sum"
_READY_SECONDS = 60
_STOP_SECONDS = 30


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
    java = (str(find_java(env).binary), "-Xmx256m", "-cp", f"{pyspark_folder()}/jars/*")
    master = f"spark://{LOOPBACK}:{port}"
    with ExitStack() as stack:

        def start(name: str, main: str, *words: str, workers: int) -> None:
            """Start a process, and wait until the master has so many workers."""
            command = (*java, f"org.apache.spark.deploy.{main}", "--host", LOOPBACK, *words)
            service = Service(name=name, home=folder, command=command, env=env)
            stack.callback(service.stop, _STOP_SECONDS)
            service.start()
            service.wait_ready(lambda: _workers_of(page) == workers, _READY_SECONDS)

        start("master", "master.Master", "--port", str(port), "--webui-port", str(page), workers=0)
        for number in range(workers):
            own = ("--cores", "1", "--memory", "2g", "--work-dir", str(folder / f"work-{number}"), "--webui-port", "0")
            start(f"worker-{number}", "worker.Worker", *own, master, workers=number + 1)
        yield {"SPARK_MASTER": master, "SPARK_CONF_DIR": str(folder), "SPARK_LOCAL_IP": LOOPBACK}


def _workers_of(page: int) -> int | None:
    """The number of workers that the master has; none if the master does not answer yet."""
    with suppress(OSError), urllib.request.urlopen(f"http://{LOOPBACK}:{page}/json/", timeout=5) as answer:
        return int(json.load(answer)["aliveworkers"])
    return None
