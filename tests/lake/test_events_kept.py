"""Old events: whole hours of them are removed, but none that a slice may still be computed from or compared with."""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from jobs.control.epochs import Receipt
from jobs.control.events_needed import EVENTS_NEEDED, first_needed_ms, needed_from, read_needed_from, write_needed_from
from jobs.control.folder import Control
from jobs.control.lease import Lease
from jobs.finality.account_inputs import accounted_to
from jobs.finality.due import PlanInputs, Request, needed_from_ms, survey
from jobs.finality.planning import outdated
from jobs.finality.tide_line import begin_and_tide_line
from jobs.lake import event_hours
from jobs.lake import stream_tables as tables
from jobs.lake.delta.fenced import OvertakenError
from jobs.lake.delta.manifest import Manifest
from jobs.lake.delta.reading import files_with_sizes, value_of
from jobs.lake.event_hours import KeptEvents
from jobs.lake.events import Landed
from jobs.lake.final import FinalTable
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.publication import Publication
from jobs.lake.stream_tables import Note, Ranges, TableWriter, last_note
from jobs.pipelines import PIPELINES
from jobs.pipelines.days import tide_line
from jobs.pipelines.layout import HOUR_MS
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import CLOCK_SKEW_MS, Slice, slice_at, slices_between
from jobs.pipelines.window import Window
from jobs.refusal import Refusal
from jobs.streaming import ingest
from tests.finality.test_due import header, inputs_with
from tests.query.test_query import EVENTS

DAY_MS = 24 * HOUR_MS
NOON_MS = round(datetime(2026, 5, 20, 12, tzinfo=UTC).timestamp() * 1000)
SOURCE = replace(
    PIPELINES["rolling_sum"].source,
    horizon_hours=20,
    longest_outage_hours=1,
    retention_hours=2,
    events_kept_days=2,
)
KEPT = timedelta(days=SOURCE.events_kept_days)


def pipeline(name: str = "rolling_sum", **changes: object) -> Pipeline:
    return replace(PIPELINES["rolling_sum"], name=name, source=SOURCE, **changes)  # type: ignore[arg-type]


def hour_of(time_ms: int) -> str:
    return f"{datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%dT%H}"


@dataclass
class Events:
    """The table of a source, and the time from which its events are needed."""

    lake: Path
    batch: int = 0
    needed_ms: int = 2**62
    writer: TableWriter = field(init=False)

    def __post_init__(self) -> None:
        self.writer = TableWriter.open(self.lake / SOURCE.events_table, EVENTS, "hour", epoch=1)

    def land(self, *times_ms: int, now_ms: int = NOON_MS) -> None:
        """Land one micro-batch with an event at each of these times; all of them arrive now."""
        stage = self.writer.new_stage()
        schema = EVENTS.remove(EVENTS.get_field_index("hour"))
        for hour in {hour_of(time_ms) for time_ms in times_ms}:
            rows = [
                {"event_time": moment(t), "arrival_time": moment(now_ms), "topic": "numbers", "offset": t}
                for t in times_ms
                if hour_of(t) == hour
            ]
            file = stage / f"hour={hour}" / "0.parquet"
            file.parent.mkdir(parents=True)
            pq.write_table(pa.Table.from_pylist(rows, schema), file)
        self.writer.commit(Manifest.of(stage), self.note())
        self.batch += 1

    def note(self) -> Note:
        topics = {"numbers": Ranges(topic_id="t1", offsets={0: (0, self.batch + 1)})}
        return Note(job="ingest", write_id="w", batch=self.batch, epoch=1, cluster_id="c", topics=topics)

    def remove_old(self) -> None:
        self.writer.remove_old_events(KeptEvents(kept=KEPT, needed_from_ms=lambda: self.needed_ms))

    @property
    def hours(self) -> set[str]:
        path = self.lake / SOURCE.events_table
        return {value_of(file) for file in files_with_sizes(DeltaTable(path))}

    @property
    def from_ms(self) -> int:
        landed = Landed.at(self.lake, SOURCE)
        assert landed
        return landed.events_from_ms


def moment(time_ms: int) -> datetime:
    return datetime.fromtimestamp(time_ms / 1000, UTC)


@pytest.fixture
def events(tmp_path: Path) -> Events:
    return Events(tmp_path)


def test_hours_that_are_older_than_is_kept_go_at_once_and_the_version_says_so(events: Events) -> None:
    old = [NOON_MS - 3 * DAY_MS, NOON_MS - 2 * DAY_MS - 1]
    young = [NOON_MS - 2 * DAY_MS, NOON_MS - 1]
    events.land(*old, *young)
    before = events.writer.version
    events.remove_old()
    assert events.hours == {hour_of(time) for time in young}
    assert (events.writer.version, events.from_ms) == (before + 1, NOON_MS - 2 * DAY_MS)
    events.remove_old()
    assert events.writer.version == before + 1, "nothing more is old"
    then = Landed.at(events.lake, SOURCE, before)
    assert then
    assert (then.events_from_ms, then.first_ms()) == (0, old[0]), "who has pinned the version before reads it as it was"


def test_what_was_removed_is_handed_on_by_all_that_the_writer_says(events: Events) -> None:
    events.land(NOON_MS - 3 * DAY_MS, NOON_MS)
    events.remove_old()
    removed_before = events.from_ms
    assert removed_before
    events.land(NOON_MS)
    events.land(NOON_MS)
    assert events.writer.note
    events.writer.merge_small_files(events.writer.note.to_json())
    assert events.from_ms == removed_before
    again = Events(events.lake, batch=events.batch)
    again.writer.reset(replace(again.note(), batch=None), clear=False)
    assert events.from_ms == removed_before
    again.land(NOON_MS)
    assert events.from_ms == removed_before


def test_events_that_somebody_needs_stay_and_so_does_all_that_came_later(events: Events) -> None:
    hours = [NOON_MS - days * DAY_MS for days in (5, 4, 3)]
    events.land(*hours, NOON_MS)
    events.needed_ms = hours[1]
    events.remove_old()
    assert events.hours == {hour_of(time) for time in (*hours[1:], NOON_MS)}


@pytest.mark.parametrize("ahead", ["machine", "broker"])
def test_one_clock_that_is_wrong_removes_nothing(events: Events, monkeypatch: pytest.MonkeyPatch, ahead: str) -> None:
    year_ms = 365 * DAY_MS
    monkeypatch.setattr(tables, "_now", lambda: moment(NOON_MS + (year_ms if ahead == "machine" else 0)))
    events.land(NOON_MS, now_ms=NOON_MS + (year_ms if ahead == "broker" else 0))
    events.remove_old()
    assert events.hours == {hour_of(NOON_MS)}


def test_a_table_without_rows_has_nothing_that_is_old(events: Events) -> None:
    events.writer.commit(Manifest.of(events.writer.new_stage()), events.note())
    events.remove_old()
    assert (events.hours, events.from_ms) == (set(), 0)


def test_one_turn_removes_the_oldest_only_and_the_next_goes_on(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_hours, "MOST_FILES", 2)
    old = [NOON_MS - days * DAY_MS for days in (6, 5, 4, 3)]
    events.land(*old, NOON_MS)
    events.remove_old()
    assert (events.hours, events.from_ms) == ({hour_of(t) for t in (*old[2:], NOON_MS)}, old[1] + HOUR_MS)
    events.remove_old()
    assert (events.hours, events.from_ms) == ({hour_of(NOON_MS)}, old[3] + HOUR_MS)


def test_a_writer_that_was_overtaken_removes_nothing(events: Events) -> None:
    events.land(NOON_MS - 3 * DAY_MS, NOON_MS)
    stale = Events(events.lake, batch=1)
    events.land(NOON_MS)
    with pytest.raises(OvertakenError):
        stale.remove_old()
    assert (len(events.hours), events.from_ms) == (2, 0)


def test_ingest_removes_old_events_now_and_then(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", 3)
    kept = ingest._kept(events.lake, replace(SOURCE, events_kept_days=2))
    events.land(NOON_MS - 3 * DAY_MS)
    for _ in range(3):
        events.land(NOON_MS)
        events.writer.maintain(events=kept)
    assert events.hours == {hour_of(NOON_MS)}
    assert events.writer.note == last_note(events.lake / SOURCE.events_table)


# -- The jobs that need them --


def took_lease(lake: Path, job: str) -> None:
    Lease.acquire(Control.of(lake, job), env={}).release(Receipt(time=0.0, clean=True, cause="a test"))


def test_jobs_that_never_ran_need_nothing_and_those_that_did_not_say_it_need_all(tmp_path: Path) -> None:
    one, other = pipeline("one"), replace(PIPELINES["word_count"], name="other")
    asked = lambda: needed_from(tmp_path, SOURCE, [one, other])  # noqa: E731
    assert (asked(), first_needed_ms(asked()) > NOON_MS) == ({}, True)
    took_lease(tmp_path, "recompute_other")
    assert asked() == {}, "it reads another source"
    took_lease(tmp_path, "recompute_one")
    assert asked() == {"recompute_one": 0}
    write_needed_from(tmp_path, "recompute_one", NOON_MS + 1)
    took_lease(tmp_path, "account_one")
    assert asked() == {"recompute_one": NOON_MS, "account_one": 0}
    write_needed_from(tmp_path, "account_one", NOON_MS - DAY_MS)
    assert first_needed_ms(asked()) == NOON_MS - DAY_MS


@pytest.mark.parametrize("content", [b"", b"{}", b'{"from_ms": "soon"}'])
def test_a_torn_word_keeps_everything_until_the_next_one(tmp_path: Path, content: bytes) -> None:
    write_needed_from(tmp_path, "recompute_one", NOON_MS)
    took_lease(tmp_path, "recompute_one")
    (file,) = tmp_path.rglob(EVENTS_NEEDED)
    file.write_bytes(content)
    assert needed_from(tmp_path, SOURCE, [pipeline("one")]) == {"recompute_one": 0}
    write_needed_from(tmp_path, "recompute_one", NOON_MS)
    assert read_needed_from(tmp_path, "recompute_one") == NOON_MS


def inputs(**changes: object) -> PlanInputs:
    return inputs_with(**{"now_ms": NOON_MS, "first_ms": NOON_MS - 3 * DAY_MS, **changes})


def finals(slices: Iterable[Slice]) -> dict[str, object]:
    return {slice_.name: header(slice_) for slice_ in slices}


def test_of_a_lake_of_which_events_were_removed_only_whole_slices_are_due(events: Events) -> None:
    """The first remaining event happened at half past noon."""
    left_ms = NOON_MS - 2 * DAY_MS + HOUR_MS // 2
    events.land(NOON_MS - 3 * DAY_MS, NOON_MS - 2 * DAY_MS - 1, left_ms, NOON_MS)
    session = Window.session(gap_ms=1000, longest_ms=HOUR_MS // 2)
    firsts = {pipeline(): left_ms, pipeline(slice_seconds=86_400): NOON_MS - NOON_MS % DAY_MS - DAY_MS}
    firsts[pipeline(window=session, slice_seconds=3600)] = NOON_MS - 2 * DAY_MS + HOUR_MS
    assert {first_of(events, each) for each in firsts} == {NOON_MS - 3 * DAY_MS}
    events.remove_old()
    assert events.from_ms == NOON_MS - 2 * DAY_MS
    assert {each: first_of(events, each) for each in firsts} == firsts


def first_of(events: Events, of: Pipeline) -> int | None:
    """The time at which a pipeline without final slices would begin."""
    return begin_and_tide_line(of, None, Landed.at(events.lake, SOURCE))[0]


def test_the_tide_line_stays_when_the_first_events_go(events: Events) -> None:
    hours = pipeline(slice_seconds=3600)
    final = FinalTable.open(events.lake, hours)
    some = slices_between(hours, NOON_MS - 3 * DAY_MS, NOON_MS - DAY_MS)
    final.publish([Publication(header=replace(header(s), slice_seconds=3600, rows=0), files=()) for s in some])
    events.land(NOON_MS - 3 * DAY_MS, NOON_MS - DAY_MS - 1, NOON_MS)
    before = begin_and_tide_line(hours, final, Landed.at(events.lake, SOURCE))
    events.remove_old()
    assert events.from_ms
    assert before == (NOON_MS - 3 * DAY_MS, NOON_MS - DAY_MS)
    assert begin_and_tide_line(hours, final, Landed.at(events.lake, SOURCE)) == before


def test_a_gap_that_nobody_can_fill_any_more_holds_no_events_back(events: Events) -> None:
    """A pipeline was off for some days: none of their slices is final, and their first events are gone."""
    hours, end_ms = pipeline(slice_seconds=3600), NOON_MS - NOON_MS % HOUR_MS
    final = FinalTable.open(events.lake, hours)
    before = slices_between(hours, NOON_MS - 6 * DAY_MS, NOON_MS - 5 * DAY_MS)
    since = slices_between(hours, NOON_MS - 2 * DAY_MS, end_ms)
    headers = [replace(header(s), slice_seconds=3600, rows=0) for s in (*before, *since)]
    final.publish([Publication(header=each, files=()) for each in headers])
    events.land(*range(NOON_MS - 6 * DAY_MS, NOON_MS, HOUR_MS))
    assert begin_and_tide_line(hours, final, Landed.at(events.lake, SOURCE))[1] == NOON_MS - 5 * DAY_MS
    events.remove_old()
    first_ms, tide_line_ms = begin_and_tide_line(hours, final, Landed.at(events.lake, SOURCE))
    assert tide_line_ms == end_ms
    seen = inputs(first_ms=first_ms, tide_line_ms=tide_line_ms, headers={each.slice: each for each in headers})
    seen = replace(seen, events_from_ms=events.from_ms)
    oldest_ms = end_ms - SOURCE.horizon_hours * HOUR_MS - HOUR_MS
    assert needed_from_ms(hours, seen, survey(hours, seen), ()) >= oldest_ms


def test_a_slice_whose_events_are_gone_is_refused_and_never_due() -> None:
    hours = pipeline(slice_seconds=3600, window=Window.session(gap_ms=1000, longest_ms=HOUR_MS))
    gone, part, whole = slices_between(hours, NOON_MS - 2 * DAY_MS - 2 * HOUR_MS, NOON_MS - 2 * DAY_MS + HOUR_MS)
    seen = inputs(
        headers=finals((gone, part, whole)),
        # An older definition made them, and each of them misses an event that came in time.
        in_time={slice_.name: 1 for slice_ in (gone, part, whole)},
        late={slice_.name: 1 for slice_ in (gone, part, whole)},
        events_from_ms=part.start_ms,
        first_ms=gone.start_ms,
        days=(),
    )
    scheduled = survey(hours, seen)
    assert [item.slice for item in scheduled.due] == [whole]
    assert scheduled.outdated == (whole,)
    asked = survey(hours, seen, Request(slices=(gone, part, whole), reason="asked"))
    assert [item.slice for item in asked.due] == [whole]
    sentence = "events of 'numbers' before 2026-05-18T11:00:00.000Z were removed: they are kept for events_kept_days=2"
    assert asked.refused == {gone: sentence, part: sentence}


def test_of_slices_that_are_outdated_those_with_events_are_taken_and_none_is_passed_over_alone(events: Events) -> None:
    hours = pipeline(slice_seconds=3600)
    old, young = slice_at(hours, NOON_MS - 3 * DAY_MS), slice_at(hours, NOON_MS - DAY_MS)
    made_before = replace(header(old), slice_seconds=3600, rows=0, fingerprint="before")

    def publish(*slices: Slice) -> None:
        final = FinalTable.open(events.lake, hours)
        final.publish([Publication(header=replace(made_before, slice=s.name), files=()) for s in slices])

    events.land(old.start_ms, NOON_MS)
    publish(old)
    assert outdated(PipelineLake(events.lake, hours)) == (old,)
    events.remove_old()
    with pytest.raises(Refusal, match=r"events of 'numbers' before .* were removed"):
        outdated(PipelineLake(events.lake, hours))
    publish(young)
    assert outdated(PipelineLake(events.lake, hours)) == (young,)


# -- A model: random lakes --


@dataclass
class Scene:
    """A pipeline with random final slices, and accounts of some of them."""

    pipeline: Pipeline
    inputs: PlanInputs
    accounted: set[str]
    blocked: list[str]

    def needed_from_ms(self) -> int:
        """The plain rule: the first event that is needed by a slice that is not done, or that can be reopened."""
        window, first_ms = self.pipeline.window, self.inputs.first_ms
        assert first_ms is not None
        slices = slices_between(self.pipeline, first_ms, NOON_MS + DAY_MS)
        not_final = [s for s in slices if s.name not in self.inputs.headers]
        # All records that had arrived by then are landed.
        oldest_ms = not_final[0].start_ms - CLOCK_SKEW_MS - SOURCE.horizon_hours * HOUR_MS
        can_reopen = [s for s in slices if s.end_ms + window.reach_ms > oldest_ms]
        not_done = [s for s in slices if s.name not in self.accounted or s.name in self.blocked]
        return min(s.start_ms for s in (*not_final, *can_reopen, *not_done)) - window.look_back_ms


def scene(chance: random.Random, name: str, first_ms: int, lake: Path) -> Scene:
    """Make a random pipeline; it states which events it needs, as the plan and the account do."""
    seconds = chance.choice([3600, 7200, 86_400])
    session = Window.session(gap_ms=1000, longest_ms=HOUR_MS)
    window = chance.choice(
        [Window.tumbling(size_ms=1000), Window.sliding(size_ms=7_200_000, slide_ms=3_600_000), session]
    )
    made = pipeline(name, slice_seconds=seconds, window=window)
    some = slices_between(made, first_ms, NOON_MS - chance.randrange(2 * DAY_MS))
    final = {s.name for s in some if chance.random() < chance.choice([1, 0.999, 0.9])}
    accounts_end = chance.choice([*some, None])
    accounted = {name for name in final if accounts_end is None or name < accounts_end.name}
    blocked = [name for name in sorted(final) if chance.random() < 0.01]
    by_day = Counter(name[:8] for name in final)
    tide_line_ms = tide_line(made, first_ms, by_day, lambda day: {name for name in final if name[:8] == day})
    seen = inputs(
        headers={name: header(s) for s in some if (name := s.name) in final},
        first_ms=first_ms,
        tide_line_ms=tide_line_ms,
    )
    surveyed = survey(made, seen)
    write_needed_from(lake, made.recompute_job, needed_from_ms(made, seen, surveyed, blocked))
    from_ms = slice_at(made, first_ms).start_ms
    write_needed_from(lake, made.account_job, accounted_to(made, from_ms, accounted) - window.look_back_ms)
    return Scene(made, seen, accounted, blocked)


@pytest.mark.parametrize("seed", range(40))
def test_nothing_goes_that_a_slice_needs_and_all_goes_that_is_old(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    events, days, now_ms = Events(tmp_path), chance.choice([4, 6, 9]), NOON_MS + chance.randrange(HOUR_MS)
    times = sorted(NOON_MS - chance.randrange(days * DAY_MS) for _ in range(200))
    events.land(*times, now_ms=now_ms)
    scenes = [scene(chance, f"p{number}", times[0], tmp_path) for number in range(chance.randrange(3))]
    pipelines = [one.pipeline for one in scenes]
    events.needed_ms = first_needed_ms(needed_from(tmp_path, SOURCE, [*pipelines, pipeline("never_planned")]))
    events.remove_old()
    needed_ms = min([one.needed_from_ms() for one in scenes], default=NOON_MS)
    bound_ms = min(needed_ms, now_ms - 2 * DAY_MS)
    assert events.hours == {hour_of(time) for time in times if time - time % HOUR_MS + HOUR_MS > bound_ms}
    assert events.from_ms <= bound_ms
