"""`Dockerfile` and `docker-compose.yml` by their text: rules that need no engine. `make test-compose` runs them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from base64 import urlsafe_b64decode
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from jobs.settings import PROJECT, Settings, fast_local_files, read_env_file
from local.containers import airflow as container
from local.platform.airflow import CHATTY, Airflow
from local.platform.executor import LocalExecutor
from local.platform.process import Service, is_alive, kill, marked
from local.platform.settings import StackSettings
from tests import processes

COMPOSE: dict[str, Any] = yaml.safe_load((PROJECT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
LONG_RUNNING = sorted(SERVICES.keys() - {"init", "demo"})
# One instruction per line, without comments.
DOCKERFILE = [
    line.strip()
    for line in re.sub(r"\\\n\s*", " ", re.sub(r"(?m)^\s*#.*\n", "", (PROJECT / "Dockerfile").read_text())).splitlines()
    if line.strip()
]


def stages() -> dict[str, list[str]]:
    """The instructions of each stage."""
    found: dict[str, list[str]] = {}
    for line in DOCKERFILE:
        if line.startswith("FROM "):
            name = line.rpartition(" AS ")[2]
        found.setdefault(name, []).append(line)
    return found


def user_of(name: str) -> str | None:
    """The user of a stage, its own or that of the stage it begins with."""
    instructions = stages().get(name, [])
    own = [line.split()[1] for line in instructions if line.startswith("USER ")]
    return own[-1] if own else user_of(instructions[0].split()[1]) if instructions else None


@pytest.mark.parametrize("name", LONG_RUNNING)
def test_a_service_is_limited_checked_and_started_again(name):
    service = SERVICES[name]
    assert {"mem_limit", "healthcheck"} <= service.keys()
    assert service["restart"] == "unless-stopped"
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert service["init"], "drivers and their JVMs become orphans"
    assert not {"privileged", "user"} & service.keys()
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_a_service_waits_for_what_it_needs():
    waits = {name: set(service.get("depends_on", ())) for name, service in SERVICES.items()}
    assert waits["init"] == {"postgres"}
    assert waits["scheduler"] >= {"init", "api-server", "kafka-1", "kafka-2", "kafka-3", "spark-worker-1"}
    for service in SERVICES.values():
        for name, how in service.get("depends_on", {}).items():
            ends = name == "init"
            assert how["condition"] == ("service_completed_successfully" if ends else "service_healthy")


def test_every_image_is_of_the_one_file_and_runs_as_nobody_special():
    built = {service["build"]["target"] for service in SERVICES.values() if "build" in service}
    assert {service["image"].rpartition("-")[2] for service in SERVICES.values()} == built
    assert {name: user_of(name) for name in built} == {
        "airflow": "tideline",
        "kafka": "tideline",
        "postgres": "postgres",
        "spark": "tideline",
    }


def test_no_secret_has_a_default_and_none_is_in_an_environment():
    assert {tuple(secret) for secret in COMPOSE["secrets"].values()} == {("environment",)}
    text = (PROJECT / "docker-compose.yml").read_text()
    for secret in COMPOSE["secrets"].values():
        assert f"${{{secret['environment']}" not in text


@pytest.fixture
def checkout(tmp_path):
    """A project with only the script, and a command `docker` that prints its arguments and its environment."""
    script = tmp_path / "local" / "containers" / "compose.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(PROJECT / "local" / "containers" / "compose.sh", script)
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
    )
    docker.chmod(0o755)
    return tmp_path


def compose(checkout: Path, *words: str, **env: str) -> str:
    path = f"{checkout / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = ("sh", str(checkout / "local" / "containers" / "compose.sh"), *words)
    return subprocess.run(command, env={"PATH": path, **env}, text=True, capture_output=True, check=True).stdout


def test_secrets_are_drawn_once_and_kept_from_others(checkout):
    words, first = json.loads(compose(checkout, "up", "--detach"))
    assert words == ["compose", "up", "--detach"]
    drawn = [first[secret["environment"]] for secret in COMPOSE["secrets"].values()]
    assert len(set(drawn)) == len(drawn)
    assert min(map(len, drawn)) >= 16
    assert len(urlsafe_b64decode(first["AIRFLOW_FERNET_KEY"])) == 32
    assert (checkout / ".tideline" / "compose.env").stat().st_mode & 0o777 == 0o600
    assert json.loads(compose(checkout, "up"))[1] == first


def test_what_is_set_counts_and_what_is_left_empty_is_drawn(checkout):
    lines = (
        "AIRFLOW_ADMIN_PASSWORD='pass word'  # mine",
        'POSTGRES_PASSWORD="a"',
        "AIRFLOW_JWT_SECRET=",
        'AIRFLOW_FERNET_KEY=""',
        "AIRFLOW_PORT=81 # not 8080\r",
    )
    (checkout / ".env").write_bytes("\n".join(lines).encode())
    notes = "two lines\nAIRFLOW_SECRET_KEY=not this"
    _, secrets = json.loads(compose(checkout, "up", POSTGRES_PASSWORD="b", AIRFLOW_SECRET_KEY="", NOTES=notes))
    assert secrets["AIRFLOW_ADMIN_PASSWORD"] == "pass word"
    assert secrets["POSTGRES_PASSWORD"] == "b"
    assert min(len(secrets[name]) for name in ("AIRFLOW_JWT_SECRET", "AIRFLOW_SECRET_KEY")) == 64
    assert len(urlsafe_b64decode(secrets["AIRFLOW_FERNET_KEY"])) == 32
    said = compose(checkout, "--report", AIRFLOW_ADMIN_USER="ann")
    assert "Airflow   http://127.0.0.1:81  user ann, password pass word\n" in said
    assert "Spark     http://127.0.0.1:8081\n" in said


def test_a_secret_that_came_later_is_drawn_beside_those_that_are_there(checkout):
    _, first = json.loads(compose(checkout, "up"))
    drawn = checkout / ".tideline" / "compose.env"
    drawn.write_text("".join(line for line in drawn.read_text().splitlines(True) if "JWT" not in line))
    _, second = json.loads(compose(checkout, "up"))
    assert {name for name in first if first[name] != second[name]} == {"AIRFLOW_JWT_SECRET"}
    assert len(second["AIRFLOW_JWT_SECRET"]) == 64


def test_every_setting_of_the_file_is_explained():
    text = (PROJECT / "docker-compose.yml").read_text()
    used = dict(re.findall(r"\$\{([A-Z0-9_]+):-([^}]*)\}", text))
    explained = dict(
        line.lstrip("#").partition("=")[::2]
        for line in (PROJECT / ".env.example").read_text().splitlines()
        if re.match(r"#[A-Z0-9_]+=", line)
    )
    used = {name: default for name, default in used.items() if not name.startswith("AIRFLOW_CONN_")}
    assert {name: explained.get(name) for name in used} == used
    assert {secret["environment"] for secret in COMPOSE["secrets"].values()} <= explained.keys()


def test_airflow_is_set_as_the_embedded_one_is(tmp_path):
    environment = COMPOSE["x-airflow"]["environment"]
    embedded = Airflow(settings=StackSettings.from_env({"TIDELINE_HOME": str(tmp_path)}), java=None)._configuration()
    for section in ("AIRFLOW__SCHEDULER__", "AIRFLOW__DAG_PROCESSOR__"):
        ours, theirs = (
            {name: str(value) for name, value in options.items() if name.startswith(section)}
            for options in (environment, embedded)
        )
        assert ours == theirs
    quiet = {name.partition("=")[0] for name in environment["AIRFLOW__LOGGING__NAMESPACE_LEVELS"].split()}
    assert quiet == set(CHATTY)
    assert environment["AIRFLOW__CORE__EXECUTOR"] == f"{LocalExecutor.__module__}.{LocalExecutor.__name__}"


def test_the_dockerfile_follows_the_rules():
    """The rules of hadolint that can be checked from the text alone."""
    bases = [line.split()[1] for line in DOCKERFILE if line.startswith("FROM ")]
    assert set(bases) - stages().keys() == {"debian:bookworm-slim"}
    assert not [line for line in DOCKERFILE if line.startswith(("ADD ", "MAINTAINER ", "RUN cd ", "RUN sudo "))]
    assert all(line.split()[1].startswith("/") for line in DOCKERFILE if line.startswith("WORKDIR "))
    assert all(
        line.split(maxsplit=1)[1].startswith("[") for line in DOCKERFILE if line.startswith(("CMD", "ENTRYPOINT"))
    )
    for line in DOCKERFILE:
        if "apt-get install" in line:
            rules = ("apt-get update", "--no-install-recommends", "rm -rf /var/lib/apt/lists/*")
            assert not [rule for rule in rules if rule not in line], line
        if "pip install --no-cache-dir" in line:
            assert all("==" in word for word in line.partition("--no-cache-dir")[2].split()), line
    assert any(line.startswith("SHELL") and "pipefail" in line for line in DOCKERFILE)


def test_the_image_fetches_jars_with_the_few_files_that_this_needs(tmp_path: Path):
    """The layer with the jars comes before the code, so it has only the files that are copied by name."""
    for line in DOCKERFILE[: next(at for at, line in enumerate(DOCKERFILE) if "local.jars import fetch" in line)]:
        if line.startswith("COPY ") and line.endswith("/") and "--from" not in line:
            *files, folder = line.split()[1:]
            for file in files:
                place = tmp_path / folder / Path(file).name
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(PROJECT / file, place)
    assert (tmp_path / "local" / "jars" / "fetch.py").is_file()
    code = [
        "import sys",
        # Without the path and the finder of the installation, which would find the files of this project, too.
        f"sys.path = [path for path in sys.path if path != {str(PROJECT)!r}]",
        "sys.meta_path = [finder for finder in sys.meta_path if '__editable__' not in str(finder)]",
        "from local.jars import fetch",
        "print(fetch.__file__)",
    ]
    command = [sys.executable, "-c", "; ".join(code)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.stderr, ran.stdout.strip()) == ("", str(tmp_path / "local" / "jars" / "fetch.py"))


def test_what_a_jar_is_called_is_what_is_pinned():
    pinned = re.search(r'artifact = "(hadoop-bare-naked-local-fs)", version = "([^"]+)"', jars_declaration())
    name = f"/opt/tideline/jars/spark/{'-'.join(pinned.groups())}.jar"
    assert COMPOSE["configs"]["spark-defaults"]["content"].count(name) == 2


def test_executors_open_files_as_a_bench_cluster_does():
    said = dict(line.split(" ", 1) for line in COMPOSE["configs"]["spark-defaults"]["content"].splitlines())
    ours = fast_local_files(Settings.from_env(), everywhere=True)
    here, there = str(Settings.from_env().jars), "/opt/tideline/jars"
    assert {name: said[name] for name in ours} == {name: value.replace(here, there) for name, value in ours.items()}


def jars_declaration() -> str:
    return (PROJECT / "local" / "jars" / "jars.toml").read_text()


def test_secrets_become_settings(tmp_path):
    for name in COMPOSE["secrets"]:
        (tmp_path / name).write_text(f"{name}: p@ss/word %\n")
    env = {
        "AIRFLOW_ADMIN_USER": "admin",
        "POSTGRES_ADDRESS": "postgres",
        "AIRFLOW_API": "http://api:1",
        "AIRFLOW_HOME": "/h",
    }
    settings = container.from_secrets(tmp_path, env)
    assert settings["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"] == (
        "postgresql+psycopg2://airflow:postgres_password%3A%20p%40ss%2Fword%20%25@postgres/airflow"
    )
    assert settings["AIRFLOW__CORE__FERNET_KEY"] == "airflow_fernet_key: p@ss/word %"
    assert all("AIRFLOW" in name for name in settings), "a driver's environment has nothing that is called so"


_COMPONENT = """
import subprocess, sys
from pathlib import Path
here, driver = Path(sys.argv[2]), sys.argv[1]
sleep = "import time; time.sleep(600)"
worker = subprocess.Popen([sys.executable, "-c", sleep])
started = here / "driver"
if not started.exists():
    driver = subprocess.Popen([sys.executable, driver], start_new_session=True)
    started.write_text(str(driver.pid))
with (here / "components").open("a") as file:
    file.write(f"{worker.pid}\\n")
exec(sleep)
"""
_DRIVER = """
import signal, sys, time
from pathlib import Path
def end(*_):
    (Path(__file__).parent / "ended").touch()
    sys.exit()
signal.signal(signal.SIGTERM, end)
(Path(__file__).parent / "listens").touch()
time.sleep(600)
"""
_HOLD = """
import os, sys
from pathlib import Path
from local.containers.airflow import hold
from local.platform.process import marked
sys.exit(hold(sys.argv[2:], os.environ, lambda: marked(Path(sys.argv[1]))))
"""


def test_a_dead_scheduler_is_started_again_without_its_workers_and_beside_the_drivers(tmp_path):
    driver = tmp_path / "jobs" / "__main__.py"
    driver.parent.mkdir()
    driver.write_text(_DRIVER)
    component = (sys.executable, "-c", _COMPONENT, str(driver), str(tmp_path))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = (sys.executable, "-c", _HOLD, str(tmp_path), *component)
    holder = Service(name="holder", home=tmp_path, command=command, env=env)

    def workers() -> list[int]:
        file = tmp_path / "components"
        return [int(line) for line in file.read_text().splitlines()] if file.exists() else []

    try:
        holder.start()
        processes.wait_until(lambda: workers() and (driver.parent / "listens").exists(), "all of it runs")
        first = psutil.Process(*workers())
        os.kill(first.ppid(), signal.SIGKILL)
        processes.wait_until(lambda: len(workers()) == 2, "another component has started")
        assert not is_alive(first)
        assert psutil.pid_exists(int((tmp_path / "driver").read_text()))
        assert not (driver.parent / "ended").exists()
        os.kill(holder.process().pid, signal.SIGTERM)
        processes.wait_until(lambda: holder.process() is None, "it ends when it is asked to")
        assert (driver.parent / "ended").exists()
    finally:
        kill(marked(tmp_path))


def test_the_example_is_read_as_settings(tmp_path):
    """A user who removes the comment signs gets the defaults and no error."""
    example = tmp_path / ".env"
    lines = (PROJECT / ".env.example").read_text().splitlines()
    example.write_text("\n".join(line.removeprefix("#") for line in lines if re.match(r"#[A-Z0-9_]+=", line)))
    read = read_env_file(example)
    assert read["SPARK_JOB_CORES"] == "1"
    settings, default = StackSettings.from_env({**read, "TIDELINE_HOME": str(tmp_path)}), StackSettings.from_env({})
    own = {"home": tmp_path, "alerts": settings.alerts, "jobs": settings.jobs}
    assert settings == replace(default, **own)
    cores = {"spark_master": "local[3]", "shuffle_partitions": 2}
    places = {name: getattr(settings.jobs, name) for name in ("lake_root", "jars", "scratch", "kafka")}
    assert settings.jobs == replace(default.jobs, **places, **cores)
