"""Finds the slices of a run that cannot be computed: when a group of slices fails, each half of it is tried alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_Result = TypeVar("_Result")

# Each failing slice costs some starts of Spark. If more slices than this fail, the others are left to the next run.
MAX_FAILING = 5


class ComputeError(Exception):
    """A group of slices could not be computed; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Isolated(Generic[_Result]):
    """The results of the groups that were computed, and the reason for each slice that fails alone."""

    results: list[_Result] = field(default_factory=list)
    failing: dict[str, str] = field(default_factory=dict)


def isolate(slices: Sequence[str], compute: Callable[[Sequence[str]], _Result]) -> Isolated[_Result]:
    """Compute as many slices as can be computed, the earliest first.

    Args:
        slices: those to compute, in order.
        compute: computes a group of them at once, and raises a `ComputeError` if that fails.

    Raises:
        ComputeError: no slice can be computed now, as in an outage, so no slice is blamed. Two tests find this out.
            The first is made each time a slice fails alone, from the second such slice on, while there is no result:
            the last of ``slices`` is computed, too. The second is made at the end, if no group was computed after the
            newest slice that failed alone: a slice of an earlier result is computed again. The error is raised if a
            test fails, or if the second one is due and there is no result.

    >>> def compute(group):
    ...     if "c" in group:
    ...         raise ComputeError("overflow")
    ...     return "".join(group)
    >>> isolate("abcdefgh", compute)
    Isolated(results=['ab', 'd', 'efgh'], failing={'c': 'overflow'})
    """
    found, left, sound = Isolated[_Result](), [list(slices)], list[str]()
    failed_last: ComputeError | None = None
    while left:
        group = left.pop(0)
        try:
            found.results.append(compute(group))
            sound, failed_last = group, None
        except ComputeError as error:
            if len(group) > 1 and len(found.failing) < MAX_FAILING:
                half = len(group) // 2
                left[:0] = [group[:half], group[half:]]
            elif len(group) == 1 and len(found.failing) < MAX_FAILING:
                found.failing[group[0]], failed_last = str(error), error
                if not found.results and len(found.failing) > 1:
                    # In an outage each of thousands of slices would fail. If the last slice fails now, this raises.
                    compute(slices[-1:])
    if failed_last:
        if not sound:
            raise failed_last
        compute(sound[:1])
    return found
