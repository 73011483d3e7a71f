"""The report of the benchmark; `make bench` measures."""

import re
from dataclasses import replace

import pytest

from jobs.refusal import Refusal
from jobs.settings import Settings
from local.bench import report as bench_report
from local.bench import run as bench
from local.bench.batch_report import sections
from local.bench.freshness import Freshness
from local.bench.measurements import Batch
from local.bench.run import Race, Results
from local.bench.scale import Scaled

FRESH = Freshness(samples=240, p50_seconds=0.9, p95_seconds=1.4, p99_seconds=2.2, lost=0)


def race(ours: list[float], plain: list[float]) -> Race:
    return Race(workload="rolling_sum", records=1_000_000, seconds={"ours": ours, "plain": plain})


def test_the_median_drain_counts():
    measured = race([4.0, 5.0, 50.0], [3.0, 4.0, 4.1])
    assert measured.per_second("ours") == 200_000
    assert measured.ratio == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("ours", "p95", "lost", "says"),
    [
        (4.4, 1.4, 0, ["0.91 (met)", "(met)"]),
        (4.6, 2.1, 0, ["0.87 (missed)", "(missed)"]),
        (4.0, 1.4, 1, ["1.00 (met)", "(missed)"]),
    ],
)
def test_the_page_says_whether_the_goals_are_met(tmp_path, ours, p95, lost, says):
    page = tmp_path / "benchmarks.md"
    fresh = Freshness(samples=240, p50_seconds=0.9, p95_seconds=p95, p99_seconds=2.2, lost=lost)
    results = Results(races=(race([ours], [4.0]),), freshness=fresh, load_before=0.12, load_after=2.5)
    bench_report.write(results, Settings.from_env({}), 1, page)
    text = page.read_text()
    assert f"| rolling_sum | 1,000,000 | {1_000_000 / ours:,.0f} | 250,000 | {says[0]} |" in text
    assert f"goal p95 ≤ 2 s: {says[1]}" in text
    assert "0.12 before, 2.50 after" in text
    assert "{" not in text


def test_what_workers_bring_replaces_its_part_of_the_page_and_no_other(tmp_path):
    page = tmp_path / "benchmarks.md"
    settings = Settings.from_env({})
    results = Results(races=(race([4.0], [4.0]),), freshness=FRESH, load_before=0.12, load_after=2.5)
    bench_report.write(results, settings, 1, page)
    before = page.read_text()
    measured = [([10.0, 11.0, 50.0], 1, 3), ([8.0, 8.0, 8.0], 2, 3), ([12.0], 1, 1), ([12.5], 2, 1)]
    scaled = tuple(
        Scaled(workers=workers, partitions=partitions, records=880_000, seconds=seconds)
        for seconds, workers, partitions in measured
    )
    bench_report.write_scale(replace(results, scaled=scaled), settings, 3, page)
    after = page.read_text()
    rows = [line for line in after.splitlines() if line.startswith("| ") and line not in before]
    assert rows[-2:] == ["| 1 | 73,333 | 70,400 | 0.96 |", "| 3 | 80,000 | 110,000 | 1.38 |"]
    part = re.compile("<!-- scale -->.*<!-- /scale -->", re.DOTALL)
    assert part.sub("", before) == part.sub("", after) != after
    bench_report.write_scale(results, settings, 3, page)
    assert page.read_text() == before


def test_the_page_in_the_docs_has_the_texts_of_the_report():
    """The page is written only when somebody measures, so a changed text must be changed in the page, too."""
    page = bench_report.PAGE.read_text()
    texts = [paragraph.strip() for paragraph in bench_report._PAGE.split("\n\n") if "{" not in paragraph]
    texts += [section.text for section in sections(Batch())]
    assert len(texts) > 10
    assert [text for text in texts if text not in page] == []


def test_an_unknown_workload_is_refused():
    with pytest.raises(Refusal, match="there is no measurement relay: choose from ingest"):
        bench.run(Settings.from_env({}), records=1_000, rounds=1, only=("relay",), report=print)
