"""What the benchmark reports; the measuring itself is `make bench`."""

import pytest

from jobs.refusal import Refusal
from jobs.settings import Settings
from local import bench, bench_report
from local.bench import Freshness, Race, Results

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


def test_an_unknown_workload_is_refused():
    with pytest.raises(Refusal, match="nothing to measure is called relay"):
        bench.run(Settings.from_env({}), records=1_000, rounds=1, only=("relay",), report=print)
