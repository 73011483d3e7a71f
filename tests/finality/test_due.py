"""When a slice is closed and why it is due: every rule alone, and all of them against a naive reading."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from jobs.finality.due import MAX_SLICES, PlanInputs, Request, SliceSurvey, TopicEnds, survey
from jobs.lake.slices import Boundary, Header, LedgerLine, State, reconciled, with_late
from jobs.pipelines import PIPELINES
from jobs.pipelines.days import DAY_MS
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import CLOCK_SKEW_MS, Slice, is_in_time, over_at, slice_at, slices_between
from jobs.pipelines.window import Severity

SUM = PIPELINES["rolling_sum"]
SLIDING = PIPELINES["rolling_sum_sliding"]
MINUTE = 60_000
START = 1_800_000_000_000 - 1_800_000_000_000 % MINUTE
FIRST = slice_at(SUM, START)
SECOND = slice_at(SUM, START + MINUTE)


def header(slice_: Slice = FIRST, **changes: Any) -> Header:
    made = Header(
        slice=slice_.name,
        slice_seconds=60,
        version=1,
        as_of_ms=START,
        run="r1",
        fingerprint=SUM.fingerprint,
        topic_id="t1",
        offsets={0: 10},
        events_version=1,
        rows=1,
        events=1000,
        checksum="c",
        verdict="passed",
        reason="closed",
    )
    return replace(made, **changes)


def entry(slice_: Slice = FIRST, state: State = State.FINAL, **changes: Any) -> LedgerLine:
    boundary = Boundary(topic_id="t1", ends={0: 10})
    made = LedgerLine(
        slice=slice_.name, state=state, at_ms=START, run="r1", version=1, boundary=boundary, offsets={0: 10}
    )
    return replace(
        made, **{"fingerprint": SUM.fingerprint, "checks": SUM.checks_fingerprint, "reason": "closed", **changes}
    )


def inputs_with(after_ms: int = 0, **changes: Any) -> PlanInputs:
    """The first slice has been over for ``after_ms``, and all its events are landed."""
    made = PlanInputs(
        now_ms=over_at(SUM, FIRST) + after_ms,
        first_ms=START + 5,
        topic=TopicEnds(topic_id="t1", earliest={0: 0}, ends={0: 10}),
        landed={0: 10},
        headers={},
        entries={},
    )
    return replace(made, **changes)


def due(found: SliceSurvey) -> dict[str, str]:
    return {item.slice.name: item.reason for item in found.due}


def seen(*entries: LedgerLine) -> Mapping[str, LedgerLine]:
    return {entry.slice: entry for entry in entries}


def test_a_slice_is_looked_at_when_nothing_can_come_in_time_any_more() -> None:
    assert over_at(SUM, FIRST) == FIRST.end_ms + 60_000 + CLOCK_SKEW_MS
    assert over_at(SLIDING, FIRST) == FIRST.end_ms + 750 + 60_000 + CLOCK_SKEW_MS
    assert survey(SUM, inputs_with(-1)).taken == {}
    assert set(survey(SUM, inputs_with(0)).taken) == {FIRST}


def test_the_boundary_is_taken_once() -> None:
    waiting = entry(state=State.OPEN, version=0, boundary=Boundary(topic_id="t1", ends={0: 7}))
    later = inputs_with(3600_000, topic=TopicEnds(topic_id="t1", earliest={0: 0}, ends={0: 99}), landed={0: 7})
    found = survey(SUM, replace(later, entries=seen(waiting)))
    assert due(found)[FIRST.name] == "closed"
    assert FIRST not in found.taken
    assert found.due[0].boundary == waiting.boundary


def test_it_is_closed_when_every_partition_is_landed_up_to_its_boundary() -> None:
    topic = TopicEnds(topic_id="t1", earliest={0: 0, 1: 0}, ends={0: 10, 1: 5})
    behind = survey(SUM, inputs_with(topic=topic, landed=topic.landed({0: 10, 1: 4})))
    assert due(behind) == {}
    assert behind.waiting[FIRST].missing({0: 10, 1: 4}) == "partition 1: 1 offsets"
    assert due(survey(SUM, inputs_with(topic=topic, landed=topic.landed({0: 10, 1: 5})))) == {FIRST.name: "closed"}


@pytest.mark.parametrize(
    ("earliest", "ends", "landed", "closed"),
    [
        ({0: 0, 1: 0}, {0: 10, 1: 0}, {0: 10}, True),  # A partition that never had a record.
        ({0: 0, 1: 0}, {0: 10, 1: 3}, {0: 10}, False),  # A partition that was added, and is not read yet.
        ({0: 500}, {0: 500}, {}, True),  # Retention removed all records before the first landing.
        ({0: 500}, {0: 510}, {}, False),
        ({0: 500}, {0: 500}, {0: 400}, False),  # Retention removed records that were not landed: ingest must note it.
        ({0: 0}, {0: 12}, {0: 10}, False),  # An open transaction: its offsets count, and ingest waits before them.
    ],
)
def test_partitions(earliest: dict[int, int], ends: dict[int, int], landed: dict[int, int], closed: bool) -> None:
    topic = TopicEnds(topic_id="t1", earliest=earliest, ends=ends)
    assert bool(due(survey(SUM, inputs_with(topic=topic, landed=topic.landed(landed))))) is closed


def test_a_topic_that_was_re_created_has_a_boundary_of_its_own() -> None:
    old = entry(state=State.OPEN, version=0, boundary=Boundary(topic_id="t0", ends={0: 900}))
    found = survey(SUM, inputs_with(entries=seen(old)))
    assert found.taken == {FIRST: Boundary(topic_id="t1", ends={0: 10})}
    assert due(found) == {FIRST.name: "closed"}


def test_an_empty_lake_has_no_slices() -> None:
    found = survey(SUM, inputs_with(first_ms=None))
    assert (found.due, found.taken, found.tide_line_ms) == ((), {}, None)


def test_a_weekend_without_runs_is_due_at_once() -> None:
    found = survey(SUM, inputs_with(48 * 60 * MINUTE))
    assert len(found.due) == 48 * 60 + 1 <= MAX_SLICES


def test_every_gap_since_the_first_event_is_due() -> None:
    middle = slice_at(SUM, START + 2 * MINUTE)
    found = survey(SUM, inputs_with(4 * MINUTE, headers={middle.name: header(middle)}, entries=seen(entry(middle))))
    assert list(due(found)) == [s.name for s in slices_between(SUM, START, START + 5 * MINUTE) if s != middle]
    assert found.tide_line_ms is None


@pytest.mark.parametrize(
    ("state", "version", "reason"),
    [
        (State.FINAL, 1, None),
        (State.RECOMPUTING, 2, "unfinished: closed"),
        (State.AUDITING, 2, "unfinished: closed"),
        (State.REOPENED, 2, "unfinished: closed"),
        (State.BLOCKED, 2, None),
        # The run had published before it failed: the header wins.
        (State.AUDITING, 1, None),
    ],
)
def test_a_final_slice_is_due_again_if_a_run_left_it_unfinished(state: State, version: int, reason: str | None) -> None:
    line = entry(state=state, version=version)
    found = survey(SUM, inputs_with(headers={FIRST.name: header()}, entries=seen(line)))
    assert due(found).get(FIRST.name) == reason
    assert (FIRST.name in found.unannounced) is (state is State.AUDITING and version == 1)


def test_a_header_that_the_ledger_does_not_know_is_unannounced() -> None:
    assert survey(SUM, inputs_with(headers={FIRST.name: header()})).unannounced == (FIRST.name,)
    told = inputs_with(headers={FIRST.name: header(version=2)}, entries=seen(entry(version=1)))
    assert survey(SUM, told).unannounced == (FIRST.name,)


def test_a_final_line_has_checks_and_page_of_its_own_run_alone() -> None:
    judged = entry(state=State.AUDITING, docs="quality/r1.html", late=3)
    own = reconciled(header(), judged)
    assert (own.docs, own.checks, own.late) == ("quality/r1.html", SUM.checks_fingerprint, 3)
    for other in (replace(judged, run="r2"), replace(judged, version=2)):
        line = reconciled(header(), other)
        assert (line.docs, line.checks, line.late, line.boundary) == (None, None, 0, judged.boundary)


@pytest.mark.parametrize(("late", "reopened"), [(10, False), (11, True)])
def test_more_late_events_than_the_share_reopen(late: int, reopened: bool) -> None:
    found = survey(SUM, inputs_with(headers={FIRST.name: header()}, entries=seen(entry()), late={FIRST.name: late}))
    assert due(found) == ({FIRST.name: "11 late events"} if reopened else {})


def test_more_late_events_than_the_rows_reopen_and_they_add_up() -> None:
    big = {"headers": {FIRST.name: header(events=10_000_000)}}
    assert due(survey(SUM, inputs_with(**big, entries=seen(entry(late=600)), late={FIRST.name: 400}))) == {}
    assert due(survey(SUM, inputs_with(**big, entries=seen(entry(late=600)), late={FIRST.name: 401}))) != {}


def test_a_blocked_slice_waits_for_something_new() -> None:
    blocked = entry(state=State.BLOCKED)
    assert due(survey(SUM, inputs_with(entries=seen(blocked)))) == {}
    assert survey(SUM, inputs_with(entries=seen(blocked))).blocked == (FIRST,)
    more = survey(SUM, inputs_with(entries=seen(replace(blocked, late=3)), late={FIRST.name: 1}))
    assert due(more) == {FIRST.name: "blocked, and 4 events came since"}
    counted_before = survey(SUM, inputs_with(entries=seen(replace(blocked, late=3))))
    assert due(counted_before) == {FIRST.name: "blocked, and 3 events came since"}
    # It stays blocked while single events come in, so that a person can examine it.
    assert due(survey(SUM, inputs_with(entries=seen(replace(blocked, events=1000, late=10))))) == {}
    assert due(survey(SUM, inputs_with(entries=seen(replace(blocked, events=1000, late=11))))) != {}


@pytest.mark.parametrize(
    "changed",
    [
        replace(SUM, watermark_delay_seconds=7),
        replace(SUM, checks=()),
        replace(SUM, checks=tuple(replace(check, severity=Severity.WARNING) for check in SUM.checks)),
        replace(SUM, counts=None),
    ],
)
def test_a_blocked_slice_is_tried_again_when_its_definition_changes(changed: Pipeline) -> None:
    found = survey(changed, inputs_with(entries=seen(entry(state=State.BLOCKED))))
    assert due(found) == {FIRST.name: "blocked, and its definition has changed"}
    restated = inputs_with(headers={FIRST.name: header()}, entries=seen(entry(state=State.BLOCKED, version=2)))
    assert due(survey(changed, restated)) == {FIRST.name: "blocked, and its definition has changed"}
    assert due(survey(SUM, restated)) == {}


def test_nothing_is_restated_before_anything_was_landed() -> None:
    """Otherwise every slice from there on would be due."""
    early = slice_at(SUM, START - 365 * 24 * 60 * MINUTE)
    found = survey(SUM, inputs_with(), Request(slices=(early, FIRST), reason="a typing error"))
    assert found.refused == {early: "no event of it or of an earlier slice was ever landed"}
    assert [item.slice for item in found.due] == [FIRST]


def test_of_days_that_are_whole_only_news_takes_a_slice() -> None:
    next_day = slice_at(SUM, START - START % DAY_MS + DAY_MS)
    later = inputs_with(
        next_day.end_ms - FIRST.end_ms, days={next_day.name[:8]}, headers={FIRST.name: header(events=1)}
    )
    later = replace(later, entries=seen(entry()), not_settled=())
    assert due(survey(SUM, later)) == {next_day.name: "closed"}
    assert due(survey(SUM, replace(later, late={FIRST.name: 5})))[FIRST.name] == "5 late events"
    assert set(due(survey(SUM, later, Request(slices=(FIRST,), reason="a test")))) == {FIRST.name}
    begun = replace(later, entries=seen(entry(state=State.REOPENED, version=2)), left={FIRST.name})
    assert due(survey(SUM, begun))[FIRST.name] == "unfinished: closed"


def test_events_that_came_in_time_reopen_whatever_the_threshold() -> None:
    big = {"headers": {FIRST.name: header(events=10_000_000)}}
    one = inputs_with(**big, entries=seen(entry()), late={FIRST.name: 2}, in_time={FIRST.name: 1})
    assert due(survey(SUM, one)) == {FIRST.name: "1 missing events that had arrived in time"}
    assert due(survey(SUM, inputs_with(**big, entries=seen(entry(late=2, in_time=1))))) != {}
    assert due(survey(SUM, inputs_with(**big, entries=seen(entry(late=2))))) == {}
    # A ledger line of an older version: events in time are not yet counted separately.
    assert due(survey(SUM, inputs_with(**big, entries=seen(entry(late=2, in_time=None))))) == {}


def test_a_blocked_slice_is_tried_again_with_what_came_in_time() -> None:
    blocked = entry(state=State.BLOCKED, events=1000)
    found = survey(SUM, inputs_with(entries=seen(replace(blocked, late=1, in_time=1))))
    assert due(found) == {FIRST.name: "blocked, and 1 events came since"}


def test_a_slice_that_was_made_final_too_early_waits_until_it_is_over() -> None:
    news: dict[str, Any] = {"late": {FIRST.name: 500}, "in_time": {FIRST.name: 500}}
    hasty = {"headers": {FIRST.name: header()}, "entries": seen(entry(state=State.REOPENED, version=2)), **news}
    assert due(survey(SUM, inputs_with(-1, **hasty, left=[FIRST.name]))) == {}
    assert due(survey(SUM, inputs_with(0, **hasty, left=[FIRST.name]))) != {}


def test_in_time_is_what_arrived_before_the_slice_was_over_by_one_clock() -> None:
    assert is_in_time(SUM, FIRST, FIRST.end_ms + 59_999)
    assert not is_in_time(SUM, FIRST, FIRST.end_ms + 60_000)
    assert is_in_time(SLIDING, FIRST, FIRST.end_ms + 60_749)


def test_a_line_that_does_not_tell_them_apart_stays_one() -> None:
    assert with_late(entry(late=2, in_time=1), 3, 7, in_time=2) == entry(late=5, in_time=3, at_ms=7)
    assert with_late(entry(late=2, in_time=None), 3, 7, in_time=2) == entry(late=5, in_time=None, at_ms=7)


def test_a_definition_that_changed_makes_outdated_and_nothing_due() -> None:
    old = inputs_with(headers={FIRST.name: header(fingerprint="another")}, entries=seen(entry()))
    found = survey(SUM, old)
    assert (found.outdated, due(found)) == ((FIRST,), {})


def test_a_request_takes_exactly_what_it_names() -> None:
    several = inputs_with(2 * MINUTE, headers={FIRST.name: header(version=3)}, entries=seen(entry(version=3)))
    found = survey(SUM, several, Request(slices=(FIRST,), reason="a test"))
    assert [(item.slice, item.version, item.reason) for item in found.due] == [(FIRST, 3, "a test")]
    assert set(found.taken) == {SECOND, slice_at(SUM, START + 2 * MINUTE)}, "boundaries are taken for all the same"


def test_what_is_not_closed_is_refused_with_its_reason() -> None:
    later = slice_at(SUM, START + 10 * MINUTE)
    found = survey(SUM, inputs_with(), Request(slices=(later,), reason="a test"))
    assert (due(found), found.refused[later]) == ({}, "it is not over: events for it are in time for 600 s more")
    behind = survey(SUM, inputs_with(landed={0: 9}), Request(slices=(FIRST,), reason="a test"))
    assert behind.refused == {FIRST: "ingest has not landed partition 0: 1 offsets yet"}
