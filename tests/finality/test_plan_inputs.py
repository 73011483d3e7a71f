"""A plan that reads few days finds the same as a plan that reads all. Tables are real, the topic's ends are given."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jobs.finality import plan_inputs
from jobs.finality.due import PlanInputs, Request, SliceSurvey, survey
from jobs.finality.late import count_late
from jobs.finality.plan_inputs import PlanSnapshot, read_inputs
from jobs.finality.run.folder import RunFolder
from jobs.lake.events import Landed
from jobs.lake.final import FinalTable
from jobs.lake.ledger import LateCountPosition, Ledger
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.publication import Publication
from jobs.lake.slices import State
from jobs.pipelines import PIPELINES
from jobs.pipelines.days import DAY_MS, day_of
from jobs.pipelines.slices import Slice, slices_between
from tests.lake.test_events import land
from tests.lake.test_final import entry, header, plan_of, work_of

DAYS = 30
# Four slices a day. With this horizon a plan reads the last two days and today.
SUM = replace(
    PIPELINES["rolling_sum"],
    slice_seconds=6 * 3600,
    source=replace(PIPELINES["rolling_sum"].source, horizon_hours=24),
)
MIDNIGHT = 1_893_456_000_000
BEGIN = MIDNIGHT - DAYS * DAY_MS + 6 * 3_600_000
NOW = MIDNIGHT + 11 * 3_600_000
SLICES = slices_between(SUM, BEGIN, MIDNIGHT + 6 * 3_600_000)
TOPIC = SimpleNamespace(topic_id="t1", earliest={0: 0}, latest={0: 1_000})


def event(time_ms: int, offset: int) -> dict[str, Any]:
    at = datetime.fromtimestamp(time_ms / 1000, UTC)
    times = {"event_time": at, "arrival_time": datetime.fromtimestamp(NOW / 1000, UTC), "hour": f"{at:%Y-%m-%dT%H}"}
    return {**times, "topic": "numbers", "partition": 0, "offset": offset, "key": "k", "id": 1, "value": Decimal(1)}


def make_lake(lake: Path, final: Collection[Slice], states: Mapping[Slice, State], late: Collection[Slice]) -> None:
    """Final slices without rows, a line of the ledger for each slice with a state, and events that came just now."""
    made = replace(header(SLICES[0], 0), version=1, slice_seconds=SUM.slice_seconds, rows=0, events=9)
    headers = [replace(made, slice=slice_.name, as_of_ms=slice_.end_ms) for slice_ in final]
    if headers:
        FinalTable.open(lake, SUM).publish([Publication(header=each, files=()) for each in headers])
    runs = {True: "run-0", False: "another"}
    lines = [replace(entry(1, state), slice=s.name, run=runs[state is State.FINAL]) for s, state in states.items()]
    Ledger.open(lake, SUM).append(lines, counted=LateCountPosition(topic_id="t1", ends={0: 10}))
    land(lake, [event(BEGIN, 9)], *([event(s.start_ms, 20 + at)] for at, s in enumerate(sorted(late))))


def read_few(lake: Path, request: Request | None) -> tuple[PlanSnapshot, FinalTable]:
    tables = PipelineLake(lake, SUM)
    final, ledger = tables.open_final(), tables.open_ledger()
    return read_inputs(tables, None, final, ledger, request, lambda: NOW), final  # type: ignore[arg-type]


def read_all(lake: Path, request: Request | None) -> SliceSurvey:
    """The same survey, made from every header and every ledger line."""
    headers, landed = FinalTable.open(lake, SUM).headers(), Landed.at(lake, SUM.source)
    ledger = Ledger.open(lake, SUM)
    assert landed is not None
    ends = landed.ends("numbers", "t1")
    inputs = PlanInputs(
        now_ms=NOW,
        first_ms=BEGIN,
        topic=plan_inputs.topic_of(None, SUM.source),  # type: ignore[arg-type]
        landed=ends,
        headers=headers,
        entries=ledger.newest_of(ledger.days()),
    )
    last = LateCountPosition(topic_id="t1", ends={0: 10})
    inputs, _ = count_late(SUM, landed, last, inputs, ends, max(headers, default=None), lambda _days: headers)
    return survey(SUM, inputs, request)


def found(surveyed: SliceSurvey) -> dict[str, Any]:
    return {name: getattr(surveyed, name) for name in ("due", "waiting", "taken", "refused", "unannounced")}


@pytest.fixture(autouse=True)
def _topic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_inputs, "require", lambda _client, names: dict.fromkeys(names, TOPIC))


def is_recent(slice_: Slice) -> bool:
    return slice_.end_ms > NOW - 2 * DAY_MS


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(gaps=set(), odd=dict.fromkeys(SLICES, State.BLOCKED), late=set(), asked=None)
@given(
    gaps=st.sets(st.sampled_from(SLICES), max_size=4),
    odd=st.dictionaries(st.sampled_from(SLICES), st.sampled_from([State.BLOCKED, State.AUDITING, State.OPEN])),
    late=st.sets(st.sampled_from(SLICES), max_size=3),
    asked=st.none() | st.sets(st.sampled_from(SLICES), min_size=1, max_size=2),
)
def test_few_days_say_what_all_say(
    tmp_path_factory: pytest.TempPathFactory,
    gaps: set[Slice],
    odd: dict[Slice, State],
    late: set[Slice],
    asked: set[Slice] | None,
) -> None:
    lake = tmp_path_factory.mktemp("lake")
    # Old slices with a header are final in the ledger, too; slices without one may have any state.
    states = {s: odd[s] if s in odd and (s in gaps or is_recent(s)) else State.FINAL for s in SLICES}
    lines = {s: state for s, state in states.items() if s not in gaps or state is not State.FINAL}
    make_lake(lake, [s for s in SLICES if s not in gaps], lines, late)
    request = Request(slices=tuple(sorted(asked)), reason="asked") if asked else None
    snapshot, _ = read_few(lake, request)
    few = survey(SUM, snapshot.inputs, request)
    assert found(few) == found(read_all(lake, request))
    last = next((s.start_ms for s in SLICES if s in gaps), SLICES[-1].end_ms)
    assert few.tide_line_ms == (last if last > SLICES[0].start_ms else None)


def days_read(final: FinalTable) -> set[str]:
    return {file.partition("headers-")[2][:8] for file in final._read}


def test_of_a_month_four_days_are_opened_and_those_of_which_there_is_news(tmp_path: Path) -> None:
    """The first day, since the history begins there; the last two days; and today."""
    blocked, late, left = SLICES[20], SLICES[40], SLICES[60]
    final = [s for s in SLICES if s != blocked]
    make_lake(tmp_path, final, dict.fromkeys(final, State.FINAL) | {blocked: State.BLOCKED}, [])
    always = {day_of(at) for at in (BEGIN, NOW - 2 * DAY_MS, NOW - DAY_MS, NOW)}
    _, opened = read_few(tmp_path, None)
    assert days_read(opened) == always | {blocked.name[:8]}
    land(tmp_path, [event(late.start_ms, 30)], batch=1)
    RunFolder.of(PipelineLake(tmp_path, SUM), "died").begin(plan_of("died", work_of(left.name)))
    asked = Request(slices=(SLICES[80],), reason="asked")
    snapshot, opened = read_few(tmp_path, asked)
    assert days_read(opened) == always | {s.name[:8] for s in (blocked, late, left, SLICES[80])}
    assert survey(SUM, snapshot.inputs).due[0].slice == left or snapshot.inputs.left == {left.name}


def test_an_old_slice_whose_publish_was_not_announced_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's folder may be gone. The slice is found because the day's file of headers was written lately."""
    make_lake(tmp_path, SLICES, dict.fromkeys(SLICES[1:], State.FINAL), [])
    monkeypatch.setattr(plan_inputs, "settled_before_ms", lambda *_: 0)
    snapshot, _ = read_few(tmp_path, None)
    assert survey(SUM, snapshot.inputs).unannounced == (SLICES[0].name,)
