"""Audit and roll-back take their time from the broker. On a machine with a wrong clock they do nothing."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

from jobs.broker import clock
from jobs.finality import auditing, publishing
from jobs.lake.final import FinalTable
from jobs.lake.ledger import Ledger
from jobs.pipelines import PIPELINES
from jobs.quality.audit import SMALL_ROWS
from jobs.refusal import Refusal
from tests.lake import test_final as finals
from tideline_airflow.operators.audit import AuditOperator
from tideline_airflow.operators.slices import RollBackOperator

SUM = PIPELINES["rolling_sum"]
NOW_MS = 1_800_000_000_000


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAKE_ROOT", str(tmp_path))
    monkeypatch.setenv("AIRFLOW_CONN_TIDELINE_KAFKA", json.dumps({"conn_type": "tideline_kafka"}))
    monkeypatch.setattr(clock, "broker_now_ms", lambda _: NOW_MS)
    monkeypatch.setattr(publishing, "send", lambda _kafka, _topic, wanted: len(list(wanted)))
    return tmp_path


@pytest.fixture
def wrong_clock(lake: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lake, and a machine whose clock is wrong."""

    def refuse(_: object) -> int:
        raise Refusal("the clocks differ by more than 30 s")

    monkeypatch.setattr(clock, "broker_now_ms", refuse)
    return lake


def audit() -> AuditOperator:
    return AuditOperator(task_id="audit", pipeline=SUM.name)


def context() -> Any:
    return {
        "dag_run": SimpleNamespace(run_id="r"),
        "dag": SimpleNamespace(dag_id="recompute_rolling_sum"),
        "ti": SimpleNamespace(xcom_push=lambda *_: None),
    }


def test_an_audit_gets_the_broker_s_time_here_and_as_a_job(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(auditing, "examine", lambda *_, now_ms, **__: seen.append(now_ms))
    monkeypatch.setattr(AuditOperator, "submit", lambda _, *words: seen.append(words))
    for rows in (SMALL_ROWS, SMALL_ROWS + 1):
        monkeypatch.setattr(auditing, "staged_rows", lambda *_, rows=rows: rows)
        audit().execute(context())
    assert seen[0] == NOW_MS
    assert ("--now-ms", str(NOW_MS)) == seen[1][4:6]


def test_an_audit_on_a_machine_with_a_wrong_clock_writes_nothing_and_is_tried_again(wrong_clock: Path) -> None:
    with pytest.raises(Refusal, match="the clocks differ"):
        audit().execute(context())
    assert list(wrong_clock.iterdir()) == []


def roll_back(monkeypatch: pytest.MonkeyPatch, *, apply: bool = True) -> None:
    monkeypatch.setattr(RollBackOperator, "add_events", lambda *_: None)
    of = {"pipeline": SUM.name, "slice": finals.FIRST.name, "to_version": 1, "reason": "a test", "by": "somebody"}
    RollBackOperator(task_id="roll_back", apply=apply, **of).execute(context())


def served(lake: Path) -> tuple[int, int]:
    """The version of the slice, and its time."""
    header = FinalTable.open(lake, SUM).headers()[finals.FIRST.name]
    return header.version, header.as_of_ms


def test_a_roll_back_has_the_broker_s_time(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (1, 2):
        finals.publish(lake, version)
    roll_back(monkeypatch)
    assert served(lake) == (3, NOW_MS)
    assert Ledger.open(lake, SUM).newest([finals.FIRST.name])[finals.FIRST.name].at_ms == NOW_MS


def test_a_roll_back_on_a_machine_with_a_wrong_clock_is_refused(
    wrong_clock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can still be looked at: a dry run writes nothing."""
    for version in (1, 2):
        finals.publish(wrong_clock, version)
    before = served(wrong_clock)
    with pytest.raises(AirflowFailException, match="the clocks differ"):
        roll_back(monkeypatch)
    roll_back(monkeypatch, apply=False)
    assert served(wrong_clock) == before
    assert Ledger.read(wrong_clock, SUM) is None
