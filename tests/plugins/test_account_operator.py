"""What the account's task submits."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tideline_airflow.operators import batch
from tideline_airflow.operators.batch import AccountOperator


def test_the_job_learns_where_its_run_is_read_about(monkeypatch: pytest.MonkeyPatch) -> None:
    operator, submitted = AccountOperator(task_id="account", pipeline="rolling_sum"), list[tuple[str, ...]]()
    monkeypatch.setattr(operator, "_events", lambda: 3)
    take = lambda *arguments, events, nice: submitted.append((*arguments, str(events)))  # noqa: E731
    monkeypatch.setattr(operator, "submit", take)
    context: Any = {"dag_run": SimpleNamespace(run_id="r"), "ti": SimpleNamespace(log_url="https://runs/r")}
    operator.execute(context)
    assert submitted == [("account", "rolling_sum", "--run", "r", "--link", "https://runs/r", "3")]


_JOB = """
import os, sys, time
deadline, wanted = time.monotonic() + 10, int(sys.argv[1])
while os.nice(0) != wanted and time.monotonic() < deadline:
    time.sleep(0.01)
open(sys.argv[2], "w").write(str(os.nice(0)))
"""


def test_an_account_steps_back_behind_streams_and_publishes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nice, found = os.nice(0) + 5, tmp_path / "nice"
    command = [sys.executable, "-c", _JOB, str(nice), str(found)]
    monkeypatch.setattr(batch, "submission", lambda *_, **__: (command, {}))
    operator = AccountOperator(task_id="account", pipeline="rolling_sum")
    monkeypatch.setattr(operator, "_events", lambda: 3)
    context: Any = {"dag_run": SimpleNamespace(run_id="r"), "ti": SimpleNamespace(log_url="https://runs/r")}
    operator.execute(context)
    assert found.read_text() == str(nice)
