"""An approval holds only for the rows that were shown to the person."""

import json
from pathlib import Path

import pytest
from airflow.sdk.exceptions import AirflowFailException

from jobs.broker import clock
from jobs.finality import publishing
from jobs.finality.run.folder import RunFolder
from jobs.lake.ledger import Ledger
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.slices import State
from jobs.pipelines import PIPELINES
from jobs.refusal import Refusal
from tests.lake.test_final import plan_of, work_of
from tideline_airflow.operators.slices import PublishBlockedOperator, ShowBlockedOperator

SUM = PIPELINES["rolling_sum"]
SLICE, RUN = "20260131T120000Z", "manual__1"


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAKE_ROOT", str(tmp_path))
    monkeypatch.setenv("AIRFLOW_CONN_TIDELINE_KAFKA", json.dumps({"conn_type": "tideline_kafka"}))
    return tmp_path


def block(lake: Path, *, as_of_ms: int = 1, checksum: str = "c") -> None:
    work = work_of(SLICE)
    plan = plan_of(RUN, work, as_of_ms=as_of_ms)
    folder = RunFolder.of(PipelineLake(lake, SUM), RUN)
    folder.begin(plan)
    folder.keep_verdicts({SLICE: {"passed": False, "failures": [], "rows": 1, "checksum": checksum}})
    Ledger.open(lake, SUM).append([plan.line(work, State.BLOCKED, at_ms=as_of_ms)])


def show() -> str:
    return str(ShowBlockedOperator(task_id="show", pipeline=SUM.name, slice=SLICE).execute({})["shown"])


def publish(shown: str) -> None:
    of = {"pipeline": SUM.name, "slice": SLICE, "run": RUN}
    PublishBlockedOperator(task_id="publish", shown=shown, by="somebody", reason="a test", **of).execute({})


@pytest.mark.parametrize("again", [{"as_of_ms": 2}, {"checksum": "d"}])
def test_rows_that_a_cleared_run_has_computed_since_are_not_published(lake: Path, again: dict[str, object]) -> None:
    block(lake)
    shown = show()
    block(lake, **again)  # type: ignore[arg-type]
    with pytest.raises(AirflowFailException, match="was computed again since it was shown"):
        publish(shown)


def test_rows_that_were_shown_are_published(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, now_ms: int) -> None:
        raise Refusal(f"asked to publish {arguments[-1]} at {now_ms}")

    monkeypatch.setattr(publishing, "publish", refuse)
    monkeypatch.setattr(clock, "broker_now_ms", lambda _: 7)
    block(lake)
    with pytest.raises(AirflowFailException, match=f"asked to publish .*{SLICE}.*somebody: a test.* at 7"):
        publish(show())
