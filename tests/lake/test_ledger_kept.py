"""Old lines of the ledger are removed, but a plan always finds the newest state of each slice."""

from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from jobs.lake import ledger as module
from jobs.lake.delta.reading import rows_by_partition
from jobs.lake.ledger import LateCountPosition, Ledger
from jobs.lake.slices import LedgerLine, State
from jobs.pipelines import PIPELINES
from jobs.pipelines.slices import Slice, slices_between
from jobs.refusal import Refusal
from tests.finality.test_due import entry

DAY_MS = 86_400_000
NOW_MS = 1_800_000_000_000 - 1_800_000_000_000 % DAY_MS
HOURLY = 24
PIPELINE = replace(PIPELINES["rolling_sum"], slice_seconds=3600)


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """A ledger for slices of an hour, with lines that are kept for ten days."""
    monkeypatch.setattr(module, "_MERGE_EVERY_COMMITS", 10**9)
    monkeypatch.setenv("LEDGER_KEPT_DAYS", "10")
    return Ledger.open(tmp_path, PIPELINE)


def slices(days_ago: int) -> list[Slice]:
    return slices_between(PIPELINE, NOW_MS - days_ago * DAY_MS, NOW_MS - (days_ago - 1) * DAY_MS)


def write(ledger: Ledger, days_ago: int, *states: State, at_ms: int | None = None, version: int = 1) -> None:
    """Write lines of all slices of a day, as a plan does when the day is over, or later."""
    at_ms = NOW_MS - (days_ago - 1) * DAY_MS if at_ms is None else at_ms
    for state in states:
        ledger.append([entry(slice_, state, at_ms=at_ms, version=version) for slice_ in slices(days_ago)])


ALL = (State.OPEN, State.CLOSED, State.RECOMPUTING, State.AUDITING, State.FINAL)


def lines(ledger: Ledger) -> dict[int, int]:
    """The number of lines of each day, by how many days ago it was."""
    rows = rows_by_partition(DeltaTable(ledger.path))
    return {days: rows[slices(days)[0].name[:8]] for days in range(1, 40) if slices(days)[0].name[:8] in rows}


def newest(ledger: Ledger) -> dict[str, LedgerLine]:
    """The newest line of every slice."""
    return ledger.newest_of(ledger.days())


def turn(ledger: Ledger) -> None:
    """Do the step that follows every fifty commits."""
    ledger._remove_old_lines('{"counted":null}')


def test_of_each_slice_the_newest_line_stays_and_of_young_ones_all(ledger: Ledger) -> None:
    for days in (20, 12, 11, 5, 1):
        write(ledger, days, *ALL)
    before = newest(ledger)
    turn(ledger)
    assert lines(ledger) == {20: HOURLY, 12: HOURLY, 11: 5 * HOURLY, 5: 5 * HOURLY, 1: 5 * HOURLY}
    assert newest(ledger) == newest(Ledger.open(ledger.path.parent.parent, PIPELINE)) == before
    assert [line.state for line in ledger.history(slices(20)[3].name)] == [State.FINAL]


def test_a_slice_that_was_restated_keeps_its_young_lines_and_the_newest(ledger: Ledger) -> None:
    write(ledger, 20, *ALL)
    write(ledger, 20, State.REOPENED, State.FINAL, at_ms=NOW_MS, version=2)
    write(ledger, 15, *ALL, State.BLOCKED)
    before = newest(ledger)
    turn(ledger)
    assert lines(ledger) == {20: 2 * HOURLY, 15: HOURLY}
    assert newest(ledger) == before
    assert {line.state for line in before.values()} == {State.FINAL, State.BLOCKED}
    version = ledger.version
    turn(ledger)
    assert ledger.version == version, "a second turn finds nothing"


def test_a_turn_takes_a_few_days_and_the_next_goes_on(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DAYS_A_TURN", 2)
    for days in (30, 29, 28):
        write(ledger, days, *ALL)
    write(ledger, 1, State.FINAL)
    left = []
    for _ in range(3):
        turn(ledger)
        left.append(sum(lines(ledger).values()))
    assert left == [8 * HOURLY, 4 * HOURLY, 4 * HOURLY]


def test_lines_that_end_as_they_began_are_told_apart_by_their_commits(ledger: Ledger) -> None:
    """Two lines may have the same time."""
    write(ledger, 20, State.FINAL, State.BLOCKED, State.FINAL)
    write(ledger, 1, State.OPEN)
    before = newest(ledger)
    turn(ledger)
    assert (newest(ledger), lines(ledger)[20]) == (before, HOURLY)


def test_a_year_of_plans_is_bounded_by_what_a_plan_itself_does(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's own turns ensure this. They also pass on how far late events are counted."""
    monkeypatch.setattr(module, "_MERGE_EVERY_COMMITS", 3)
    counted = LateCountPosition(topic_id="t1", ends={0: 7})
    for days in range(30, 0, -1):
        write(ledger, days, *ALL[:4])
        ledger.append([entry(slice_, at_ms=NOW_MS - (days - 1) * DAY_MS) for slice_ in slices(days)], counted=counted)
    assert sum(lines(ledger).values()) <= (10 + 2) * 5 * HOURLY + 20 * HOURLY
    assert ledger.late_count_position() == counted
    left = newest(ledger)
    assert len(left) == 30 * HOURLY
    assert {line.state for line in left.values()} == {State.FINAL}


def test_a_line_that_a_clock_far_ahead_has_stamped_does_not_age_the_others(ledger: Ledger) -> None:
    """An older version of Tideline stamped the lines of an audit by the clock of its machine."""
    counted = LateCountPosition(topic_id="t1", ends={0: 7}, at_ms=NOW_MS)
    for days in (20, 5):
        write(ledger, days, *ALL)
    ledger.append([entry(slices(1)[0], State.RECOMPUTING, at_ms=NOW_MS)], counted=counted)
    ledger.append([entry(slices(1)[0], State.AUDITING, at_ms=NOW_MS + 500 * DAY_MS)])
    turn(ledger)
    assert lines(ledger) == {20: HOURLY, 5: 5 * HOURLY, 1: 2}


def test_a_bound_that_is_none_is_refused(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEDGER_KEPT_DAYS", "a year")
    write(ledger, 20, State.FINAL)
    with pytest.raises(Refusal, match="LEDGER_KEPT_DAYS='a year' is no positive whole number; the default is 400"):
        turn(ledger)
