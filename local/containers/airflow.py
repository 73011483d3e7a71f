"""An Airflow component in its container: secrets become settings, and drivers end in order before the container does.

`python -m local.containers.airflow COMPONENT`, or `init`, which prepares the database and ends.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import psutil

from jobs.airflow_api.client import AirflowApi
from jobs.refusal import Refusal
from jobs.settings import Settings
from local.platform.airflow import airflow_command, preparations, write_private
from local.platform.drivers import end_drivers
from local.platform.process import kill, kill_session, terminate, wait_gone

SECRETS = Path("/run/secrets")
POOLS = {"tideline_recompute": "TIDELINE_RECOMPUTE_SLOTS", "tideline_account": "TIDELINE_ACCOUNT_SLOTS"}
# Drivers are processes in the container of this component. When the container ends, they end too.
HOLDS_DRIVERS = "scheduler"
_DRIVERS_STOP_SECONDS = 45
_COMPONENT_STOP_SECONDS = 15
# With these pauses, a scheduler that fails at once does not use a whole core.
_PAUSES_SECONDS = (1, 5, 15, 30)
_WELL_SECONDS = 300
_LOOK_SECONDS = 0.5


def main(words: list[str]) -> int:
    """Run the component, prepare the database (`init`), or run the demo (`demo`)."""
    # An empty connection counts as not set.
    given = {name: value for name, value in os.environ.items() if value or not name.startswith("AIRFLOW_CONN_")}
    env = {**given, **from_secrets(SECRETS, given)}
    if words == ["init"]:
        return _prepare(env)
    if words == ["demo"]:
        return _demo(env)
    passwords = {env["AIRFLOW_ADMIN_USER"]: _read(SECRETS, "airflow_admin_password")}
    write_private(Path(env["AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE"]), json.dumps(passwords))
    if words[:1] == [HOLDS_DRIVERS]:
        return hold(airflow_command(*words), env)
    os.execvpe(sys.executable, airflow_command(*words), env)


def from_secrets(secrets: Path, env: Mapping[str, str]) -> dict[str, str]:
    """The settings that hold a secret. No secret is in the container's configuration, and no driver sees one."""
    user, password = env["AIRFLOW_ADMIN_USER"], _read(secrets, "airflow_admin_password")
    database = f"airflow:{quote(_read(secrets, 'postgres_password'), safe='')}@{env['POSTGRES_ADDRESS']}/airflow"
    api = {"conn_type": "tideline_airflow", "host": env["AIRFLOW_API"], "login": user, "password": password}
    return {
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"postgresql+psycopg2://{database}",
        "AIRFLOW__CORE__FERNET_KEY": _read(secrets, "airflow_fernet_key"),
        "AIRFLOW__API__SECRET_KEY": _read(secrets, "airflow_secret_key"),
        "AIRFLOW__API_AUTH__JWT_SECRET": _read(secrets, "airflow_jwt_secret"),
        "AIRFLOW_CONN_TIDELINE_AIRFLOW": json.dumps(api),
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": f"{user}:admin",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": f"{env['AIRFLOW_HOME']}/passwords.json",
    }


def _prepare(env: Mapping[str, str]) -> int:
    for command in preparations({pool: env[slots] for pool, slots in POOLS.items()}):
        if code := subprocess.run(command, env=env, check=False).returncode:
            return code
    return 0


def _demo(env: Mapping[str, str]) -> int:
    """Run the demo against a running platform; `make compose-demo` starts it."""
    from rich.console import Console

    from jobs.query.lake import Lake
    from local.demo import run as demo

    try:
        with AirflowApi.from_env(env) as api:
            demo.show(api, Lake(Settings.from_env(env).lake_root), Console())
    except Refusal as refusal:
        print(f"tideline: {refusal}", file=sys.stderr)
        return 1
    return 0


def hold(
    command: Sequence[str],
    env: Mapping[str, str],
    living: Callable[[], Iterable[psutil.Process]] = psutil.process_iter,
) -> int:
    """Run a component again whenever it ends; drivers go on. On a request to stop, end it and the drivers."""
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
    failures = 0
    while True:
        began = time.monotonic()
        component = psutil.Popen(command, env=env, start_new_session=True)
        while component.poll() is None and not asked:
            time.sleep(_LOOK_SECONDS)
        if not asked:
            failures = 0 if time.monotonic() - began > _WELL_SECONDS else failures + 1
            pause = _PAUSES_SECONDS[min(failures, len(_PAUSES_SECONDS)) - 1] if failures else 0
            # If the component was killed, its workers would go on with tasks that the next one starts again.
            kill_session(component.pid, living())
            ended = f"{command[-1]} ended with exit code {component.returncode}"
            print(f"{ended}: it is started again in {pause} s, and Spark drivers keep running", flush=True)
            wakes = time.monotonic() + pause
            while time.monotonic() < wakes and not asked:
                time.sleep(_LOOK_SECONDS)
        if asked:
            terminate([component])
            end_drivers(living, _DRIVERS_STOP_SECONDS)
            if not wait_gone([component], _COMPONENT_STOP_SECONDS):
                kill([component])
            return 0


def _read(secrets: Path, name: str) -> str:
    return (secrets / name).read_text().strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
