"""The batch half of the benchmark: each measurement very small, on real parts; and the report of it."""

from dataclasses import replace

import pytest
from deltalake import DeltaTable

from jobs.lake.events import Landed
from jobs.lake.final import FinalTable
from jobs.pipelines.slices import slices_between
from jobs.query.lake import Lake
from jobs.refusal import Refusal
from local.bench import batch as bench_batch
from local.bench import batch_report as bench_batch_report
from local.bench.lake import KEYS, PIPELINE, WINDOWS, MadeLake, Stretch, events_schema
from local.bench.measurements import (
    HISTORY,
    OTHER_HOURS,
    PARTS,
    PUBLISH,
    READING,
    RECOMPUTE,
    RIVALS,
    SAME_HOUR,
    Batch,
    Publish,
    Reading,
    Restated,
    Rivalry,
    Sizes,
)

SMALL = Sizes(
    rival_events=(3_600,),
    slice_events=300,
    hour_events=1_800,
    hour_batches=4,
    own_hour_batches=60,
    multiples=(1, 2),
    publish_rows=(60, 120),
    final_slices=30,
    read_slices=(1, 2),
    warm_ups=0,
    rounds=1,
)
HOUR = 1_800_000_000_000
MINUTE = 60_000


def measured(settings, *only) -> Batch:
    return bench_batch.run(settings, SMALL, only, lambda step: None)


@pytest.mark.integration
def test_publish_and_reading_are_measured_without_spark(settings):
    found = measured(settings, PUBLISH, READING)
    assert [(p.rows, len(p.commit_seconds)) for p in found.publishes] == [(60, 1), (120, 1)]
    assert all(p.commit_seconds[0] > 0 < p.send_seconds for p in found.publishes)
    slices = [(r.slices, r.windows) for r in found.readings]
    assert slices == [(count, (count + 2) * WINDOWS * KEYS) for count in SMALL.read_slices]
    assert not found.rivalries
    assert not found.restated
    assert not any(settings.lake_root.iterdir()), "what was made up is gone"


@pytest.mark.integration
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_recompute_and_history_are_measured(spark, settings):
    found = measured(settings, RECOMPUTE, HISTORY)
    (rivalry,) = found.rivalries
    assert rivalry.events == 3_600
    assert 0 < rivalry.windows <= 3_600
    assert {side: len(seconds) for side, seconds in rivalry.seconds.items()} == dict.fromkeys(RIVALS, 1)
    events = {(r.where, r.multiple): r.events for r in found.restated}
    assert events[SAME_HOUR, 1] == 300
    assert events[SAME_HOUR, 2] == pytest.approx(600, abs=10)
    assert events[OTHER_HOURS, 1] == pytest.approx(1_800, abs=10)
    assert events[OTHER_HOURS, 2] == pytest.approx(3_600, abs=10)
    assert all(tuple(r.parts) == PARTS and r.seconds > 0 for r in found.restated)


@pytest.mark.integration
@pytest.mark.spark
def test_made_up_events_lie_in_their_hours_and_are_merged(spark, settings):
    lake = MadeLake.of(settings)
    stretches = [Stretch(from_ms=HOUR - HOUR % 3_600_000, to_ms=HOUR + 20 * MINUTE, events=3_000, batches=70)]
    assert lake.land(events_schema(spark), stretches) == 1_000
    landed = Landed.at(settings.lake_root, PIPELINE.source)
    assert landed.ends("numbers", lake.topic.topic_id) == {0: 1_000, 1: 1_000, 2: 1_000}
    assert len(landed.table.file_uris()) < 15, "60 commits were merged"
    slices = slices_between(PIPELINE, HOUR, HOUR + 20 * MINUTE)
    counts = landed.count(PIPELINE, slices)
    assert sum(count.events for count in counts.values()) == 3_000
    assert all(140 <= count.events <= 160 for count in counts.values())
    columns = 'count(DISTINCT (partition, "offset")) AS places, count(DISTINCT key) AS keys'
    (row,) = Lake(settings.lake_root).query(f"SELECT {columns} FROM events_numbers").to_pylist()
    assert row["places"] == 3_000
    assert KEYS / 2 < row["keys"] <= KEYS


@pytest.mark.integration
def test_made_up_live_rows_give_way_to_final_ones(settings):
    lake = MadeLake.of(settings)
    final, live = slices_between(PIPELINE, HOUR, HOUR + 2 * MINUTE)
    lake.make_final([final], keys=KEYS, as_of_ms=HOUR)
    lake.show_live([final, live], as_of_ms=HOUR)
    sql = "SELECT finality, count(*) AS windows FROM rolling_sum GROUP BY ALL ORDER BY ALL"
    found = Lake(settings.lake_root).query(sql).to_pylist()
    assert found == [{"finality": name, "windows": WINDOWS * KEYS} for name in ("final", "live")]
    assert FinalTable.read(settings.lake_root, PIPELINE).headers()[final.name].rows == WINDOWS * KEYS
    batches = DeltaTable(settings.lake_root / PIPELINE.live_table).to_pyarrow_table(columns=["batch"])
    assert batches.column("batch").to_pylist().count(3) > 1


@pytest.mark.integration
@pytest.mark.spark
def test_a_race_in_which_one_side_errs_does_not_count(spark, settings, monkeypatch):
    wrong = bench_batch._SAME.replace("2 * events", "events")
    monkeypatch.setattr(bench_batch, "_SAME", wrong)
    with pytest.raises(Refusal, match="are not the same: one of the two is wrong"):
        measured(settings, RECOMPUTE)


def restated(where: str, multiple: int, *recompute: float) -> Restated:
    others = [1.0] * len(recompute)
    parts = {"plan": others, "recompute": recompute, "audit": others, "publish": others}
    return Restated(where=where, multiple=multiple, events=10 * multiple, files=3, parts=parts)


def test_history_is_compared_within_its_place():
    batch = Batch(
        restated=(
            restated(OTHER_HOURS, 1, 2.0, 7.0, 2.0),
            restated(OTHER_HOURS, 10, 3.0),
            restated(SAME_HOUR, 1, 1.0),
            restated(SAME_HOUR, 10, 3.0),
        )
    )
    section = next(s for s in bench_batch_report.sections(batch) if s.title == "History")
    assert [row[-2:] for row in section.rows] == [
        ("5.00", "1.00"),
        ("6.00", "1.20 (met)"),
        ("4.00", "1.00"),
        ("6.00", "1.50 (missed)"),
    ]


@pytest.mark.parametrize(("slowest", "says"), [(1.0, "(met)"), (1.01, "(missed)")])
def test_the_slowest_commit_counts(slowest, says):
    batch = Batch(publishes=(Publish(rows=1_000, commit_seconds=[0.1, 0.2, slowest], send_seconds=0.5),))
    text = "\n".join(section.markdown() for section in bench_batch_report.sections(batch))
    assert f"| 1,000 | 0.200 {says} | {slowest:.3f} | 0.50 | 2,000 |" in text


def test_every_measurement_is_a_table_and_what_is_missing_is_said():
    reading = Reading(
        slices=1, windows=5, files=2, first_seconds=0.5, newest_seconds=[0.01, 0.03, 0.02], all_seconds=[0.2]
    )
    rivalry = Rivalry(events=100, windows=5, seconds={"ours": [2.0, 1.0, 9.0], "DuckDB": [0.5]})
    batch = Batch(rivalries=(rivalry,), readings=(reading,))
    recompute, history, publish, reads = (section.markdown() for section in bench_batch_report.sections(batch))
    assert "| 100 | 5 | 50 | 200 | 0.25 | ours 2.00, 1.00, 9.00; DuckDB 0.50 |" in recompute
    assert "| 1 | 5 | 2 | 500 | 20 | 200 |" in reads
    assert "not measured" in history
    assert "not measured" in publish
    assert [table.row_count for table in bench_batch_report.tables(batch)] == [1, 1]


def test_records_scale_what_is_made_up():
    sizes = Sizes.of(50_000, 2)
    assert sizes == replace(Sizes(), rival_events=(50_000, 500_000), slice_events=5_000, hour_events=50_000, rounds=2)
    assert Sizes.of(1_000_000, 3) == Sizes()
