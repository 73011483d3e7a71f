"""An account on made tables: its rows, the slices that it asks to prune, and an account that was killed."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from jobs.control.events_needed import said_needed
from jobs.control.folder import Control
from jobs.control.incident import unexplained
from jobs.control.incidents import Incidents
from jobs.finality import account
from jobs.lake import tables
from jobs.lake.columns import TIME, columns_of
from jobs.lake.delta.fenced import OvertakenError
from jobs.lake.delta.reading import rows_by_partition
from jobs.lake.drift import Accounts, Live, _DayTable, final_files
from jobs.lake.final import FinalTable
from jobs.lake.ledger import LateCountPosition, Ledger
from jobs.lake.publication import Publication
from jobs.lake.slices import Entry, Header, State
from jobs.lake.tables import PRUNE, Manifest, Note, Ranges, TableWriter
from jobs.pipelines import PIPELINES
from jobs.pipelines.layout import HOUR_MS
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import slice_at, slices_between
from jobs.pipelines.window import Window
from jobs.query.lake import Lake
from jobs.refusal import Refusal
from jobs.settings import Settings
from tests.judges.naive_stream import T0, Batch, Event, Scene, at
from tests.query.test_query import EVENTS

# These slices lie weeks ago.
PIPELINE = PIPELINES["rolling_sum"]
FIRST, SECOND, THIRD = (slice_at(PIPELINE, T0 + minute * 60_000) for minute in range(3))
LIVE = pa.schema(
    [
        *columns_of(PIPELINE),
        pa.field("slice", pa.string()),
        pa.field("epoch", pa.int64()),
        pa.field("batch", pa.int64()),
        pa.field("as_of", TIME),
        pa.field("fingerprint", pa.string()),
        pa.field("offsets", pa.string()),
        pa.field("watermark", TIME),
    ]
)


@dataclass
class Made:
    """A lake with the tables of a scene."""

    settings: Settings
    pipeline: Pipeline = PIPELINE

    @property
    def root(self) -> Path:
        return self.settings.lake_root

    def build(self, made: Scene) -> None:
        self.land(made.events)
        for number, batch in enumerate(made.batches):
            rows = [row for row in made.live_rows() if row[-2] == number]
            self.stream(number, batch, rows)
        for name, offsets in sorted(made.finals.items()):
            rows = [row for row in made.final_rows() if made.slice(round(row[0].timestamp() * 1000)) == name]
            self.publish(name, rows, offsets)

    def land(self, events: Iterable[Event], batch: int = 0) -> None:
        writer = TableWriter.open(self.root / "events" / "numbers", EVENTS, "hour", epoch=1)
        found = list(events)
        rows = [
            {"topic": "numbers", "partition": e.partition, "offset": e.offset, "key": e.name, "id": e.id}
            | {"arrival_time": at(e.arrival_ms), "event_time": at(e.event_ms), "value": e.value, "reason": None}
            for e in found
        ]
        schema = pa.schema([field for field in EVENTS if field.name in rows[0]])
        stage = writer.new_stage()
        write(stage / f"hour={at(T0):%Y-%m-%dT%H}", pa.Table.from_pylist(rows, schema))
        ends = {p: max(e.offset + 1 for e in found if e.partition == p) for p in {e.partition for e in found}}
        writer.commit(Manifest.of(stage), note("ingest", batch, {p: (0, end) for p, end in ends.items()}))

    def stream(self, number: int, batch: Batch, rows: Iterable[tuple[Any, ...]]) -> None:
        writer = TableWriter.open(self.root / self.pipeline.live_table, LIVE, "slice", epoch=1)
        stage = writer.new_stage()
        by_slice: dict[str, list[dict[str, Any]]] = {}
        names = [*columns_of(self.pipeline).names, "epoch", "batch", "as_of"]
        for row in rows:
            name = slice_at(self.pipeline, round(row[0].timestamp() * 1000)).name
            values = dict(zip(names, row, strict=True), fingerprint=self.pipeline.fingerprint)
            by_slice.setdefault(name, []).append(values)
        for name, lines in by_slice.items():
            schema = pa.schema([field for field in LIVE if field.name in lines[0]])
            write(stage / f"slice={name}", pa.Table.from_pylist(lines, schema))
        line = {"epoch": 1, "batch": number, "as_of": at(batch.as_of_ms), "watermark": at(batch.watermark_ms)}
        line |= {"fingerprint": self.pipeline.fingerprint, "offsets": json.dumps(dict(batch.ranges))}
        schema = pa.schema([field for field in LIVE if field.name in line])
        write(stage / "slice=batches", pa.Table.from_pylist([line], schema))
        writer.commit(Manifest.of(stage), note("rolling_sum", number, batch.ranges, self.pipeline.fingerprint))

    def publish(
        self, name: str, rows: Iterable[tuple[Any, ...]], offsets: Mapping[int, int], version: int = 1, **more: Any
    ) -> None:
        final, lines = FinalTable.open(self.root, self.pipeline), list(rows)
        header = Header(
            slice=name,
            slice_seconds=self.pipeline.slice_seconds,
            version=version,
            as_of_ms=T0,
            run="r",
            fingerprint=more.get("fingerprint", self.pipeline.fingerprint),
            topic_id=more.get("topic_id", "t"),
            offsets=offsets,
            events_version=0,
            rows=len(lines),
            events=more.get("events", 0),
            checksum="",
            verdict="passed",
            reason="closed",
        )
        names = columns_of(self.pipeline).names
        values = [dict(zip(names, row, strict=True)) for row in lines]
        file = final.new_stage() / f"slice={name}"
        files = (write(file, pa.Table.from_pylist(values, columns_of(self.pipeline))),) if values else ()
        final.publish([Publication(header=header, files=files)])

    def account(self, run: str = "run") -> None:
        account.run(self.settings, self.pipeline, run)

    def query(self, sql: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = Lake(self.root).query(sql).to_pylist(maps_as_pydicts="lossy")
        return found

    def slices(self) -> list[tuple[Any, ...]]:
        sql = (
            "SELECT slice, version, windows, differing, unexplained, note FROM balance_rolling_sum WHERE kind = 'slice'"
        )
        return [tuple(row.values()) for row in self.query(f"{sql} ORDER BY 1, 2")]

    def asked(self) -> dict[str, Any] | None:
        return Control.of(self.root, "rolling_sum").documents.read(PRUNE)


def write(folder: Path, rows: pa.Table) -> Path:
    folder.mkdir(parents=True)
    pq.write_table(rows, folder / "rows.parquet")
    return folder / "rows.parquet"


def note(job: str, batch: int, ranges: Mapping[int, tuple[int, int]], fingerprint: str | None = None) -> Note:
    topics = {"numbers": Ranges(topic_id="t", offsets=dict(ranges))}
    return Note(job=job, write_id=job, batch=batch, epoch=1, cluster_id="c", topics=topics, fingerprint=fingerprint)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(replace(Settings.from_env({}), lake_root=tmp_path / "lake"))


def two_slices() -> Scene:
    """One event in time in each slice, and a late one in the first."""
    first_ms, second_ms = FIRST.end_ms - 1000, SECOND.start_ms + 1000
    events = [
        Event(0, 0, first_ms, "a", arrival_ms=first_ms),
        Event(0, 1, second_ms, "a", arrival_ms=second_ms),
        Event(0, 2, first_ms, "b", arrival_ms=second_ms),
    ]
    batches = [Batch({0: (0, 1)}, 0), Batch({0: (1, 2)}, T0), Batch({0: (2, 3)}, SECOND.start_ms + 500)]
    return Scene(PIPELINE, events, batches, {FIRST.name: {0: 3}, SECOND.name: {0: 3}})


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("it started Spark")


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
    final.tend(lambda: None, FIRST.end_ms + 400 * 24 * 3_600_000)
    for names in ({FIRST.name}, {SECOND.name}, {FIRST.name, SECOND.name}):
        files = final_files(made.root, PIPELINE, final.version, names)
        assert (len(files.own), len(files.folded)) == (0, 1)
        rows = account._final_rows(spark, PIPELINE, files, names).orderBy("window_start", "key").toArrow()
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
    (incident,) = Incidents.of(made.root).still_open(unexplained("rolling_sum"))
    assert f"slice {FIRST.name}, window " in incident.text
    assert "key='a': events: live 1, final 4, unexplained 3; windows that nothing explains: 1. " in incident.text
    made.publish(FIRST.name, of_slice[FIRST.name], {0: 3}, version=2)
    made.account()
    assert not Incidents.of(made.root).still_open(unexplained("rolling_sum"))


@pytest.mark.spark
def test_an_account_that_died_before_it_told_is_told_by_the_next_run(
    spark: SparkSession, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = two_slices()
    scene.planted[FIRST.end_ms - 1000, "a"] = 3
    made.build(scene)
    with monkeypatch.context() as patched:
        patched.setattr(account, "_keep_incident", never)
        with pytest.raises(AssertionError):
            made.account("died")
    assert [row[4] for row in made.slices()] == [1, 0]
    monkeypatch.setattr(account.session, "opened", never)
    account.run(made.settings, PIPELINE, "again", "https://runs/again")
    (incident,) = Incidents.of(made.root).still_open(unexplained("rolling_sum"))
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


# -- Without Spark: slices that are not compared, and pruning --


def done(made: Made, *accounts: tuple[str, int]) -> None:
    """Write an account of these slices and versions."""
    totals = [{"slice": name, "version": version, "run": "r", "kind": "slice"} for name, version in accounts]
    accounts = Accounts.open(made.root, made.pipeline)
    accounts.add(None, totals)
    accounts.tend("")


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
    needed = lambda: said_needed(streamed.root, PIPELINE.account_job)  # noqa: E731
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
    reason = f"rows about micro-batches before {at(later):%FT%TZ} were removed: they were older than needed"
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
    line = Entry(slice=FIRST.name, state=State.FINAL, at_ms=T0, run="r")
    Ledger.open(made.root, made.pipeline).append([line], counted=counted)


def test_a_slice_that_may_hold_records_of_an_earlier_topic_is_noted(streamed: Made) -> None:
    recreated(streamed, SECOND.start_ms)
    for slice_ in (FIRST, SECOND):
        streamed.publish(slice_.name, [], {0: 4})
    streamed.account()
    reason = "it may hold records of the topic that was there before: offsets of one say nothing of the other"
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
    Accounts.open(streamed.root, PIPELINE).add(None, [{"slice": SECOND.name, **row}])
    monkeypatch.setattr(Accounts, "tend", never)
    with pytest.raises(AssertionError):
        streamed.account()
    (incident,) = Incidents.of(streamed.root).still_open(unexplained("rolling_sum"))
    assert f"slice {SECOND.name}; windows that nothing explains: 1" in incident.text


def test_of_two_accounts_at_a_time_one_is_overtaken(streamed: Made) -> None:
    slow = Accounts.open(streamed.root, PIPELINE)
    done(streamed, (FIRST.name, 1))
    with pytest.raises(OvertakenError):
        slow.add(None, [{"slice": FIRST.name, "version": 1, "run": "slow", "kind": "slice"}])


def test_small_files_are_merged_and_nothing_is_lost(streamed: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.lake.drift._MERGE_EVERY_COMMITS", 2)
    for version in range(1, 6):
        done(streamed, (FIRST.name, version))
    table = _DayTable.open(
        streamed.root / "balance" / "rolling_sum", DeltaTable(streamed.root / "balance/rolling_sum").schema()
    )
    assert len(table.files) < 5
    assert Accounts.open(streamed.root, PIPELINE).done() == {(FIRST.name, version) for version in range(1, 6)}


def test_the_live_job_prunes_when_it_tends(streamed: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TableWriter.open(streamed.root / "live" / "rolling_sum", LIVE, "slice", epoch=1)
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", writer.version + 1)
    writer.tend(lambda: [FIRST.name])
    assert Live.at(streamed.root, PIPELINE).slices() == ALL_SLICES
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", writer.version)
    said = writer.note
    writer.tend(lambda: [FIRST.name, "batches"])
    assert Live.at(streamed.root, PIPELINE).slices() == {SECOND.name, THIRD.name}
    live = Live.at(streamed.root, PIPELINE)
    assert live.note == said == tables.last_note(live.path)
    assert len(live.taken(at(0))) == 4


def test_sessions_are_refused(made: Made) -> None:
    sessions = replace(PIPELINE, window=Window.session(gap_ms=1000, longest_ms=60_000))
    with pytest.raises(Refusal, match="session windows, which cannot be accounted for yet"):
        account.run(made.settings, sessions, "r")
