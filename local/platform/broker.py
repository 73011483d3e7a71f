"""A real Kafka broker in KRaft mode: one process from the published jars, bound to the loopback address only."""

import os
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import run
from typing import Self

from jobs.broker.kafka import admin
from jobs.refusal import Refusal
from jobs.settings import KafkaSettings, Settings
from local.jars.java import find_java
from local.platform.ports import LOOPBACK, answers, free_port, holder, is_free
from local.platform.process import Service

_READY_SECONDS = 60
STOP_SECONDS = 20
_RECORD_LIMIT_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Broker:
    """One broker and its data, below `home`. After a crash, an equal object finds the broker again."""

    home: Path
    port: int = field(default_factory=free_port)
    controller_port: int = field(default_factory=free_port)
    heap_mb: int = 384
    jars: Path = field(default_factory=lambda: Settings.from_env().jars / "broker")
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)

    @property
    def bootstrap(self) -> str:
        """Where clients connect."""
        return f"{LOOPBACK}:{self.port}"

    @property
    def service(self) -> Service:
        """Its process."""
        memory = (f"-Xmx{self.heap_mb}m", "-Xms64m", "-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError")
        logging = f"-Dlog4j2.configurationFile={self._folder / 'log4j2.properties'}"
        return Service(
            name="broker",
            home=self.home,
            command=(*self._java(*memory, logging), "kafka.Kafka", str(self._folder / "server.properties")),
            env=self.env,
        )

    @property
    def _folder(self) -> Path:
        return self.home / "broker"

    def start(self) -> Self:
        """Start the broker on its data and wait until it answers. If it already answers, do nothing."""
        if self.running() and self.healthy():
            return self
        self.service.kill()
        for port in (self.port, self.controller_port):
            if not is_free(port):
                raise Refusal(f"port {port} is taken by {holder(port)}: end it, or choose another port for the broker")
        self._configure()
        self.service.start()
        self.service.wait_ready(self.healthy, _READY_SECONDS)
        return self

    def running(self) -> bool:
        """Whether its process runs."""
        return self.service.process() is not None

    def healthy(self) -> bool:
        """Whether it answers a metadata request as a broker that takes work."""
        if not answers(self.port):
            return False
        with suppress(Refusal), admin(KafkaSettings(bootstrap=self.bootstrap)) as client:
            return bool(client.describe_cluster()["brokers"])
        return False

    def stop(self) -> None:
        """Shut the broker down in order; kill it if that takes too long."""
        self.service.stop(STOP_SECONDS)

    def kill(self) -> None:
        """End the broker like a crash: SIGKILL, without a shutdown."""
        self.service.kill()

    def __enter__(self) -> Self:
        """Start the broker."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop the broker."""
        self.stop()

    def _java(self, *options: str) -> tuple[str, ...]:
        return (str(find_java(self.env).binary), *options, "-cp", f"{self.jars}/*")

    def _configure(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "log4j2.properties").write_text(_LOGGING)
        properties = self._folder / "server.properties"
        properties.write_text("".join(f"{name}={value}\n" for name, value in self._properties().items()))
        if not (self._folder / "data" / "meta.properties").exists():
            self._format(properties)

    def _format(self, properties: Path) -> None:
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        tool = self._java("-XX:TieredStopAtLevel=1", "-Dlog4j2.level=WARN")
        command = [
            *tool,
            "kafka.tools.StorageTool",
            "format",
            f"--cluster-id={cluster_id}",
            "--config",
            str(properties),
        ]
        ran = run(command, capture_output=True, text=True, check=False, timeout=_READY_SECONDS, env=dict(self.env))
        if ran.returncode:
            raise Refusal(f"the broker's folder {self._folder} cannot be formatted: {(ran.stdout + ran.stderr)[-800:]}")

    def _properties(self) -> dict[str, object]:
        return {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@{LOOPBACK}:{self.controller_port}",
            "listeners": f"PLAINTEXT://{self.bootstrap},CONTROLLER://{LOOPBACK}:{self.controller_port}",
            "advertised.listeners": f"PLAINTEXT://{self.bootstrap}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": self._folder / "data",
            "auto.create.topics.enable": "false",
            "message.max.bytes": _RECORD_LIMIT_BYTES,
            "log.retention.check.interval.ms": 60_000,
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 4,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "transaction.state.log.num.partitions": 4,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
            "group.initial.rebalance.delay.ms": 0,
            # After a crash the controller waits this long before it lets the same broker in again.
            "broker.session.timeout.ms": 4000,
            "broker.heartbeat.interval.ms": 500,
            # The default buffer alone would be larger than all other data on this heap.
            "log.cleaner.dedupe.buffer.size": 16 * 1024 * 1024,
            "num.network.threads": 2,
            "num.io.threads": 4,
            "background.threads": 2,
        }


_LOGGING = """\
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
logger.server.name = kafka.server.KafkaRaftServer
logger.server.level = info
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{yyyy-MM-dd HH:mm:ss,SSS} %p %c{1} %m%n%ex
"""
