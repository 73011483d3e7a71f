"""The checksum of a slice: equal for the same rows, different for any others."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from jobs.lake.columns import checksum, columns_of
from jobs.pipelines import PIPELINES

SUM = PIPELINES["rolling_sum"]
START = datetime(2026, 11, 19, tzinfo=UTC)


def of(*rows: dict[str, Any]) -> str:
    usual = {"window_start": START, "window_end": START, "key": "a", "total": 1, "mean": 1, "events": 1}
    whole = [{name: _exact(value) for name, value in {**usual, **row}.items()} for row in rows]
    return checksum(SUM, pa.Table.from_pylist(whole, columns_of(SUM)))


def _exact(value: Any) -> Any:
    return Decimal(value) if type(value) is int else value


def test_the_order_of_rows_does_not_count() -> None:
    assert of({"key": "a"}, {"key": "b"}) == of({"key": "b"}, {"key": "a"})
    assert of() == "0" * 32


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"key": "a"}, {"key": "b"}),
        ({"total": 1}, {"total": 2}),
        # These differ only because the checksum includes the length of each value, and so its end.
        ({"key": "a1", "total": 23}, {"key": "a", "total": 123}),
        ({"key": None}, {"key": ""}),
        ({"key": None}, {"key": "-"}),
        ({"total": None, "mean": 1}, {"total": 1, "mean": None}),
    ],
)
def test_rows_that_differ_have_another_checksum(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert of(one) != of(other)
