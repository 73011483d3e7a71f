"""Tests of the judge: a sound history has no defect, and each planted defect is named."""

import copy
import json
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from tests.judges import checker
from tests.judges.oracle import Record, accept, aggregate, windows_of

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
    """Two batches of rolling_sum, made with the oracle: the first over half of the records, the second over all."""
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


def reset(ranges: dict[str, list[int]], epoch: int, job: str, put_aside: str = "w") -> dict[str, Any]:
    return {**note(0, ranges, epoch), "batch": None, "job": job, "write_id": put_aside}


def after(batch: dict[str, Any], write_id: str = "w2") -> dict[str, Any]:
    return {**batch, "write_id": write_id}


def landed_notes() -> list[dict[str, Any]]:
    """Like `notes`, but a first reset books the offsets 8 to 12 of partition 1 as lost; a second one loses nothing."""
    return [
        note(0, {"0": [0, 10], "1": [0, 8]}),
        reset({"0": [10, 10], "1": [8, 12]}, 2, "ingest"),
        reset({"0": [10, 10], "1": [12, 12]}, 3, "ingest"),
        after(note(0, {"0": [10, 20], "1": [12, 20]}, 4)),
    ]


def live_notes() -> list[dict[str, Any]]:
    """The stream goes back to offset 3, and on from there."""
    return [*notes(), reset({"0": [3, 3], "1": [3, 3]}, 2, "sum"), after(note(0, {"0": [3, 9], "1": [3, 9]}, 3))]


def test_resets_are_no_defects() -> None:
    assert checker.ranges_defects(landed_notes(), "numbers") == []
    assert checker.ranges_defects(live_notes(), "numbers") == []
    booked = checker.booked_as_lost(landed_notes(), "numbers")
    assert booked == {(1, 8), (1, 9), (1, 10), (1, 11)}
    rows = [row for row in landed() if (row["partition"], row["offset"]) not in booked]
    assert checker.coverage_defects(rows, records(), booked) == []
    assert checker.booked_as_lost(notes(), "numbers") == set()


def test_a_topic_that_was_re_created_begins_at_its_first_offset() -> None:
    found = [*notes(), reset({"0": [0, 0], "1": [0, 2]}, 2, "ingest"), after(note(0, {"0": [0, 5], "1": [2, 5]}, 3))]
    for later in found[2:]:
        later["topics"]["numbers"]["topic_id"] = "new"
    assert checker.ranges_defects(found, "numbers") == []
    assert checker.booked_as_lost(found, "numbers") == {(1, 0), (1, 1)}
    found[3]["topics"]["numbers"]["topic_id"] = "newer"
    assert any("identities" in defect for defect in checker.ranges_defects(found, "numbers"))
    assert checker.coverage_defects(landed() + landed(), records() + records()) == []
    assert checker.content_defects("numbers", landed() + landed(), records() + records()) == []


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (
            lambda found: found[1]["topics"]["numbers"]["offsets"].update({"1": [9, 12]}),
            "gap: partition 1 goes on at 9",
        ),
        (lambda found: found[1]["topics"]["numbers"]["offsets"].update({"1": [7, 12]}), "overlap: partition 1 goes on"),
        (lambda found: found[1]["topics"]["numbers"]["offsets"].update({"1": [8, 7]}), "backwards: partition 1"),
        (lambda found: found.pop(1), "gap: partition 1 goes on at 12"),
        (lambda found: found[3]["topics"]["numbers"]["offsets"].update({"1": [13, 20]}), "gap: partition 1"),
        (lambda found: found[3]["topics"]["numbers"]["offsets"].update({"1": [11, 20]}), "overlap: partition 1"),
        (lambda found: found[3].update(write_id="w"), "put aside: w"),
        (lambda found: found[2].update(write_id="w2"), "put aside: w2"),
        (lambda found: found[2].update(epoch=1), "epoch went back"),
        (lambda found: found[3]["topics"]["numbers"].update(topic_id="other"), "identities"),
    ],
)
def test_ranges_around_a_reset(plant: Callable[[list[dict[str, Any]]], object], named: str) -> None:
    found = landed_notes()
    plant(found)
    assert any(named in defect for defect in checker.ranges_defects(found, "numbers"))


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (lambda found: found[3]["topics"]["numbers"]["offsets"].update({"1": [4, 9]}), "gap"),
        (lambda found: found[3]["topics"]["numbers"]["offsets"].update({"1": [2, 9]}), "overlap"),
        (lambda found: found[2]["topics"]["numbers"]["offsets"].update({"1": [2, 3]}), "overlap"),
        (lambda found: found[3].update(write_id="w"), "put aside: w"),
    ],
)
def test_ranges_of_a_live_table_around_a_reset(plant: Callable[[list[dict[str, Any]]], object], named: str) -> None:
    found = live_notes()
    plant(found)
    assert any(named in defect for defect in checker.ranges_defects(found, "numbers"))


def test_only_what_is_booked_may_be_missing_and_nothing_else_of_it_may_be_there() -> None:
    rows, booked = landed(), {(1, 8)}
    assert "booked as lost, but there: partition 1 offset 8" in checker.coverage_defects(rows, records(), booked)
    left = [row for row in rows if (row["partition"], row["offset"]) not in {(1, 8), (1, 9)}]
    assert checker.coverage_defects(left, records(), booked) == ["lost: partition 1 offset 9"]


def test_rows_from_before_a_reset_are_named() -> None:
    assert checker.cleared_defects(live_rows(), notes()) == []
    assert checker.cleared_defects([{"epoch": 3}], live_notes()) == []
    assert checker.cleared_defects([{"epoch": 1}], live_notes()) == [
        "not cleared by the reset of epoch 2: {'epoch': 1}"
    ]


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


def final_rows() -> Rows:
    """The accepted events in slices of one second, as recompute writes them; the first slice is empty."""
    slices = [checker._name(T0 + second * 1000) for second in range(-1, 4)]
    windows = aggregate("rolling_sum", windows_of_events())
    rows: Rows = []
    for name in slices:
        start = checker._start(name)
        of_slice = {at_: row for at_, row in windows.items() if start <= at_[0] < start + 1000}
        rows += [
            {"window_start": at(window), "key": key, **row, "version": 1, "slice": name}
            for (window, key), row in of_slice.items()
        ]
        inside = sum(start <= event.event_ms < start + 1000 for event in windows_of_events())
        said = {
            "slice_seconds": 1,
            "offsets": {"0": 20, "1": 20},
            "version": 1,
            "rows": len(of_slice),
            "events": inside,
        }
        rows.append({"final_slice": name, "header": json.dumps(said), "slice": f"headers-{name[:8]}"})
    return rows


# The moment when the last of the five slices is over, so that no late event is awaited any more.
DUE_MS = T0 + 4_000 + checker.ALLOWED_LATENESS_MS + checker.CLOCK_SKEW_MS


def final_defects(
    rows: Rows, due_ms: int = DUE_MS, blocked: Collection[str] = (), more: Collection[Record] = ()
) -> list[str]:
    return checker.final_rows_defects("rolling_sum", rows, [*records(), *more], due_ms=due_ms, blocked=blocked)


def windows_of_events() -> list[Any]:
    return [event for record in records() if (event := accept("numbers", record))]


def change_header(of: Rows, at_: int, **changes: Any) -> None:
    headers = [row for row in of if row.get("final_slice")]
    headers[at_]["header"] = json.dumps({**json.loads(headers[at_]["header"]), **changes})


def test_sound_final_rows_have_no_defect() -> None:
    rows = final_rows()
    assert sum("window_start" in row for row in rows) > 8
    assert final_defects(rows) == []


def test_rows_of_many_slices_in_one_folder_are_judged_by_their_windows() -> None:
    rows = final_rows()
    for row in rows:
        if "window_start" in row:
            row["slice"] = f"rows-{row['slice'][:8]}-0123abcd"
    assert final_defects(rows) == []
    rows.append(dict(rows[1]))
    assert any("double: 1 windows" in defect for defect in final_defects(rows))


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (lambda rows: rows.pop(1), "missing: slice"),
        (lambda rows: rows.append(dict(rows[1])), "double: 1 windows"),
        (lambda rows: rows[1].update(key="other"), "invented: slice"),
        (lambda rows: rows[1].update(total=rows[1]["total"] + 1), "wrong: slice"),
        (lambda rows: rows[1].update(version=2), "mixed: slice"),
        (lambda rows: change_header(rows, 2, version=2), "mixed: slice"),
        (lambda rows: change_header(rows, 2, rows=99), "says 99 rows"),
        (lambda rows: change_header(rows, 2, events=99), "says 99 events"),
        # An event that landed after the header's offsets must not be in the slice.
        (lambda rows: change_header(rows, 2, offsets={"0": 3, "1": 3}), "slice"),
        (lambda rows: rows.remove(next(row for row in rows[3:] if row.get("final_slice"))), "rows without a header"),
        (lambda rows: rows.__setitem__(slice(None), [r for r in rows if "3" not in named_slice(r)]), "left out: slice"),
        (lambda rows: rows.clear(), "nothing is final"),
    ],
)
def test_final_rows(plant: Callable[[Rows], object], named: str) -> None:
    rows = final_rows()
    plant(rows)
    defects = final_defects(rows)
    assert any(named in defect for defect in defects), defects


def named_slice(row: dict[str, Any]) -> str:
    """The number of the row's slice, counted from T0 as 1."""
    name = str(row.get("final_slice") or row["slice"])
    return str((checker._start(name) - T0) // 1000 + 1) if "window_start" in row or row.get("final_slice") else ""


def test_a_blocked_slice_may_be_left_out() -> None:
    rows = final_rows()
    gone = checker._name(T0 + 1000)
    left = [row for row in rows if gone not in (row["slice"], row.get("final_slice"))]
    assert final_defects(left) == [f"left out: slice {gone}"]
    assert final_defects(left, blocked={gone}) == []


@pytest.mark.parametrize("missing", [{-1}, {0}, {1}, {2}, {3}, {2, 3}, {1, 2, 3}, {-1, 0}, {-1, 1, 3}])
def test_a_slice_that_is_missing_is_named_wherever_it_lies(missing: set[int]) -> None:
    """The head, the middle, the tail; also the case that all slices after the second are missing."""
    gone = {checker._name(T0 + second * 1000) for second in missing}
    left = [row for row in final_rows() if gone.isdisjoint((row["slice"], row.get("final_slice")))]
    # Before the first event no slice is due, unless an earlier slice has a header.
    named = {name for name in gone if name != checker._name(T0 - 1000)}
    assert final_defects(left) == [f"left out: slice {name}" for name in sorted(named)]
    assert final_defects(left, blocked=gone) == []


@pytest.mark.parametrize(("offset", "left_out"), [(19, 1), (20, 0)])
def test_an_older_event_makes_slices_due_only_if_a_plan_knew_it(offset: int, left_out: int) -> None:
    """The offsets of the headers end before 20. A record from there on arrived after the last plan."""
    old = Record(offset=offset, arrival_ms=DUE_MS, value=b'{"id":99,"ts":%d,"value":1}' % (T0 - 2000))
    assert final_defects(final_rows(), more=[old]) == [f"left out: slice {checker._name(T0 - 2000)}"] * left_out


def test_a_slice_that_was_not_over_at_the_last_plan_may_be_missing() -> None:
    last = checker._name(T0 + 3000)
    left = [row for row in final_rows() if last not in (row["slice"], row.get("final_slice"))]
    assert final_defects(left, due_ms=DUE_MS - 1) == []
    assert final_defects(left, due_ms=DUE_MS) == [f"left out: slice {last}"]
    nobody = [row for row in final_rows() if row.get("final_slice") == checker._name(T0 - 1000)]
    assert len(final_defects(nobody, due_ms=DUE_MS)) == 4
