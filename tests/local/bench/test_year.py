"""A tiny simulated year, by the product's real writers and a real broker; its clock; the report of it."""

import os
import time
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from jobs.lake import stream_tables as tables
from jobs.lake.final import FinalTable
from jobs.lake.ledger import Ledger
from jobs.lake.slices import State
from jobs.pipelines import PIPELINES
from jobs.refusal import Refusal
from jobs.settings import Settings
from jobs.storage.folders import write_whole
from local.bench import report as bench_report
from local.bench import run as bench
from local.bench.run import Results
from local.bench.year import report as bench_year_report
from local.bench.year import run as bench_year
from local.bench.year.clock import Clock, seconds_of, simulated
from local.bench.year.files import Files, Follower, Usage, largest_checkpoint
from local.bench.year.reader_process import LOOKS, NEWEST, PAGE, PLAN, QUERY
from local.bench.year.run import MINUTE_MS, Cadence, Looked, Point, Year

TINY = Cadence(one_by_one_minutes=5, hourly_minutes=35, hour=15, far=40)
# So that a test need not write thousands of files.
SHORT_DAY_MS = 90 * MINUTE_MS
PIPELINE = PIPELINES["rolling_sum"]


@pytest.mark.integration
@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.long
def test_two_short_days_are_simulated_and_judged(spark, settings, monkeypatch):
    monkeypatch.setattr(bench_year, "DAY_MS", SHORT_DAY_MS)
    year = bench_year.run(settings, print, days=2, pipelines=["rolling_sum"], cadence=TINY, rounds=1)
    assert [(point.day, point.slices) for point in year.points] == [(1, 90), (2, 180)]
    for point in year.points:
        assert set(point.looks) == set(LOOKS)
        assert all(look.seconds > 0 and look.peak_bytes > look.own_bytes > 0 for look in point.looks.values())
        assert point.files.referred > 0 < point.files.replaced
        assert (point.files.too_many, point.files.missing) == (0, 0)
        rows = {"final", "ledger", "live", "events", "drift", "balance", "log"}
        assert all(point.usage[name].files > 0 for name in rows)
    final = FinalTable.read(settings.lake_root, PIPELINE)
    headers = final.headers()
    ledger = Ledger.read(settings.lake_root, PIPELINE).newest(headers)
    # The newest slice is landed and due, but not yet final.
    assert len(headers) == 2 * 90 - 1
    assert {ledger[name].state for name in headers} == {State.FINAL}
    assert max(header.as_of_ms for header in headers.values()) <= time.time() * 1000
    text = bench_year_report.part(year, "here")
    assert text.startswith(bench_year_report.BEGIN)
    assert "day 2 ÷ day 1 (goal ≤ 1.5)" in text
    assert "| too many (goal 0) | 0 (met) | 0 (met) |" in text


@pytest.mark.integration
@pytest.mark.spark
@pytest.mark.timeout(120)
def test_a_writer_that_fails_ends_the_others_and_says_why(spark, settings):
    broken, other = settings.lake_root / PIPELINE.final_table, PIPELINES["word_count"]
    broken.parent.mkdir(parents=True)
    broken.touch()
    with pytest.raises(Refusal, match="Invalid table location"):
        bench_year.run(settings, print, days=1, pipelines=[other.name, PIPELINE.name], cadence=TINY, rounds=1)
    final = FinalTable.read(settings.lake_root, other)
    assert final is None or len(final.headers()) < 1_439, "it was not waited for"


def test_a_stretch_ends_with_slices_of_their_own():
    steps = [len(step) for step in TINY.steps(0, SHORT_DAY_MS)]
    assert steps == [40, 15, 15, 15, *[1] * 5]
    begins = [step[0].start_ms // MINUTE_MS for step in TINY.steps(SHORT_DAY_MS, SHORT_DAY_MS + 3 * MINUTE_MS)]
    assert begins == [90, 91, 92]


@pytest.mark.parametrize(
    ("days", "points"), [(1, [1]), (3, [1, 3]), (30, [1, 30]), (60, [1, 30, 60]), (365, [1, 30, 365])]
)
def test_a_shorter_year_is_measured_at_its_end(days, points):
    assert bench_year.points_of(days) == points


def test_our_code_and_files_see_the_simulated_time_and_nothing_else_does(tmp_path):
    clock, file = Clock(now=1_700_000_000.0), tmp_path / "document"
    with simulated(clock):
        write_whole(file, b"x")
        assert time.time() == clock.now
        assert tables._now() == datetime.fromtimestamp(clock.now, UTC)
        assert isinstance(tables._now(), datetime)
        clock.now += 60
        os.utime(tmp_path)
    assert file.stat().st_mtime == 1_700_000_000
    assert tmp_path.stat().st_mtime == 1_700_000_060
    assert time.time() > 1_750_000_000
    assert tables._now().timestamp() > 1_750_000_000


def test_the_library_keeps_what_was_replaced_as_long_as_the_product_says(tmp_path):
    hours = {name: "interval 6 hours" for name in ("delta.logRetentionDuration", "delta.deletedFileRetentionDuration")}
    schema = pa.schema([pa.field("n", pa.int64()), pa.field("day", pa.string())])
    DeltaTable.create(str(tmp_path), schema=schema, partition_by=["day"], configuration=hours)
    clock = Clock(now=time.time() - 1_000_000)
    clock.keep_as_long(tmp_path)
    clock.now += 400_000
    clock.keep_as_long(tmp_path)
    kept = seconds_of(DeltaTable(str(tmp_path)).metadata().configuration["delta.logRetentionDuration"])
    # It replaces the earlier setting, and is not added to it.
    assert kept == pytest.approx(6 * 3600 + 600_000, abs=5)
    assert (tmp_path / "_delta_log" / f"{2:020}.json").stat().st_mtime == pytest.approx(clock.now)


def test_an_unknown_interval_is_not_guessed():
    with pytest.raises(ValueError, match="no interval that the product writes"):
        seconds_of("interval 6")


def test_files_that_nobody_needs_and_files_that_are_gone_are_found(tmp_path):
    def overwrite(number: int) -> None:
        rows = pa.table({"n": [number], "day": ["1"]})
        write_deltalake(str(tmp_path), rows, partition_by=["day"], mode="overwrite")

    clock, follower = Clock(now=1_000_000.0, kept={str(tmp_path): {"": 3600}}), Follower(table=tmp_path)
    overwrite(0)
    follower.follow(clock.now)
    overwrite(1)
    follower.follow(clock.now)
    assert follower.files(clock) == Files(referred=1, replaced=1, commits=2)
    clock.now += 3600 + 3 * 3600 + 1
    assert follower.files(clock) == Files(referred=1, too_many=1, commits=2)
    (tmp_path / "day=1" / "left-by-a-crash.parquet").touch()
    assert follower.files(clock).too_many == 2
    for file in DeltaTable(str(tmp_path)).file_uris():
        os.unlink(file)
    assert follower.files(clock).missing == 1


def test_the_newest_checkpoint_of_the_largest_final_table_counts(tmp_path):
    assert largest_checkpoint(tmp_path) == 0
    for name, version, size in [("a", 1, 900), ("a", 2, 20), ("b", 1, 30)]:
        log = tmp_path / "final" / name / "_delta_log"
        log.mkdir(parents=True, exist_ok=True)
        (log / f"{version:020}.checkpoint.parquet").write_bytes(bytes(size))
    assert largest_checkpoint(tmp_path) == 30


def looked(seconds: float, mebibytes: int = 200) -> Looked:
    return Looked(seconds=seconds, peak_bytes=mebibytes * 2**20, own_bytes=2**20)


def point(day: int, *, seconds: float = 1.0, mebibytes: int = 200, too_many: int = 0) -> Point:
    return Point(
        day=day,
        slices=day * 1_440,
        usage={"final": Usage(files=day, bytes=day * 2**20, inodes=2 * day)},
        files=Files(referred=day, replaced=1, too_many=too_many),
        checkpoint_bytes=2**19,
        looks={PLAN: looked(seconds, mebibytes), PAGE: looked(2.0), QUERY: looked(9.0 * day), NEWEST: looked(0.5)},
        seconds=1.0,
    )


def year(*points: Point) -> Year:
    return Year(points=points, cadence=Cadence(), pipelines=("rolling_sum",), rounds=3)


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (point(365, seconds=1.5, mebibytes=300), "a year: (met)"),
        (point(365, seconds=1.51), "a year: plan, s (missed)"),
        (point(365, mebibytes=301), "a year: memory of the plan's process, MiB (missed)"),
        (point(365, too_many=1), "a year: files at day 365 (missed)"),
    ],
)
def test_a_year_is_judged_by_its_thirtieth_day(end, says):
    # The time of the first day is only shown; it does not change the verdict.
    assert bench_year_report.verdict(year(point(1, seconds=0.01), point(30), end)) == says


def test_a_shorter_run_is_judged_by_its_first_day():
    ratios = {each.what: each.ratio for each in bench_year_report.judged(year(point(1), point(3, seconds=3.0)))}
    assert ratios["plan, s"] == 3.0
    assert ratios["slices page, s"] == 1.0
    assert not bench_year_report.judged(year(point(1)))


def test_a_year_replaces_its_part_of_the_page_and_a_whole_run_leaves_it(tmp_path):
    page, settings = tmp_path / "benchmarks.md", Settings.from_env({})
    results = Results(races=(), freshness=None, load_before=0.12, load_after=2.5)
    bench_report.write(results, settings, 1, page)
    before = page.read_text()
    assert f"{bench_year_report.BEGIN}\n\nnot measured\n\n{bench_year_report.END}" in before
    bench_report.write_year(year(point(1), point(30), point(365, seconds=2.0)), results, settings, page)
    after = page.read_text()
    assert "| plan, s | 1.000 | 1.000 | 2.000 | 2.00 (missed) |" in after
    assert "| MiB | 1.0 | 30.0 | 365.0 |" in after
    assert "| newest checkpoint of `final`, MiB | 0.50 | 0.50 | 0.50 |" in after
    assert "load average 0.12 before, 2.50 after" in after
    assert "{" not in after
    bench_report.write(replace(results, load_before=0.5), settings, 1, page)
    assert "| plan, s | 1.000 | 1.000 | 2.000 | 2.00 (missed) |" in page.read_text()
    assert "0.50 before, 2.50 after" in page.read_text()


def test_a_year_is_measured_only_when_it_is_asked_for():
    assert bench.YEAR in bench.CHOICES
    assert bench.YEAR not in bench.EVERYTHING
    with pytest.raises(Refusal, match=r"there is no measurement month: choose from .*, year"):
        bench.run(Settings.from_env({}), records=1_000, rounds=1, only=("month",), report=print)
