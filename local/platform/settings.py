"""The folders, ports and sizes of the embedded stack. Every setting is explained in `.env.example`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from jobs.refusal import Refusal
from jobs.settings import PROJECT, Settings, environment, whole_number
from local.platform.ports import LOOPBACK

_OWN_ADDRESSES = (LOOPBACK, "localhost")
# The connections for alerts. Airflow reads connections from its environment, and not from `.env`.
_ALERTS = ("AIRFLOW_CONN_TIDELINE_SMTP", "AIRFLOW_CONN_TIDELINE_APPRISE")


@dataclass(frozen=True, kw_only=True)
class StackSettings:
    """The embedded stack: folders, ports, memory, login."""

    home: Path
    jobs: Settings
    kafka_port: int
    kafka_controller_port: int
    kafka_heap_mb: int
    airflow_port: int
    airflow_user: str
    airflow_password: str | None = field(repr=False)
    airflow_parallelism: int
    maven_url: str | None
    alerts: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Self:
        """The settings of the process. `.env` in the project's folder adds those that the environment does not set."""
        env = environment(env)
        jobs = Settings.from_env(env)
        kafka_port = _own_port(jobs.kafka.bootstrap)
        return cls(
            home=Path(env.get("TIDELINE_HOME") or PROJECT / ".tideline").resolve(),
            jobs=replace(jobs, kafka=replace(jobs.kafka, bootstrap=f"{LOOPBACK}:{kafka_port}")),
            kafka_port=kafka_port,
            kafka_controller_port=_port(env, "KAFKA_CONTROLLER_PORT", kafka_port + 1),
            kafka_heap_mb=whole_number(env, "KAFKA_HEAP_MB", 384),
            airflow_port=_port(env, "AIRFLOW_PORT", 8080),
            airflow_user=env.get("AIRFLOW_ADMIN_USER") or "admin",
            airflow_password=env.get("AIRFLOW_ADMIN_PASSWORD") or None,
            airflow_parallelism=whole_number(env, "AIRFLOW_PARALLELISM", 8),
            maven_url=env.get("TIDELINE_MAVEN_URL") or None,
            alerts={name: env[name] for name in _ALERTS if env.get(name)},
        )

    @property
    def airflow_url(self) -> str:
        """The address of Airflow's pages and its API."""
        return f"http://{LOOPBACK}:{self.airflow_port}"

    def ports(self) -> dict[str, int]:
        """Every port that the stack listens on, by the name of its setting."""
        return {
            "KAFKA_BOOTSTRAP": self.kafka_port,
            "KAFKA_CONTROLLER_PORT": self.kafka_controller_port,
            "AIRFLOW_PORT": self.airflow_port,
        }


def _port(env: Mapping[str, str], name: str, default: int) -> int:
    port = whole_number(env, name, default)
    if port > 65535:
        raise Refusal(f"{name}={port} is no port: use a number from 1 to 65535")
    return port


def _own_port(bootstrap: str) -> int:
    """The broker's port, from the address that jobs connect to. So the two never differ."""
    host, _, port = bootstrap.rpartition(":")
    if host not in _OWN_ADDRESSES or not port.isdecimal():
        raise Refusal(
            f"KAFKA_BOOTSTRAP={bootstrap!r}: the embedded broker listens on this machine only; "
            f"use {LOOPBACK}:9092 or another port here, or run the DAGs in an Airflow of your own"
        )
    return _port({"KAFKA_BOOTSTRAP": port}, "KAFKA_BOOTSTRAP", 9092)
