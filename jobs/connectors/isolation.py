"""Which slices of a run cannot be computed: when a group of slices fails, each half of it is tried alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_Result = TypeVar("_Result")

# Each costs some starts of Spark. What is not tried is left to the next run.
MAX_CULPRITS = 5


class ComputeError(Exception):
    """A group of slices could not be computed; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Isolated(Generic[_Result]):
    """The results of the groups that were computed, and why, for each slice that fails alone."""

    results: list[_Result] = field(default_factory=list)
    culprits: dict[str, str] = field(default_factory=dict)


def isolate(slices: Sequence[str], compute: Callable[[Sequence[str]], _Result]) -> Isolated[_Result]:
    """Compute as many slices as can be computed, the earliest first.

    Args:
        slices: those to compute, in order.
        compute: computes a group of them at once, and raises a `ComputeError` if that fails.

    Raises:
        ComputeError: two slices have failed alone and none was computed: the cause is none of the slices. Or there is
            one slice only, which nothing tells from such a cause.

    >>> def compute(group):
    ...     if "c" in group:
    ...         raise ComputeError("overflow")
    ...     return "".join(group)
    >>> isolate("abcdefgh", compute)
    Isolated(results=['ab', 'd', 'efgh'], culprits={'c': 'overflow'})
    """
    found, left = Isolated[_Result](), [list(slices)]
    while left and len(found.culprits) < MAX_CULPRITS:
        group = left.pop(0)
        try:
            found.results.append(compute(group))
        except ComputeError as error:
            if len(group) == 1:
                found.culprits[group[0]] = str(error)
                if not found.results and (len(found.culprits) > 1 or len(slices) == 1):
                    raise
            else:
                half = len(group) // 2
                left[:0] = [group[:half], group[half:]]
    return found
