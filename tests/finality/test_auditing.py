"""The audit of a run on its own files, also where nothing was staged."""

import time
from collections import Counter
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jobs import session
from jobs.broker import clock
from jobs.cli import drivers
from jobs.control.incident import blocked_key
from jobs.control.incidents import Incidents
from jobs.finality import auditing, publishing
from jobs.finality.run.folder import RunFolder
from jobs.finality.run.tries import StagedSlice, Try
from jobs.lake.columns import columns_of
from jobs.lake.final import INPUTS, FinalTable
from jobs.lake.ledger import Ledger
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.publication import Publication
from jobs.lake.slices import State, with_late
from jobs.pipelines import PIPELINES
from jobs.pipelines.layout import INCIDENTS
from jobs.pipelines.slices import slice_named
from jobs.refusal import Refusal
from jobs.settings import Settings
from jobs.storage.documents import Documents
from jobs.storage.parquet import write
from tests.lake import test_final as finals
from tests.lake import test_ledger_kept as ledgers
from tests.lake.test_ledger_kept import DAY_MS, NOW_MS

SUM = PIPELINES["rolling_sum"]
EMPTY = "20261119T000100Z"


def plan(lake: Path, *slices: str) -> RunFolder:
    """A run on empty slices."""
    folder = RunFolder.of(PipelineLake(lake, SUM), "r")
    folder.begin(finals.plan_of("r", *(finals.work_of(name, events=0) for name in slices)))
    folder.keep_staged(dict.fromkeys(slices, StagedSlice()))
    return folder


def test_a_source_that_has_gone_silent_is_a_warning_with_a_page(tmp_path: Path) -> None:
    finals.publish(tmp_path, 1)
    folder = plan(tmp_path, EMPTY)
    verdict = auditing.examine(PipelineLake(tmp_path, SUM), "r", now_ms=NOW_MS)[EMPTY]
    assert verdict.passed
    assert verdict.sentence == "rule 'rows are at least 1/10 of the usual number' failed: rows=0, usual number=1"
    assert (folder.verdicts() or {})[EMPTY]["passed"]
    ledger = Ledger.read(tmp_path, SUM)
    assert ledger is not None
    assert verdict.failures[0].expectation in (tmp_path / str(ledger.newest([EMPTY])[EMPTY].docs)).read_text()


def test_empty_slices_pass_where_nothing_is_usual_yet(tmp_path: Path) -> None:
    plan(tmp_path, EMPTY)
    assert auditing.examine(PipelineLake(tmp_path, SUM), "r", now_ms=NOW_MS)[EMPTY].failures == ()


@pytest.mark.parametrize("blocked", [False, True])
def test_late_events_that_another_plan_has_counted_stay_counted(tmp_path: Path, blocked: bool) -> None:
    folder, ledger = plan(tmp_path, EMPTY), Ledger.open(tmp_path, SUM)
    planned = folder.plan()
    line = planned.line(planned.work[0], State.RECOMPUTING, at_ms=1)
    ledger.append([line])
    ledger.append([with_late(line, 5, 2)])
    if blocked:
        # As if the job had read an event that was not accepted.
        folder.keep_staged({EMPTY: StagedSlice(read=1)})
    assert auditing.examine(PipelineLake(tmp_path, SUM), "r", now_ms=NOW_MS)[EMPTY].passed is not blocked
    newest = Ledger.open(tmp_path, SUM).newest([EMPTY])[EMPTY]
    assert newest.state is (State.BLOCKED if blocked else State.AUDITING)
    assert newest.late == 5


WORDS = PIPELINES["word_count"]
FULL = "20261119T000000Z"


def staged_words(lake: Path, *, there: int, said: int, inputs: int) -> RunFolder:
    """A run of `word_count` on a slice of three lines, which hold five words."""
    folder = RunFolder.of(PipelineLake(lake, WORDS), "r")
    plan = replace(finals.plan_of("r", finals.work_of(FULL, events=3)), pipeline=WORDS.name)
    folder.begin(plan)
    own = Try.begin(folder.path, [FULL])
    start = slice_named(WORDS, FULL).start
    rows = [
        {"window_start": start, "window_end": start + timedelta(minutes=1), "word": f"w{number}", "occurrences": 1}
        | {INPUTS: inputs if number == 0 else 1}
        for number in range(there)
    ]
    schema = pa.schema([*columns_of(WORDS), pa.field(INPUTS, pa.int64())])
    write(pa.Table.from_pylist(rows, schema), own.stage / f"slice={FULL}" / "0.parquet")
    files = (f"{own.stage.name}/slice={FULL}/0.parquet",)
    own.write_result({FULL: StagedSlice(read=3, expected=5, rows=said, files=files)})
    folder.keep_staged(own.result())
    return folder


def test_a_stage_that_has_lost_rows_is_not_judged(tmp_path: Path) -> None:
    folder = staged_words(tmp_path, there=1, said=5, inputs=1)
    with pytest.raises(Refusal, match=f"slice {FULL} has 1 of its 5 staged rows in "):
        auditing.examine(PipelineLake(tmp_path, WORDS), "r", now_ms=NOW_MS)
    assert folder.verdicts() is None


@pytest.mark.parametrize(("there", "inputs", "passes"), [(5, 1, True), (4, 2, True), (4, 1, False), (0, 0, False)])
def test_words_that_were_lost_on_the_way_are_noticed(tmp_path: Path, there: int, inputs: int, passes: bool) -> None:
    """An event makes many words or none, so the expected number comes from another query plan than the rows."""
    staged_words(tmp_path, there=there, said=there, inputs=inputs)
    verdict = auditing.examine(PipelineLake(tmp_path, WORDS), "r", now_ms=NOW_MS)[FULL]
    assert verdict.passed is passes, verdict.sentence
    if not passes:
        assert f"rows in windows={there}, expected=5" in verdict.sentence


def test_a_slice_that_could_not_be_computed_is_blocked_and_cannot_be_approved(tmp_path: Path) -> None:
    folder = RunFolder.of(PipelineLake(tmp_path, SUM), "r")
    folder.begin(finals.plan_of("r", *(finals.work_of(name, events=0) for name in (FULL, EMPTY))))
    folder.keep_staged({EMPTY: StagedSlice()}, {FULL: "ARITHMETIC_OVERFLOW in sum"})
    verdicts = auditing.examine(PipelineLake(tmp_path, SUM), "r", now_ms=NOW_MS)
    assert {name: verdict.passed for name, verdict in verdicts.items()} == {FULL: False, EMPTY: True}
    line = Ledger.open(tmp_path, SUM).newest([FULL])[FULL]
    assert (line.state, line.reason) == (
        State.BLOCKED,
        "rule 'the slice can be computed' failed: ARITHMETIC_OVERFLOW in sum",
    )
    (incident,) = Incidents.of(tmp_path).still_open(blocked_key(SUM.name, ""))
    assert FULL in incident.key
    assert "ARITHMETIC_OVERFLOW" in incident.text
    settings = replace(Settings.from_env({}), lake_root=tmp_path)
    with pytest.raises(Refusal, match=f"slice {FULL} was not computed in run 'r', so there is nothing to publish"):
        publishing.publish(PipelineLake(settings.lake_root, SUM), settings.kafka, "r", {FULL: "somebody"}, now_ms=0)


def test_slices_that_were_not_tried_are_left_alone(tmp_path: Path) -> None:
    folder = RunFolder.of(PipelineLake(tmp_path, SUM), "r")
    folder.begin(finals.plan_of("r", *(finals.work_of(name, events=0) for name in (FULL, EMPTY))))
    folder.keep_staged({EMPTY: StagedSlice()})
    assert set(auditing.examine(PipelineLake(tmp_path, SUM), "r", now_ms=NOW_MS)) == {EMPTY}
    assert set(folder.verdicts() or {}) == {EMPTY}


def test_of_a_run_that_only_tells_nothing_is_judged(tmp_path: Path) -> None:
    folder = plan(tmp_path)
    assert auditing.examine(PipelineLake(tmp_path, SUM), "r", now_ms=NOW_MS) == {}
    assert folder.verdicts() == {}


# -- The broker's time --


def test_an_audit_on_a_machine_of_the_future_takes_no_line_out_of_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines are removed by their age, and the newest line gives the time."""
    real = time.time()
    monkeypatch.setattr(time, "time", lambda: real + 500 * DAY_MS / 1000)
    ledger = Ledger.open(tmp_path, ledgers.PIPELINE)
    ledgers.write(ledger, 5, *ledgers.ALL)
    first, second = (slice_.name for slice_ in ledgers.slices(1)[:2])
    folder = plan(tmp_path, first, second)
    # As if the job had read an event that was not accepted: this slice is blocked.
    folder.keep_staged({first: StagedSlice(), second: StagedSlice(read=1)})
    auditing.examine(PipelineLake(tmp_path, ledgers.PIPELINE), "r", now_ms=NOW_MS)
    ledger = Ledger.open(tmp_path, ledgers.PIPELINE)
    ledgers.turn(ledger)
    assert ledgers.lines(ledger) == {5: 5 * ledgers.HOURLY, 1: 3}
    states = {line.state: line.at_ms for line in ledger.history(second)}
    assert states == {State.AUDITING: NOW_MS, State.BLOCKED: NOW_MS}


def test_the_command_asks_the_broker_unless_its_task_has_done_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setenv("LAKE_ROOT", str(tmp_path))
    monkeypatch.setattr(session, "opened", lambda *_: nullcontext())
    monkeypatch.setattr(clock, "broker_now_ms", lambda _: 7)
    monkeypatch.setattr(auditing, "examine", lambda *_, now_ms, **__: seen.append(now_ms))
    drivers.audit(SUM.name, "r")
    drivers.audit(SUM.name, "r", now_ms=8)
    assert seen == [7, 8]


# -- Work that does not grow with age --


def test_of_an_idle_pipeline_the_audit_opens_a_few_days_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its slices are empty, so none of them shows a usual number of rows."""
    final = FinalTable.open(tmp_path, SUM)
    for days in range(40):
        slice_ = ledgers.slices(days + 1)[0]
        header = replace(finals.header(finals.FIRST, 1), slice=slice_.name, rows=0)
        final.publish([Publication(header=header, files=())])
    opened = Counter[str]()
    headers = FinalTable.headers

    def counted(table: FinalTable, days: Collection[str] | None = None) -> dict[str, Any]:
        opened.update(table.days() if days is None else days)
        return headers(table, days)

    monkeypatch.setattr(FinalTable, "headers", counted)
    plan(tmp_path, EMPTY)
    assert auditing.examine(PipelineLake(tmp_path, SUM), "r", now_ms=NOW_MS)[EMPTY].failures == ()
    assert sorted(opened) == final.days()[-14:]
    assert set(opened.values()) == {1}


def test_the_incidents_of_all_blocked_slices_take_one_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slices = [f"20261119T00{minute:02d}00Z" for minute in range(20)]
    folder = plan(tmp_path, *slices)
    folder.keep_staged(dict.fromkeys(slices, StagedSlice(read=1)))
    listed = Counter[str]()
    names = Documents.names

    def counted(documents: Documents) -> list[str]:
        listed[Path(str(documents._place)).name] += 1
        return names(documents)

    monkeypatch.setattr(Documents, "names", counted)
    auditing.examine(PipelineLake(tmp_path, SUM), "r", now_ms=NOW_MS)
    assert listed[Path(INCIDENTS).name] == 1
    found = Incidents.of(tmp_path).still_open(blocked_key(SUM.name, ""))
    assert {incident.key for incident in found} == {blocked_key(SUM.name, name) for name in slices}
