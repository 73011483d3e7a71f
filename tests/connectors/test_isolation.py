"""Slices that cannot be computed are found, and keep no other slice from being computed."""

from collections.abc import Sequence
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.connectors.isolation import MAX_CULPRITS, ComputeError, isolate


def run(count: int, culprits: set[int]) -> tuple[list[str], dict[str, str], int]:
    """The slices that were computed, the culprits, and how many groups were tried."""
    names, groups = [f"s{number:04d}" for number in range(count)], list[Sequence[str]]()
    bad = {names[number] for number in culprits}

    def compute(group: Sequence[str]) -> list[str]:
        groups.append(group)
        if found := bad.intersection(group):
            raise ComputeError(f"overflow in {min(found)}")
        return list(group)

    isolated = isolate(names, compute)
    return [name for group in isolated.results for name in group], isolated.culprits, len(groups)


@given(st.integers(2, 300), st.sets(st.integers(0, 299), max_size=MAX_CULPRITS - 1))
def test_all_others_are_computed_once(count: int, drawn: set[int]) -> None:
    culprits = {number for number in drawn if number < count}
    names = [f"s{number:04d}" for number in range(count)]
    bad = [names[number] for number in sorted(culprits)]
    if len(bad) >= 2 and bad[:2] == names[:2]:
        # Nothing tells two failures in front from a cause that is none of the slices.
        with pytest.raises(ComputeError):
            run(count, culprits)
        return
    computed, found, groups = run(count, culprits)
    assert computed == [name for name in names if name not in bad]
    assert found == {name: f"overflow in {name}" for name in bad}
    assert groups <= 1 + 2 * len(bad) * ceil(log2(count))


@pytest.mark.parametrize("count", [1, 2, 5000])
def test_a_cause_that_is_none_of_the_slices_is_raised_and_blames_none(count: int) -> None:
    with pytest.raises(ComputeError, match="overflow"):
        run(count, set(range(count)))


def test_what_is_not_tried_is_left_to_the_next_run() -> None:
    bad = {100 + 10 * number for number in range(MAX_CULPRITS + 3)}
    computed, found, _ = run(400, bad)
    assert len(found) == MAX_CULPRITS
    assert set(computed) < {f"s{number:04d}" for number in range(400) if number not in bad}
