"""What the account's task submits."""

from types import SimpleNamespace
from typing import Any

import pytest

from tideline_airflow.operators.batch import AccountOperator


def test_the_job_learns_where_its_run_is_read_about(monkeypatch: pytest.MonkeyPatch) -> None:
    operator, submitted = AccountOperator(task_id="account", pipeline="rolling_sum"), list[tuple[str, ...]]()
    monkeypatch.setattr(operator, "_events", lambda: 3)
    monkeypatch.setattr(operator, "submit", lambda *arguments, events: submitted.append((*arguments, str(events))))
    context: Any = {"dag_run": SimpleNamespace(run_id="r"), "ti": SimpleNamespace(log_url="https://runs/r")}
    operator.execute(context)
    assert submitted == [("account", "rolling_sum", "--run", "r", "--link", "https://runs/r", "3")]
