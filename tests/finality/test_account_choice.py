"""Which slices an account compares, and what it asks the stream to remove. Without Spark."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from deltalake import DeltaTable

from jobs.control.epochs import Receipt
from jobs.control.events_needed import read_needed_from
from jobs.control.incident import unexplained_key
from jobs.control.incidents import Incidents
from jobs.control.lease import Lease, LeaseLostError
from jobs.control.writing import writing
from jobs.finality import account
from jobs.lake import stream_tables as tables
from jobs.lake.accounts import Accounts, _DayTable
from jobs.lake.delta.fenced import OvertakenError
from jobs.lake.delta.reading import rows_by_partition
from jobs.lake.ledger import LateCountPosition, Ledger
from jobs.lake.live import Live
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.slices import LedgerLine, State
from jobs.lake.stream_tables import TableWriter
from jobs.pipelines.layout import HOUR_MS
from jobs.pipelines.slices import day_of_slice, slice_at, slices_between
from jobs.pipelines.window import Window
from jobs.refusal import Refusal
from tests.finality.accounts import FIRST, LIVE, PIPELINE, SECOND, THIRD, Made, done, never, two_slices
from tests.judges.naive_stream import T0, Batch, Event, at
from tests.query.test_query import EVENTS

# -- Without Spark: slices that are not compared, and pruning --


@pytest.fixture
def streamed(made: Made, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Three slices with live rows; nothing is final."""
    monkeypatch.setattr(account.session, "opened", never)
    scene = two_slices()
    third = Event(0, 3, THIRD.start_ms, "a", arrival_ms=THIRD.start_ms)
    scene.events, scene.batches = [*scene.events, third], [*scene.batches, Batch({0: (3, 4)}, T0)]
    scene.finals = {slice_.name: {0: 4} for slice_ in (FIRST, SECOND, THIRD)}
    made.land(scene.events)
    for number, batch in enumerate(scene.batches):
        made.stream(number, batch, [row for row in scene.live_rows() if row[-2] == number])
    return made


def prune(made: Made) -> set[str]:
    """Prune as the live job does on the request; the slices that still have rows."""
    writer = TableWriter.open(made.root / made.pipeline.live_table, LIVE, "slice", epoch=1)
    writer.prune((made.asked() or {}).get("slices", ()))
    return Live.at(made.root, made.pipeline).slices()


ALL_SLICES = {FIRST.name, SECOND.name, THIRD.name}


def test_what_is_not_final_is_never_pruned(streamed: Made) -> None:
    streamed.account()
    assert streamed.asked() is None
    streamed.publish(SECOND.name, [], {0: 4})
    done(streamed, (SECOND.name, 1), (FIRST.name, 1))
    streamed.account()
    # The first slice has an account, but is not final, so no later slice may go either.
    assert streamed.asked() is None
    assert prune(streamed) == ALL_SLICES


def test_what_is_not_accounted_for_at_its_version_is_never_pruned(streamed: Made) -> None:
    for slice_ in (FIRST, SECOND, THIRD):
        streamed.publish(slice_.name, [], {0: 4})
    streamed.publish(SECOND.name, [], {0: 4}, version=2)
    done(streamed, (FIRST.name, 1), (SECOND.name, 1), (THIRD.name, 1))
    with pytest.raises(AssertionError, match="started Spark"):
        streamed.account()
    assert streamed.asked() is None
    done(streamed, (SECOND.name, 2))
    streamed.account()
    assert streamed.asked() == {"before": slice_at(PIPELINE, THIRD.end_ms).name, "slices": sorted(ALL_SLICES)}
    batches = rows_by_partition(DeltaTable(streamed.root / "live" / "rolling_sum"))["batches"]
    assert prune(streamed) == set()
    assert rows_by_partition(DeltaTable(streamed.root / "live" / "rolling_sum")) == {"batches": batches}
    assert batches == 4


def test_what_is_young_is_kept(streamed: Made) -> None:
    for slice_ in (FIRST, SECOND, THIRD):
        streamed.publish(slice_.name, [], {0: 4})
    done(streamed, *((name, 1) for name in ALL_SLICES))
    streamed.settings = replace(streamed.settings, live_kept_seconds=10**9)
    streamed.account()
    assert streamed.asked() is None


def test_what_is_young_is_kept_by_a_machine_whose_clock_is_far_ahead(
    streamed: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slice_ in (FIRST, SECOND, THIRD):
        streamed.publish(slice_.name, [], {0: 4})
    done(streamed, *((name, 1) for name in ALL_SLICES))
    now = time.time()
    streamed.settings = replace(streamed.settings, live_kept_seconds=round(now - FIRST.end_ms / 1000) + 3600)
    monkeypatch.setattr(account, "time", SimpleNamespace(time=lambda: now + 500 * 24 * 3600, monotonic=time.monotonic))
    streamed.account()
    assert streamed.asked() is None


def test_a_later_version_of_a_pruned_slice_is_noted_and_not_called_different(streamed: Made) -> None:
    streamed.publish(FIRST.name, [], {0: 4})
    done(streamed, (FIRST.name, 1))
    streamed.account()
    assert streamed.asked() == {"before": SECOND.name, "slices": [FIRST.name]}
    assert prune(streamed) == {SECOND.name, THIRD.name}
    streamed.publish(FIRST.name, [], {0: 4}, version=2)
    streamed.account()
    reason = "its live rows were pruned after the account of an earlier version"
    assert streamed.slices()[1] == (FIRST.name, 2, None, None, None, reason)


def remove_events(made: Made, before_ms: int) -> None:
    events = TableWriter.open(made.root / "events" / "numbers", EVENTS, "hour", epoch=1)
    assert events.note
    events.transact([], replace(events.note, events_from_ms=before_ms).to_json())


def test_a_slice_whose_events_were_removed_is_noted_and_not_called_different(streamed: Made) -> None:
    remove_events(streamed, FIRST.start_ms + 1)
    streamed.publish(FIRST.name, [], {0: 4})
    streamed.account()
    ((_, _, windows, _, _, note_),) = streamed.slices()
    assert (windows, str(note_).partition(" before ")[0]) == (None, "events of 'numbers'")
    assert "were removed: they are kept for events_kept_days=90" in str(note_)


def test_a_slice_that_can_never_be_final_keeps_its_live_rows_and_no_others(streamed: Made) -> None:
    """Events of the first slice were removed before recompute ever ran; those of the second and third were not."""
    remove_events(streamed, SECOND.start_ms)
    streamed.publish(SECOND.name, [], {0: 4})
    done(streamed, (SECOND.name, 1))
    streamed.account()
    assert streamed.asked() == {"before": THIRD.name, "slices": [SECOND.name]}
    assert prune(streamed) == {FIRST.name, THIRD.name}


def test_a_slice_that_can_still_be_final_keeps_all_behind_it(streamed: Made) -> None:
    remove_events(streamed, FIRST.start_ms)
    streamed.publish(SECOND.name, [], {0: 4})
    done(streamed, (SECOND.name, 1))
    streamed.account()
    assert streamed.asked() is None


def test_events_are_needed_until_their_slice_is_final_and_accounted_for(streamed: Made) -> None:
    needed = lambda: read_needed_from(streamed.root, PIPELINE.account_job)  # noqa: E731
    hour_ms = FIRST.start_ms - FIRST.start_ms % HOUR_MS
    for slice_ in (FIRST, THIRD):
        streamed.publish(slice_.name, [], {0: 4})
    done(streamed, (FIRST.name, 1), (THIRD.name, 1))
    streamed.account()
    assert needed() == SECOND.start_ms - SECOND.start_ms % HOUR_MS == hour_ms
    hours = slices_between(PIPELINE, SECOND.start_ms, THIRD.start_ms + HOUR_MS)
    for slice_ in hours:
        if slice_ != THIRD:
            streamed.publish(slice_.name, [], {0: 4})
    done(streamed, *((slice_.name, 1) for slice_ in hours))
    streamed.account()
    assert needed() == hour_ms + HOUR_MS


@pytest.mark.parametrize(
    ("more", "reason"),
    [({"fingerprint": "other"}, "made by another definition"), ({"topic_id": "old"}, "the topic was re-created since")],
)
def test_what_cannot_be_compared_is_noted(streamed: Made, more: dict[str, str], reason: str) -> None:
    streamed.publish(FIRST.name, [], {0: 4}, **more)
    streamed.account()
    ((_, _, windows, _, unexplained_, note_),) = streamed.slices()
    assert (windows, unexplained_) == (None, None)
    assert note_.startswith(reason)


def test_a_slice_whose_batches_are_no_longer_known_is_noted(streamed: Made) -> None:
    """Rows about batches 4 to 8 were removed. Batches of the third slice may have been among them."""
    for slice_ in (FIRST, THIRD):
        streamed.publish(slice_.name, [], {0: 4})
    later = THIRD.start_ms + 3600_000
    streamed.stream(9, Batch({0: (4, 4)}, T0, later), [])
    streamed.account()
    reason = f"rows about micro-batches before {at(later):%FT%TZ} were removed because of their age"
    assert streamed.slices() == [(slice_.name, 1, None, None, None, reason) for slice_ in (FIRST, THIRD)]


def test_a_slice_that_is_younger_than_the_removed_rows_is_compared(streamed: Made) -> None:
    earlier = FIRST.start_ms - 2 * 3600_000
    streamed.stream(9, Batch({0: (4, 4)}, T0, earlier), [])
    streamed.publish(FIRST.name, [], {0: 4})
    with pytest.raises(AssertionError, match="started Spark"):
        streamed.account()


def test_the_request_names_no_slice_whose_rows_are_gone(streamed: Made) -> None:
    """So the request does not grow with the history."""
    for number, slice_ in enumerate((FIRST, SECOND, THIRD)):
        streamed.publish(slice_.name, [], {0: 4})
        done(streamed, (slice_.name, 1))
        streamed.account()
        asked = streamed.asked()
        assert asked is not None
        assert asked["slices"] == [slice_.name], number
        prune(streamed)


def recreated(made: Made, since_ms: int, topic_id: str = "t") -> None:
    """The ledger names this topic, and the time since which events are from it."""
    counted = LateCountPosition(topic_id=topic_id, ends={0: 4}, since_ms=since_ms)
    line = LedgerLine(slice=FIRST.name, state=State.FINAL, at_ms=T0, run="r")
    Ledger.open(made.root, made.pipeline).append([line], counted=counted)


def test_a_slice_that_may_hold_records_of_an_earlier_topic_is_noted(streamed: Made) -> None:
    recreated(streamed, SECOND.start_ms)
    for slice_ in (FIRST, SECOND):
        streamed.publish(slice_.name, [], {0: 4})
    streamed.account()
    reason = "it may hold records of an earlier topic of this name, whose offsets cannot be compared with the new ones"
    assert streamed.slices() == [(slice_.name, 1, None, None, None, reason) for slice_ in (FIRST, SECOND)]


def test_a_slice_that_only_the_topic_of_now_can_reach_is_compared(streamed: Made) -> None:
    # Events may be ahead of their arrival by a minute.
    recreated(streamed, SECOND.start_ms - 1)
    streamed.publish(THIRD.name, [], {0: 4})
    with pytest.raises(AssertionError, match="started Spark"):
        streamed.account()


def test_without_a_live_job_the_ledger_says_that_the_topic_is_another(made: Made) -> None:
    made.land(two_slices().events)
    recreated(made, 0, topic_id="new")
    made.publish(FIRST.name, [], {0: 3})
    made.account()
    ((*_, note_),) = made.slices()
    assert note_.startswith("the topic was re-created since")


def test_it_is_told_before_tables_are_merged(streamed: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed.publish(FIRST.name, [], {0: 4}, fingerprint="other")
    row = {"version": 1, "run": "r", "kind": "slice", "unexplained": 1}
    accounts = Accounts.open(streamed.root, PIPELINE)
    accounts.add(accounts.new_stage(), 0, [{"slice": SECOND.name, **row}])
    monkeypatch.setattr(Accounts, "maintain", never)
    with pytest.raises(AssertionError):
        streamed.account()
    (incident,) = Incidents.of(streamed.root).still_open(unexplained_key("rolling_sum"))
    assert f"slice {SECOND.name}; windows with an unexplained difference: 1" in incident.text


def test_of_two_accounts_at_a_time_one_is_overtaken(streamed: Made) -> None:
    slow = Accounts.open(streamed.root, PIPELINE)
    done(streamed, (FIRST.name, 1))
    with pytest.raises(OvertakenError):
        slow.add(slow.new_stage(), 0, [{"slice": FIRST.name, "version": 1, "run": "slow", "kind": "slice"}])


def test_small_files_are_merged_and_nothing_is_lost(streamed: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.lake.accounts._MERGE_EVERY_COMMITS", 2)
    for version in range(1, 6):
        done(streamed, (FIRST.name, version))
    table = _DayTable.open(
        streamed.root / "balance" / "rolling_sum", DeltaTable(streamed.root / "balance/rolling_sum").schema()
    )
    assert len(table.files) < 5
    found = Accounts.open(streamed.root, PIPELINE).done({day_of_slice(FIRST.name)})
    assert found == {(FIRST.name, version) for version in range(1, 6)}


def test_the_live_job_prunes_when_it_tends(streamed: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TableWriter.open(streamed.root / "live" / "rolling_sum", LIVE, "slice", epoch=1)
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", writer.version + 1)
    writer.maintain(lambda: [FIRST.name])
    assert Live.at(streamed.root, PIPELINE).slices() == ALL_SLICES
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", writer.version)
    said = writer.note
    writer.maintain(lambda: [FIRST.name, "batches"])
    assert Live.at(streamed.root, PIPELINE).slices() == {SECOND.name, THIRD.name}
    live = Live.at(streamed.root, PIPELINE)
    assert live.note == said == tables.last_note(live.path)
    assert len(live.batch_ranges(at(0))) == 4


def test_sessions_are_refused(made: Made) -> None:
    sessions = replace(PIPELINE, window=Window.session(gap_ms=1000, longest_ms=60_000))
    with pytest.raises(Refusal, match="session windows, which cannot be accounted for yet"):
        account.run(PipelineLake(made.settings.lake_root, sessions), made.settings, "r")


def test_an_account_that_has_lost_its_lease_adds_nothing(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    made.publish(FIRST.name, [], {0: 4}, fingerprint="other")

    @contextmanager
    def overtaken(lake_root: Path, job: str) -> Iterator[Lease]:
        with writing(lake_root, job) as lease:
            lease.control.end(lease.epoch, Receipt(time=0.0, clean=False, cause="it slept"))
            yield lease

    with monkeypatch.context() as patch:
        patch.setattr(account, "writing", overtaken)
        with pytest.raises(LeaseLostError):
            made.account()
    assert made.slices() == []
    made.account()
    assert [row[:2] for row in made.slices()] == [(FIRST.name, 1)]
