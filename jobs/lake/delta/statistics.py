"""The statistics of a file in a table's log. Readers use them to skip files that cannot have the rows they want."""

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any

import pyarrow.parquet as pq


def statistics_of(footer: pq.FileMetaData) -> dict[str, Any]:
    """Return Delta's statistics of a file, made from its parquet footer.

    Readers take a missing count of nulls for zero. So a column gets bounds only together with such a count.
    """
    lows: dict[str, Any] = {}
    highs: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    unknown: set[str] = set()
    for group in range(footer.num_row_groups):
        for index in range(footer.num_columns):
            column = footer.row_group(group).column(index)
            name, bounds = column.path_in_schema, column.statistics
            if "." in name or bounds is None or not bounds.has_null_count:
                unknown.add(name)
                continue
            nulls[name] = nulls.get(name, 0) + bounds.null_count
            if bounds.has_min_max:
                lows[name] = min(lows.get(name, bounds.min), bounds.min)
                highs[name] = max(highs.get(name, bounds.max), bounds.max)
            elif bounds.null_count < column.num_values:
                unknown.add(name)
    return {
        "numRecords": footer.num_rows,
        "minValues": _as_json(lows, unknown),
        "maxValues": _as_json(highs, unknown),
        "nullCount": {name: count for name, count in nulls.items() if name not in unknown},
    }


def _as_json(bounds: Mapping[str, Any], unknown: set[str]) -> dict[str, Any]:
    written = {name: _bound(value) for name, value in bounds.items() if name not in unknown}
    return {name: value for name, value in written.items() if value is not None}


def _bound(value: Any) -> Any:
    if isinstance(value, bool | int):
        return value
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    if isinstance(value, Decimal):
        return None  # Readers of the JSON would take it for a DOUBLE.
    return value if isinstance(value, str) and len(value) <= 32 else None
