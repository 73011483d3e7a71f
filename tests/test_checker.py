"""The judge is judged: a sound history has no defect, and each planted defect is named."""

import copy
import json
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from tests import checker
from tests.oracle import Record, aggregate, windows_of

T0 = 1_790_000_000_000
Rows = list[dict[str, Any]]


def records() -> list[Record]:
    return [
        Record(
            partition=n % 2,
            offset=n // 2,
            arrival_ms=T0 + n * 100,
            key=b"k%d" % (n % 3),
            value=b'{"id":%d,"ts":%d,"value":%d.5}' % (n, T0 + n * 100, n) if n % 5 else b"\xff",
        )
        for n in range(40)
    ]


def at(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def landed() -> Rows:
    return [
        {
            "partition": record.partition,
            "offset": record.offset,
            "event_time": at(record.arrival_ms) if n % 5 else None,
            "key": f"k{n % 3}" if n % 5 else None,
            "id": n if n % 5 else None,
            "value": Decimal(n) + Decimal("0.5") if n % 5 else None,
            "reason": None if n % 5 else "invalid UTF-8",
            "raw": None if n % 5 else b"\xff",
            "raw_key": None if n % 5 else b"k%d" % (n % 3),
        }
        for n, record in enumerate(records())
    ]


def note(batch: int, ranges: dict[str, list[int]], epoch: int = 1) -> dict[str, Any]:
    topic = {"topic_id": "t", "offsets": ranges}
    return {"cluster_id": "c", "write_id": "w", "batch": batch, "epoch": epoch, "topics": {"numbers": topic}}


def notes() -> list[dict[str, Any]]:
    return [note(0, {"0": [0, 10], "1": [0, 5]}), note(1, {"0": [10, 20], "1": [5, 20]})]


def live_rows() -> Rows:
    """Two batches of rolling_sum, made with the oracle over all records and over the first half."""
    rows: Rows = []
    events = [checker.oracle.accept("numbers", record) for record in records()]
    seen: list[Any] = []
    for batch, (first, last) in enumerate([(0, 10), (10, 20)]):
        new = [event for event in events if event and first <= event.record.offset < last]
        seen += new
        touched = {(start, e.columns["key"]) for e in new for start in windows_of(e.event_ms, 1000, 1000)}
        ranges = {"0": [first, last], "1": [first, last]}
        rows.append({"slice": "batches", "batch": batch, "epoch": 1, "offsets": json.dumps(ranges), "watermark": at(0)})
        rows += [
            {"slice": "s", "batch": batch, "epoch": 1, "window_start": at(start), "key": key, **measures}
            for (start, key), measures in aggregate("rolling_sum", seen).items()
            if (start, key) in touched
        ]
    return rows


def test_a_sound_history_has_no_defect() -> None:
    assert checker.ranges_defects(notes(), "numbers") == []
    assert checker.coverage_defects(landed(), records()) == []
    assert checker.content_defects("numbers", landed(), records()) == []
    assert checker.rows_defects("rolling_sum", live_rows(), records()) == []


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (lambda rows: rows.pop(7), "lost: partition 1 offset 3"),
        (lambda rows: rows.append(rows[7]), "double: partition 1 offset 3"),
        (lambda rows: rows[7].update(partition=5), "invented: partition 5 offset 3"),
    ],
)
def test_coverage(plant: Callable[[Rows], object], named: str) -> None:
    rows = landed()
    plant(rows)
    assert named in checker.coverage_defects(rows, records())


@pytest.mark.parametrize(
    "plant",
    [
        lambda rows: rows[7].update(value=Decimal(8)),
        lambda rows: rows[7].update(key="k0"),
        lambda rows: rows[7].update(event_time=at(T0)),
        lambda rows: rows[7].update(reason="no reason"),
        lambda rows: rows[5].update(reason=None),
        lambda rows: rows[5].update(raw=b""),
        lambda rows: (rows[7].update(offset=4), rows[9].update(offset=3)),
    ],
)
def test_content(plant: Callable[[Rows], object]) -> None:
    rows = landed()
    plant(rows)
    assert checker.content_defects("numbers", rows, records())


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (lambda found: found.insert(1, copy.deepcopy(found[0])), "overlap"),
        (lambda found: found.pop(0), "gap"),
        (lambda found: found[1]["topics"]["numbers"]["offsets"].update({"1": [4, 20]}), "overlap"),
        (lambda found: found[1]["topics"]["numbers"]["offsets"].update({"1": [6, 20]}), "gap"),
        (lambda found: found[1]["topics"]["numbers"].update(topic_id="other"), "identities"),
        (lambda found: found[1].update(write_id="other"), "identities"),
        (lambda found: found[0].update(epoch=2), "epoch went back"),
    ],
)
def test_ranges(plant: Callable[[list[dict[str, Any]]], object], named: str) -> None:
    found = notes()
    plant(found)
    assert any(named in defect for defect in checker.ranges_defects(found, "numbers"))


@pytest.mark.parametrize(
    "plant",
    [
        lambda rows: rows.pop(3),
        lambda rows: rows.append(dict(rows[3])),
        lambda rows: rows[3].update(total=rows[3]["total"] + 1),
        lambda rows: rows[-1].update(events=rows[-1]["events"] + 1),
        lambda rows: rows[-1].update(mean=Decimal(0)),
        lambda rows: rows[-1].update(key="other"),
        lambda rows: rows[0].update(offsets='{"0":[0,9],"1":[0,10]}'),
        lambda rows: rows[0].update(watermark=at(T0 + 10_000)),
        lambda rows: rows.append(dict(rows[0])),
    ],
)
def test_live_rows(plant: Callable[[Rows], object]) -> None:
    rows = live_rows()
    plant(rows)
    assert checker.rows_defects("rolling_sum", rows, records())
