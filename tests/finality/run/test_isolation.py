"""Slices that cannot be computed are found, and all other slices are computed."""

from collections.abc import Sequence
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.finality.run.isolation import MAX_FAILING, ComputeError, isolate


def run(count: int, failing: set[int], out_after: int | None = None) -> tuple[list[str], dict[str, str], int]:
    """The slices that were computed, those that fail alone, and how many groups were tried.

    ``out_after``: after this number of tries nothing can be computed, as in an outage.
    """
    names, groups = [f"s{number:04d}" for number in range(count)], list[Sequence[str]]()
    bad = {names[number] for number in failing}

    def compute(group: Sequence[str]) -> list[str]:
        groups.append(group)
        if out_after is not None and len(groups) > out_after:
            raise ComputeError("no space left on device")
        if found := bad.intersection(group):
            raise ComputeError(f"overflow in {min(found)}")
        return list(group)

    isolated = isolate(names, compute)
    return [name for group in isolated.results for name in group], isolated.failing, len(groups)


@given(st.integers(2, 300), st.sets(st.integers(0, 298), max_size=MAX_FAILING - 1))
def test_all_others_are_computed_once(count: int, drawn: set[int]) -> None:
    """Also if the first ones fail. One damaged file, for example, makes all slices of its hour fail."""
    failing = {number for number in drawn if number < count - 1}
    names = [f"s{number:04d}" for number in range(count)]
    bad = [names[number] for number in sorted(failing)]
    computed, found, groups = run(count, failing)
    assert computed == [name for name in names if name not in bad]
    assert found == {name: f"overflow in {name}" for name in bad}
    assert groups <= 2 + 2 * len(bad) * ceil(log2(count)) + len(bad)


@pytest.mark.parametrize("count", [1, 2, 5000])
def test_a_cause_outside_of_the_slices_is_raised_and_blames_none(count: int) -> None:
    with pytest.raises(ComputeError, match="overflow"):
        run(count, set(range(count)))


@pytest.mark.parametrize("out_after", range(12))
def test_an_outage_in_between_blames_none(out_after: int) -> None:
    """The outage begins before the slice that fails alone is found, or just then."""
    tries = run(16, {5})[2]
    if out_after >= tries - 1:
        return
    with pytest.raises(ComputeError):
        run(16, {5}, out_after)


def test_of_many_that_fail_some_are_found_and_the_good_ones_are_computed() -> None:
    bad = set(range(60))
    computed, found, groups = run(240, bad)
    assert len(found) == MAX_FAILING
    assert set(computed) >= {f"s{number:04d}" for number in range(120, 240)}
    assert groups < 40
