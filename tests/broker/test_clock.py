"""The decision when a machine's own clock is too wrong to work with."""

import pytest

from jobs.broker.clock import check_local
from jobs.pipelines.source import CLOCK_TOLERANCE_MS
from jobs.refusal import Refusal

NOON_MS = 1_769_860_800_000


@pytest.mark.parametrize(
    ("before_ms", "stamp_ms", "after_ms"),
    [
        (0, 0, 0),
        (0, CLOCK_TOLERANCE_MS, 0),
        (0, -CLOCK_TOLERANCE_MS, 0),
        # If a broker answers slowly, it has stamped at some moment between the request and the answer.
        (0, CLOCK_TOLERANCE_MS + 9_000, 9_000),
        (0, -CLOCK_TOLERANCE_MS, 9_000),
    ],
)
def test_a_clock_that_differs_a_little_is_accepted(before_ms: int, stamp_ms: int, after_ms: int) -> None:
    check_local(NOON_MS + before_ms, NOON_MS + stamp_ms, NOON_MS + after_ms)


@pytest.mark.parametrize(
    ("ahead_ms", "own"), [(3_600_000, "2026-01-31T13:00:00.000Z"), (-3_600_000, "2026-01-31T11:00:00.000Z")]
)
def test_a_clock_that_differs_by_an_hour_is_refused(ahead_ms: int, own: str) -> None:
    sentence = f"this machine's time is {own}, the broker's is 2026-01-31T12:00:00.000Z; set the clock that is wrong, "
    with pytest.raises(Refusal, match=sentence):
        check_local(NOON_MS + ahead_ms, NOON_MS, NOON_MS + ahead_ms)


@pytest.mark.parametrize("beyond_ms", [CLOCK_TOLERANCE_MS + 1, -CLOCK_TOLERANCE_MS - 1])
def test_the_tolerance_has_an_end(beyond_ms: int) -> None:
    with pytest.raises(Refusal):
        check_local(NOON_MS, NOON_MS + beyond_ms, NOON_MS)
