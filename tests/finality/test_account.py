"""An account on made tables: its rows, the slices that it asks to prune, and an account that was killed."""

from dataclasses import replace

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from jobs.control.incident import unexplained_key
from jobs.control.incidents import Incidents
from jobs.finality import account, comparison
from jobs.lake.accounts import Accounts
from jobs.lake.final import FinalTable
from jobs.lake.live import Live
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.stream_tables import TableWriter
from tests.finality.accounts import FIRST, PIPELINE, SECOND, THIRD, Made, never, note, two_slices
from tests.judges.naive_stream import T0, Batch, Event


@pytest.mark.spark
def test_an_account_says_what_differs_and_why_and_is_made_once(
    spark: SparkSession, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.build(two_slices())
    made.account("first")
    assert made.slices() == [(FIRST.name, 1, 2, 1, 0, None), (SECOND.name, 1, 1, 0, 0, None)]
    (row,) = made.query("SELECT * FROM drift_rolling_sum")
    assert (row["key"], row["slice"], row["version"], row["run"]) == ("b", FIRST.name, 1, "first")
    assert (row["live"], row["final"]["events"], row["causes"]) == (None, 1, {"late": 1})
    assert row["unexplained"] == {"total": 0, "mean": 0, "events": 0}
    causes = made.query("SELECT slice, cause, events, window_events FROM balance_rolling_sum WHERE kind = 'cause'")
    assert causes == [{"slice": FIRST.name, "cause": "late", "events": 1, "window_events": 1}]
    (age,) = made.query(
        "SELECT exact, windows, error, magnitude FROM balance_rolling_sum "
        f"WHERE measure = 'events' AND age_ms = 5000 AND slice = '{FIRST.name}'"
    )
    assert age == {"exact": 1, "windows": 2, "error": 1, "magnitude": 2}
    assert not Incidents.of(made.root).still_open("account.")
    monkeypatch.setattr(account.session, "opened", never)
    before = [DeltaTable(made.root / table).version() for table in ("drift/rolling_sum", "balance/rolling_sum")]
    made.account("second")
    assert [DeltaTable(made.root / f"{kind}/rolling_sum").version() for kind in ("drift", "balance")] == before
    assert made.asked() == {"before": THIRD.name, "slices": [FIRST.name, SECOND.name]}


@pytest.mark.spark
def test_of_a_file_with_rows_of_many_slices_those_that_are_due_are_read(spark: SparkSession, made: Made) -> None:
    made.build(two_slices())
    final = FinalTable.open(made.root, PIPELINE)
    wanted = {name: final.rows(name) for name in (FIRST.name, SECOND.name)}
    final.maintain(lambda: None, FIRST.end_ms + 400 * 24 * 3_600_000)
    for names in ({FIRST.name}, {SECOND.name}, {FIRST.name, SECOND.name}):
        own, folded = final.files_of(names)
        assert (len(own), len(folded)) == (0, 1)
        rows = comparison._final_rows(spark, PIPELINE, final, names).orderBy("window_start", "key").toArrow()
        expected = pa.concat_tables(wanted[name] for name in sorted(names))
        assert rows.to_pylist() == expected.sort_by([("window_start", "ascending"), ("key", "ascending")]).to_pylist()
    made.account()
    assert made.slices() == [(FIRST.name, 1, 2, 1, 0, None), (SECOND.name, 1, 1, 0, 0, None)]


@pytest.mark.spark
def test_an_incident_stays_open_until_its_own_slice_is_clean(spark: SparkSession, made: Made) -> None:
    scene = two_slices()
    of_slice = {s.name: [r for r in scene.final_rows() if s.start <= r[0] < s.end] for s in (FIRST, SECOND)}
    scene.planted_in_final[FIRST.end_ms - 1000, "a"] = 3
    made.build(scene)
    made.settings = replace(made.settings, live_kept_seconds=10**9)
    made.account()
    assert [row[4] for row in made.slices()] == [1, 0]
    (row,) = made.query("SELECT * FROM drift_rolling_sum WHERE key = 'a'")
    assert (row["live"]["events"], row["final"]["events"], row["unexplained"]["events"]) == (1, 4, 3)
    made.publish(SECOND.name, of_slice[SECOND.name], {0: 3}, version=2)
    made.account()
    (incident,) = Incidents.of(made.root).still_open(unexplained_key("rolling_sum"))
    assert f"slice {FIRST.name}, window " in incident.text
    assert (
        "key='a': events: live 1, final 4, unexplained 3; windows with an unexplained difference: 1. " in incident.text
    )
    made.publish(FIRST.name, of_slice[FIRST.name], {0: 3}, version=2)
    made.account()
    assert not Incidents.of(made.root).still_open(unexplained_key("rolling_sum"))


@pytest.mark.spark
def test_an_account_that_died_before_it_told_is_told_by_the_next_run(
    spark: SparkSession, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = two_slices()
    scene.planted[FIRST.end_ms - 1000, "a"] = 3
    made.build(scene)
    with monkeypatch.context() as patched:
        patched.setattr(account, "_update_incident", never)
        with pytest.raises(AssertionError):
            made.account("died")
    assert [row[4] for row in made.slices()] == [1, 0]
    monkeypatch.setattr(account.session, "opened", never)
    account.run(PipelineLake(made.settings.lake_root, PIPELINE), made.settings, "again", "https://runs/again")
    (incident,) = Incidents.of(made.root).still_open(unexplained_key("rolling_sum"))
    assert "key='a': events: live 4, final 1, unexplained 3; " in incident.text
    assert incident.link == "https://runs/again"


@pytest.mark.spark
def test_a_slice_waits_for_what_live_has_read_and_ingest_has_not_landed(spark: SparkSession, made: Made) -> None:
    scene = two_slices()
    made.build(scene)
    second_ms = SECOND.start_ms + 1000
    ahead_of_ingest = Batch({0: (3, 4)}, SECOND.start_ms + 500)
    late = Event(0, 3, second_ms, "c", arrival_ms=second_ms)
    scene.events, scene.batches = [*scene.events, late], [*scene.batches, ahead_of_ingest]
    made.stream(3, ahead_of_ingest, [row for row in scene.live_rows() if row[-2] == 3])
    made.account()
    # It cannot touch the first slice: the watermark had passed its end.
    assert [row[0] for row in made.slices()] == [FIRST.name]
    assert made.asked() == {"before": SECOND.name, "slices": [FIRST.name]}
    made.land([late], batch=1)
    made.account()
    assert made.slices()[1] == (SECOND.name, 1, 2, 1, 0, None)
    (row,) = made.query(f"SELECT causes FROM drift_rolling_sum WHERE slice = '{SECOND.name}'")
    assert row["causes"] == {"after_final": 1}


@pytest.mark.spark
def test_an_account_that_died_before_its_totals_leaves_nothing_double(
    spark: SparkSession, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.build(two_slices())
    with monkeypatch.context() as patched:
        patched.setattr(Accounts, "_add_totals", never)
        with pytest.raises(AssertionError):
            made.account("died")
    assert [row["run"] for row in made.query("SELECT run FROM drift_rolling_sum")] == ["died"]
    assert made.asked() is None
    made.account("again")
    assert [row["run"] for row in made.query("SELECT run FROM drift_rolling_sum")] == ["again"]


@pytest.mark.spark
def test_what_the_stream_has_skipped_is_unexplained_though_its_first_batch_is_long_ago(
    spark: SparkSession, made: Made
) -> None:
    scene = two_slices()
    days_ago = T0 - 10 * 86_400_000
    first, *rest = scene.batches
    # Offsets 1 and 2 lie between the next batch and a batch that is too old to have read any event of these slices.
    scene.events = [replace(event, offset=event.offset + 1) for event in scene.events]
    scene.batches = [replace(first, as_of_ms=days_ago), *(replace(b, ranges={0: (3, 4)}) for b in rest[-1:])]
    scene.finals = {FIRST.name: {0: 4}, SECOND.name: {0: 4}}
    made.build(scene)
    assert Live.at(made.root, PIPELINE).begins("numbers") == {0: 0}
    made.account()
    assert [row[4] for row in made.slices()] == [1, 1]
    causes = made.query("SELECT slice, cause, events FROM balance_rolling_sum WHERE kind = 'cause'")
    assert causes == [{"slice": FIRST.name, "cause": "late", "events": 1}]


@pytest.mark.spark
def test_without_a_live_job_everything_is_not_reached(spark: SparkSession, made: Made) -> None:
    scene = two_slices()
    scene.batches = []
    made.build(scene)
    made.account()
    assert made.slices() == [(FIRST.name, 1, 2, 2, 0, None), (SECOND.name, 1, 1, 1, 0, None)]
    causes = made.query("SELECT cause, sum(events) AS n FROM balance_rolling_sum WHERE kind = 'cause' GROUP BY 1")
    assert causes == [{"cause": "not_reached", "n": 3}]


@pytest.mark.spark
def test_slices_without_any_event_have_their_account_too(spark: SparkSession, made: Made) -> None:
    scene = two_slices()
    scene.batches = []
    made.land(scene.events)
    made.publish("20200101T000000Z", [], {0: 3})
    # A live table that was reset and never written since: it has no columns, and says where the stream will begin.
    reset = TableWriter.open(made.root / "live" / "rolling_sum", None, "slice", epoch=1)
    reset.reset(replace(note("rolling_sum", 0, {0: (0, 3)}), batch=None), clear=True)
    made.account()
    assert made.slices() == [("20200101T000000Z", 1, 0, 0, 0, None)]
    for slice_ in (FIRST, SECOND):
        made.publish(slice_.name, [r for r in scene.final_rows() if slice_.start <= r[0] < slice_.end], {0: 3})
    made.account()
    assert [row[4] for row in made.slices()] == [0, 0, 0]
    causes = made.query("SELECT cause, sum(events) AS n FROM balance_rolling_sum WHERE kind = 'cause' GROUP BY 1")
    assert causes == [{"cause": "before_checkpoint", "n": 3}]
