"""A client for the part of Airflow's REST API that Tideline uses."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import httpx

from jobs.refusal import Refusal

# httpx logs every request at INFO.
logging.getLogger("httpx").setLevel(logging.WARNING)

FINAL_STATES = frozenset({"success", "failed"})
_POLL_SECONDS = 0.5


@dataclass(kw_only=True)
class AirflowApi:
    """One logged-in client; use it as a context manager."""

    url: str
    username: str
    password: str = field(repr=False)
    # The address of its web pages for people; if it is not given, it is `url`.
    pages: str = ""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """The Airflow that `AIRFLOW_API` names, and its administrator."""
        url, password = env["AIRFLOW_API"], env.get("AIRFLOW_ADMIN_PASSWORD")
        if not password and (file := env.get("AIRFLOW_ADMIN_PASSWORD_FILE")):
            try:
                password = Path(file).read_text().strip()
            except OSError as error:
                raise Refusal(f"AIRFLOW_ADMIN_PASSWORD_FILE cannot be read: {error}") from error
        if not password:
            raise Refusal(f"AIRFLOW_API={url} needs AIRFLOW_ADMIN_PASSWORD, or AIRFLOW_ADMIN_PASSWORD_FILE")
        pages = env.get("AIRFLOW__API__BASE_URL") or ""
        return cls(url=url, username=env.get("AIRFLOW_ADMIN_USER") or "admin", password=password, pages=pages)

    def __post_init__(self) -> None:
        """Prepare the connection; no request is made before the first call."""
        self.pages = self.pages or self.url
        self._http = httpx.Client(base_url=self.url, timeout=30, trust_env=False)

    def __enter__(self) -> Self:
        """Return the client, which is ready as it is."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close its connections."""
        self._http.close()

    def health(self) -> dict[str, Any]:
        """The components by name with `status` and latest heartbeat; empty while the server does not answer."""
        try:
            answer = self._http.get("/api/v2/monitor/health")
        except httpx.TransportError:
            return {}
        return dict(answer.json()) if answer.is_success else {}

    def beats_since(self, component: str, moment: datetime) -> bool:
        """Whether a component is healthy and beat after the moment. An older beat may be of a replaced component."""
        health = self.health().get(component) or {}
        beat = health.get(f"latest_{component}_heartbeat") or ""
        return health.get("status") == "healthy" and beat != "" and datetime.fromisoformat(beat) > moment

    def dags(self, pattern: str = "%") -> dict[str, dict[str, Any]]:
        """DAGs by id; an SQL `LIKE` pattern selects the ids."""
        params = {"limit": 100, "dag_id_pattern": pattern}
        return {dag["dag_id"]: dag for dag in self._ask("GET", "/dags", params=params)["dags"]}

    def import_errors(self) -> list[str]:
        """The errors that keep DAG files from being read."""
        errors = self._ask("GET", "/importErrors")["import_errors"]
        return [f"{error['filename']}: {error['stack_trace']}" for error in errors]

    def unpause(self, dag_id: str) -> None:
        """Let the scheduler run the DAG."""
        self._ask("PATCH", f"/dags/{dag_id}", json={"is_paused": False})

    def pause(self, dag_id: str) -> None:
        """Let the scheduler begin nothing more of the DAG; a running task goes on."""
        self._ask("PATCH", f"/dags/{dag_id}", json={"is_paused": True})

    def end_runs(self, dag_id: str, state: str, note: str) -> None:
        """Give the runs that are under way a state and a note."""
        for run in self.runs(dag_id):
            if run["state"] not in FINAL_STATES:
                path = f"/dags/{dag_id}/dagRuns/{run['dag_run_id']}"
                self._ask("PATCH", path, json={"state": state, "note": note})

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None) -> str:
        """Start a run and return its id."""
        body = {"logical_date": None, "conf": dict(conf or {})}
        return str(self._ask("POST", f"/dags/{dag_id}/dagRuns", json=body)["dag_run_id"])

    def runs(self, dag_id: str) -> list[dict[str, Any]]:
        """The runs of a DAG, newest first."""
        newest_first = {"order_by": "-run_after", "limit": 20}
        return list(self._ask("GET", f"/dags/{dag_id}/dagRuns", params=newest_first)["dag_runs"])

    def run_state(self, dag_id: str, run_id: str) -> str:
        """The state of a run: `queued`, `running`, `success` or `failed`."""
        return str(self._ask("GET", f"/dags/{dag_id}/dagRuns/{run_id}")["state"])

    def task_instances(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        """The tasks of a run with their states."""
        return list(self._ask("GET", f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances")["task_instances"])

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value") -> Any:
        """The value that a task has handed on."""
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/xcomEntries/{key}"
        return self._ask("GET", path, params={"stringify": False})["value"]

    def task_log(self, dag_id: str, run_id: str, task_id: str, try_number: int = 1) -> str:
        """The log of a task so far."""
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/logs/{try_number}"
        content = self._ask("GET", path, params={"full_content": True})["content"]
        return "\n".join(_line(line) for line in content)

    def wait_for_run(
        self, dag_id: str, run_id: str, deadline_seconds: float, report: Callable[[str], None] = lambda state: None
    ) -> str:
        """Wait for a run to end and return its state. Until then ``report`` is called with the state now and then."""
        deadline = time.monotonic() + deadline_seconds
        while (state := self.run_state(dag_id, run_id)) not in FINAL_STATES:
            if time.monotonic() > deadline:
                raise Refusal(
                    f"{dag_id} is still {state} after {deadline_seconds:.0f} s: look at run {run_id} on {self.pages}"
                )
            report(state)
            time.sleep(_POLL_SECONDS)
        return state

    def _ask(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        answer = self._send(method, path, **request)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            self._log_in()
            answer = self._send(method, path, **request)
        if not answer.is_success:
            raise Refusal(f"Airflow refused {method} {path} ({answer.status_code}): {answer.text[:300]}")
        return dict(answer.json())

    def _log_in(self) -> None:
        body = {"username": self.username, "password": self.password}
        answer = self._http.post("/auth/token", json=body)
        if not answer.is_success:
            raise Refusal(
                f"Airflow refused the login of {self.username!r}: correct AIRFLOW_ADMIN_PASSWORD; "
                "for the embedded Airflow, run `tideline up` afterwards"
            )
        self._http.headers["Authorization"] = f"Bearer {answer.json()['access_token']}"

    def _send(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            return self._http.request(method, f"/api/v2{path}", **request)
        except httpx.TransportError as error:
            raise Refusal(
                f"Airflow does not answer at {self.url} ({error}): start the embedded one with `tideline up`, or "
                "correct AIRFLOW_API"
            ) from error


def _line(line: dict[str, Any] | str) -> str:
    """A line of a log as text: the event, followed by the messages of its exceptions."""
    if isinstance(line, str):
        return line
    errors = (f"{error['exc_type']}: {error['exc_value']}" for error in line.get("error_detail") or ())
    return ": ".join([line["event"], *errors])
