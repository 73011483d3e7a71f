"""The audit of a run on its own files: what is judged where nothing was staged."""

from pathlib import Path

import pytest

from jobs.connectors.ledger import Ledger
from jobs.connectors.runs import RunFolder
from jobs.connectors.states import State, with_late
from jobs.connectors.tries import StagedSlice
from jobs.pipelines import PIPELINES
from jobs.quality import gate
from tests.connectors import test_final as finals

SUM = PIPELINES["rolling_sum"]
EMPTY = "20261119T000100Z"


def plan(lake: Path, *slices: str) -> RunFolder:
    """A run on slices into which nothing fell."""
    folder = RunFolder.of(lake, SUM, "r")
    folder.begin(finals.plan_of("r", *(finals.work_of(name, events=0) for name in slices)))
    folder.take(dict.fromkeys(slices, StagedSlice()))
    return folder


def test_a_source_that_has_gone_silent_is_a_warning_with_a_page(tmp_path: Path) -> None:
    finals.publish(tmp_path, 1)
    folder = plan(tmp_path, EMPTY)
    verdict = gate.examine(tmp_path, SUM, "r")[EMPTY]
    assert verdict.passed
    assert verdict.sentence == "rows are at least 1/10 of the usual number (rows 0, usually 1)"
    assert (folder.verdicts() or {})[EMPTY]["passed"]
    ledger = Ledger.read(tmp_path, SUM)
    assert ledger is not None
    assert verdict.sentence.split(" (")[0] in (tmp_path / str(ledger.newest()[EMPTY].docs)).read_text()


def test_empty_slices_pass_where_nothing_is_usual_yet(tmp_path: Path) -> None:
    plan(tmp_path, EMPTY)
    assert gate.examine(tmp_path, SUM, "r")[EMPTY].failures == ()


@pytest.mark.parametrize("blocked", [False, True])
def test_late_events_that_another_plan_has_counted_stay_counted(tmp_path: Path, blocked: bool) -> None:
    folder, ledger = plan(tmp_path, EMPTY), Ledger.open(tmp_path, SUM)
    planned = folder.plan()
    line = planned.entry(planned.work[0], State.RECOMPUTING, at_ms=1)
    ledger.append([line])
    ledger.append([with_late(line, 5, 2)])
    if blocked:
        # As if an event had been read that was never accepted.
        folder.take({EMPTY: StagedSlice(read=1)})
    assert gate.examine(tmp_path, SUM, "r")[EMPTY].passed is not blocked
    newest = Ledger.open(tmp_path, SUM).newest()[EMPTY]
    assert newest.state is (State.BLOCKED if blocked else State.AUDITING)
    assert newest.late == 5


def test_of_a_run_that_only_tells_nothing_is_judged(tmp_path: Path) -> None:
    folder = plan(tmp_path)
    assert gate.examine(tmp_path, SUM, "r") == {}
    assert folder.verdicts() == {}
