"""Slices: their names, their grid, and which of them touch."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.pipelines import PIPELINES
from jobs.pipelines.rules import RefusedDefinitionError
from jobs.pipelines.slices import Slice, adjacent_groups, slice_at, slice_named, slices_between

SUM = PIPELINES["rolling_sum"]
times = st.integers(0, 4_000_000_000_000)


@given(times)
def test_a_moment_lies_in_one_slice_which_its_name_says(time_ms: int) -> None:
    found = slice_at(SUM, time_ms)
    assert found.start_ms <= time_ms < found.end_ms == found.start_ms + 60_000
    assert slice_named(SUM, found.name) == found
    assert found.start.timestamp() * 1000 == found.start_ms


@given(times, st.integers(0, 600_000))
def test_slices_between_cover_the_interval_and_no_more(from_ms: int, length_ms: int) -> None:
    found = slices_between(SUM, from_ms, from_ms + length_ms)
    wanted = sorted({slice_at(SUM, at) for at in range(from_ms, from_ms + length_ms, 1000)})
    if length_ms:
        wanted = sorted({*wanted, slice_at(SUM, from_ms + length_ms - 1)})
    assert found == wanted


@given(st.sets(st.integers(0, 30)))
def test_runs_are_as_long_as_they_can_be(numbers: set[int]) -> None:
    slices = [Slice(number * 10, number * 10 + 10) for number in numbers]
    runs = adjacent_groups(slices)
    assert [slice_ for run in runs for slice_ in run] == sorted(slices)
    assert all(a.end_ms == b.start_ms for run in runs for a, b in itertools.pairwise(run))
    assert all(a[-1].end_ms < b[0].start_ms for a, b in itertools.pairwise(runs))


@pytest.mark.parametrize("name", ["2026", "20261118T120030Z", "20261318T120000Z", "../20261118T120000Z", ""])
def test_what_names_no_slice_is_refused(name: str) -> None:
    with pytest.raises(RefusedDefinitionError, match="is no slice"):
        slice_named(SUM, name)


def test_a_longer_slice_has_another_grid() -> None:
    hours = replace(SUM, slice_seconds=3600)
    assert slice_at(hours, 5_400_000) == Slice(3_600_000, 7_200_000)
    with pytest.raises(RefusedDefinitionError, match="this time is in slice 19700101T010000Z"):
        slice_named(hours, "19700101T013000Z")
