"""Airflow's four components as processes: API server, DAG processor, triggerer and scheduler, on SQLite."""

import json
import os
import secrets
import subprocess
import sys
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jobs.airflow_api.client import AirflowApi
from jobs.refusal import Refusal
from jobs.settings import PROJECT
from jobs.storage.folders import make_durable, make_folder
from local.jars.fetch import pyspark_folder
from local.jars.java import Java
from local.platform.ports import LOOPBACK
from local.platform.process import Service
from local.platform.settings import StackSettings

# The command of each component, and its name on Airflow's health page.
COMPONENTS = {
    "api-server": (("api-server",), "metadatabase"),
    "dag-processor": (("dag-processor",), "dag_processor"),
    # Its log server would listen on every address of the machine.
    "triggerer": (("triggerer", "--skip-serve-logs"), "triggerer"),
    # It starts last: it hands out work at once, and a task that finds no API server fails.
    "scheduler": (("scheduler",), "scheduler"),
}
_MIGRATE_SECONDS = 300
# The slots of batch jobs, which run beside the streams. More jobs at a time would only wait for each other.
_POOLS = {"tideline_recompute": max(1, (os.cpu_count() or 2) // 2), "tideline_account": 1}
# At INFO, these log every request, file or function.
CHATTY = (
    "airflow.models.dag",
    "airflow.serialization.definitions.dag",
    "great_expectations",
    "http.access",
    "httpx",
    "kafka",
    "py4j",
)


@dataclass(frozen=True, kw_only=True)
class Airflow:
    """Airflow below the stack's home: its database, its secrets, its components."""

    settings: StackSettings
    java: Java
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)

    @property
    def folder(self) -> Path:
        """The folder of AIRFLOW_HOME."""
        return self.settings.home / "airflow"

    @property
    def database(self) -> Path:
        """The SQLite file of Airflow's database."""
        return self.folder / "airflow.db"

    def services(self) -> dict[str, Service]:
        """The components by name, in the order of their start."""
        env = self.environment()
        return {
            name: Service(name=name, home=self.settings.home, command=airflow_command(*words), env=env)
            for name, (words, _) in COMPONENTS.items()
        }

    def prepare(self) -> None:
        """Make secrets, login and database once. Migrate the database again if Airflow's version or a pool changes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_private(self._passwords_file, json.dumps({self.settings.airflow_user: self.password()}))
        stamp, installed = self.folder / "migrated", f"{version('apache-airflow-core')}, pools {_POOLS}"
        if not stamp.exists() or stamp.read_text() != installed:
            self._migrate()
            stamp.write_text(installed)

    def api(self) -> AirflowApi:
        """A client that logs in as the admin."""
        settings = self.settings
        return AirflowApi(url=settings.airflow_url, username=settings.airflow_user, password=self.password())

    def password(self) -> str:
        """The admin's password: the setting, else a password that is generated once."""
        return self.settings.airflow_password or self._secrets()["password"]

    def environment(self) -> dict[str, str]:
        """The environment of every component and every task. It starts with the environment of the stack."""
        return {**self.env, **self._for_jobs(), **self._connections(), **self._configuration()}

    @property
    def _passwords_file(self) -> Path:
        return self.folder / "passwords.json"

    def _for_jobs(self) -> dict[str, str]:
        jobs = self.settings.jobs
        venv = str(Path(sys.executable).parent)
        return {
            **jobs.kafka.as_env(),
            "TIDELINE_HOME": str(self.settings.home),
            "TIDELINE_JARS": str(jobs.jars),
            "LAKE_ROOT": str(jobs.lake_root),
            # spark-submit and Spark's workers take the first python3 on PATH, which may be another one.
            "PATH": os.pathsep.join([venv, self.env.get("PATH", os.defpath)]),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_HOME": str(pyspark_folder()),
            "SPARK_LOCAL_IP": LOOPBACK,
            "JAVA_HOME": str(self.java.home),
            "GX_ANALYTICS_ENABLED": "false",
            **{f"{pool.upper()}_POOL": pool for pool in _POOLS},
            "PYTHONUNBUFFERED": "1",
            # Airflow itself causes this warning at every start of every component. We cannot correct it.
            "PYTHONWARNINGS": "ignore:GitWildMatchPattern:DeprecationWarning",
        }

    def _connections(self) -> dict[str, str]:
        jobs = self.settings.jobs
        spark = {"conn_type": "spark", "host": jobs.spark_master, "extra": {"deploy-mode": "client"}}
        kafka = {"conn_type": "tideline_kafka", "host": jobs.kafka.bootstrap}
        login = {"login": self.settings.airflow_user, "password": self.password()}
        airflow = {"conn_type": "tideline_airflow", "host": self.settings.airflow_url, **login}
        connections = {"spark_default": spark, "tideline_kafka": kafka, "tideline_airflow": airflow}
        ours = {f"AIRFLOW_CONN_{name.upper()}": json.dumps(connection) for name, connection in connections.items()}
        return {**self.settings.alerts, **ours}

    def _configuration(self) -> dict[str, str]:
        settings, drawn, logs = self.settings, self._secrets(), self.settings.home / "logs"
        options: dict[str, dict[str, Any]] = {
            "core": {
                "dags_folder": PROJECT / "dags",
                "plugins_folder": PROJECT / "plugins",
                "executor": "local.platform.executor.LocalExecutor",
                "parallelism": settings.airflow_parallelism,
                "load_examples": False,
                "execution_api_server_url": f"{settings.airflow_url}/execution/",
                "fernet_key": drawn["fernet_key"],
                "simple_auth_manager_users": f"{settings.airflow_user}:admin",
                "simple_auth_manager_passwords_file": self._passwords_file,
                "test_connection": "Enabled",
            },
            "api": {
                "host": LOOPBACK,
                "port": settings.airflow_port,
                "base_url": settings.airflow_url,
                "workers": 1,
                "secret_key": drawn["secret_key"],
            },
            "api_auth": {"jwt_secret": drawn["jwt_secret"]},
            "database": {"sql_alchemy_conn": f"sqlite:///{self.database}"},
            "dag_processor": {"parsing_processes": 1, "print_stats_interval": 0},
            # If a task is killed, Airflow notices it in one minute instead of five, also if its scheduler was killed.
            "scheduler": {"task_instance_heartbeat_timeout": 60, "orphaned_tasks_check_interval": 30},
            "logging": {
                "base_log_folder": logs / "tasks",
                "dag_processor_child_process_log_directory": logs / "dag-processor",
                "colored_console_log": False,
                "namespace_levels": " ".join(f"{name}=WARNING" for name in CHATTY),
            },
        }
        named = {
            f"AIRFLOW__{section}__{option}".upper(): str(value)
            for section, values in options.items()
            for option, value in values.items()
        }
        return {"AIRFLOW_HOME": str(self.folder), **named}

    def _secrets(self) -> dict[str, str]:
        path = self.folder / "secrets.json"
        with suppress(FileNotFoundError, ValueError):
            return dict(json.loads(path.read_text()))
        if self.database.exists():
            raise Refusal(
                f"{path} is missing or cannot be read, and {self.database} was made with its keys: restore the file "
                f"from a backup. Without a backup, delete {self.folder}: Airflow then forgets its runs, which DAGs are "
                "on, and what was saved in its pages; the lake and the topics stay"
            )
        drawn = {name: secrets.token_urlsafe(48) for name in ("jwt_secret", "secret_key")}
        fernet_key = urlsafe_b64encode(secrets.token_bytes(32)).decode()
        drawn |= {"fernet_key": fernet_key, "password": secrets.token_urlsafe(9)}
        make_folder(self.folder)
        write_private(path, json.dumps(drawn))
        return drawn

    def _migrate(self) -> None:
        log = self.settings.home / "logs" / "db-migrate.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as out:
            for command in preparations(_POOLS):
                ran = subprocess.run(
                    command,
                    env=self.environment(),
                    stdout=out,
                    stderr=out,
                    check=False,
                    timeout=_MIGRATE_SECONDS,
                )
                if ran.returncode:
                    raise Refusal(
                        f"Airflow's database cannot be prepared, and {log} has the reason: remove the cause, "
                        "or delete all data of the platform with `tideline clean`"
                    )


def preparations(pools: Mapping[str, int | str]) -> Iterator[tuple[str, ...]]:
    """The commands that migrate Airflow's database to this version and set its pools. They may run again."""
    yield airflow_command("db", "migrate")
    for pool, slots in pools.items():
        yield airflow_command("pools", "set", pool, str(slots), "Spark jobs of recompute and account")


def airflow_command(*words: str) -> tuple[str, ...]:
    """A command of Airflow, run by this same Python."""
    return (sys.executable, "-m", "airflow", *words)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, from the first byte on. A power cut leaves it whole."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    make_durable(new)
    new.replace(path)
    make_durable(path.parent)
