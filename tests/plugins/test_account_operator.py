"""The command that the account's task submits."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.lake.ledger import Ledger
from jobs.lake.slices import LedgerLine, State
from jobs.pipelines.window import Window
from jobs.settings import Settings
from tests.finality.accounts import PIPELINE, Made
from tests.finality.test_account_kept import done, name
from tideline_airflow.operators import batch
from tideline_airflow.operators.account import AccountOperator


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


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """The lake of the environment."""
    monkeypatch.setenv("LAKE_ROOT", str(tmp_path / "lake"))
    return Made(Settings.from_env())


def final(made: Made, day: int, events: int) -> None:
    made.publish(name(day), [], {0: 4}, events=events)
    line = LedgerLine(slice=name(day), state=State.FINAL, at_ms=0, run="r", version=1, events=events)
    Ledger.open(made.root, PIPELINE).append([line])


def test_events_are_those_of_the_slices_that_the_job_will_account_for(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not counted: slices that have an account, and slices with an account that was removed because of its age."""
    monkeypatch.setenv("DRIFT_KEPT_DAYS", "3")
    for day in range(6):
        final(made, day, 10**6)
    done(made, *((name(day), 1) for day in range(3, 6)))
    final(made, 6, 7)
    assert AccountOperator(task_id="account", pipeline="rolling_sum")._events() == 7
    # Each event falls into several windows.
    sliding = replace(PIPELINE, window=Window.sliding(size_ms=60_000, slide_ms=10_000))
    monkeypatch.setitem(batch.PIPELINES, "rolling_sum", sliding)
    assert AccountOperator(task_id="account", pipeline="rolling_sum")._events() == 42


def test_a_lake_without_accounts_has_all_events_to_account_for(made: Made) -> None:
    operator = AccountOperator(task_id="account", pipeline="rolling_sum")
    assert operator._events() == 0
    final(made, 0, 3)
    assert operator._events() == 3
    # To count only must not make a table.
    assert not (made.root / PIPELINE.balance_table).exists()


def test_what_the_job_refuses_is_told_by_the_job(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    final(made, 0, 3)
    monkeypatch.setitem(batch.PIPELINES, "rolling_sum", replace(PIPELINE, slice_seconds=120))
    assert AccountOperator(task_id="account", pipeline="rolling_sum")._events() is None


def test_a_worker_counts_without_spark() -> None:
    code = "import sys, jobs.finality.account_inputs; sys.exit('pyspark' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
