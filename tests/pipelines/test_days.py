"""Complete days and the tide line, compared with a naive reading of all names."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from jobs.pipelines import PIPELINES
from jobs.pipelines.days import DAY_MS, day_of, days_between, incomplete_days, tide_line
from jobs.pipelines.slices import Slice, slice_at, slices_between

SUM = PIPELINES["rolling_sum"]
MIDNIGHT = 1_800_000_000_000 - 1_800_000_000_000 % DAY_MS
HOUR = 3_600_000


def naive_line(slices: list[Slice], names: set[str]) -> int | None:
    """The end of the last slice up to which all slices are final."""
    line = None
    for slice_ in slices:
        if slice_.name not in names:
            break
        line = slice_.end_ms
    return line


@given(
    hours=st.sampled_from([1, 5, 6, 24, 36, 100]),
    begin=st.integers(0, 30),
    final=st.lists(st.booleans(), max_size=60),
    flawless=st.integers(0, 60),
)
def test_line_and_days_are_those_of_a_naive_reading(hours: int, begin: int, final: list[bool], flawless: int) -> None:
    pipeline = replace(SUM, slice_seconds=hours * 3600)
    first_ms = MIDNIGHT + begin * HOUR + 5
    first = slice_at(pipeline, first_ms)
    slices = slices_between(pipeline, first_ms, first.start_ms + (flawless + len(final)) * hours * HOUR)
    names = {s.name for s, is_final in zip(slices, [True] * flawless + final, strict=True) if is_final}
    by_day, looked_at = Counter(name[:8] for name in names), list[str]()

    def names_of(day: str) -> set[str]:
        looked_at.append(day)
        return {name for name in names if name.startswith(day)}

    assert tide_line(pipeline, first_ms, by_day, names_of) == naive_line(slices, names)
    assert len(looked_at) <= 2, "no more than two days are opened"
    last = slices[-1].end_ms if slices else first.start_ms
    midnight = last - last % DAY_MS + DAY_MS
    lacking = {s.name[:8] for s in slices_between(pipeline, first.start_ms, midnight) if s.name not in names}
    assert set(incomplete_days(pipeline, first_ms, midnight - 1, by_day)) == lacking


def test_a_day_is_named_as_its_slices_are() -> None:
    assert days_between(MIDNIGHT + DAY_MS - 1, MIDNIGHT + DAY_MS) == ["20270115", "20270116"]
    assert slice_at(SUM, MIDNIGHT).name.startswith(day_of(MIDNIGHT))
