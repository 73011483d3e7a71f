"""The independent judge: it replays the Delta log, reads Kafka again, and names every defect that it finds."""

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.judges import oracle
from tests.judges.oracle import Record, State

BATCHES = "batches"
WATERMARK_DELAY_MS = 5_000
# How long after its last window a slice waits for late events, and how far the clocks of two brokers may differ.
ALLOWED_LATENESS_MS = 60_000
CLOCK_SKEW_MS = 5_000
_SLICE = "%Y%m%dT%H%M%SZ"


@dataclass
class Table:
    """The content of a Delta log, read without the product's code."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)


def read_table(path: Path) -> Table:
    """Replay the log; rows carry their partition column."""
    files: dict[str, dict[str, str]] = {}
    table = Table()
    for entry in sorted((path / "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in entry.read_text().splitlines()]
        for action in actions:
            if "add" in action:
                files[action["add"]["path"]] = action["add"]["partitionValues"]
            if "remove" in action:
                files.pop(action["remove"]["path"], None)
        is_batch = any("txn" in action for action in actions)
        notes = [
            json.loads(action["commitInfo"]["userMetadata"])
            for action in actions
            if "userMetadata" in action.get("commitInfo", {})
        ]
        table.notes += [note for note in notes if is_batch or is_reset(note)]
    for name, partition in files.items():
        table.rows += [{**row, **partition} for row in pq.ParquetFile(path / name).read().to_pylist()]
    return table


def is_reset(note: dict[str, Any]) -> bool:
    return "batch" in note and note["batch"] is None


def ranges_defects(notes: Iterable[dict[str, Any]], topic: str) -> list[str]:
    """I2: the ranges of the commits are gapless and do not overlap; epochs and identities never go back.

    A reset of `ingest` books a range as lost and continues behind it. A reset of any other job begins anew. Each reset
    brings a new writer.
    """
    defects: list[str] = []
    ends: dict[str, int] = {}
    epoch, topic_id = 0, None
    writer: tuple[str, str, str] | None = None
    retired: set[str] = set()
    for note in notes:
        ranges = note["topics"][topic]
        identity = (note["cluster_id"], ranges["topic_id"], note["write_id"])
        if note["epoch"] < epoch:
            defects.append(f"epoch went back from {epoch} to {note['epoch']}")
        epoch = max(epoch, note["epoch"])
        if is_reset(note):
            retired |= {note["write_id"], writer[2] if writer else ""}
            writer = None
            ends = _ends_at_reset(note, ranges, ends if topic_id == identity[:2] else {})
        elif note["write_id"] in retired:
            defects.append(f"a checkpoint wrote again that a reset had put aside: {note['write_id']}")
        elif identity != (writer or identity) or topic_id not in (None, identity[:2]):
            defects.append(f"commits of two identities: {identity} after {writer or topic_id}")
        writer, topic_id = None if is_reset(note) else identity, identity[:2]
        defects += _range_defects(ranges["offsets"], ends)
        ends |= {partition: end for partition, (_, end) in ranges["offsets"].items()}
    return defects


def _ends_at_reset(note: dict[str, Any], ranges: dict[str, Any], ends: dict[str, int]) -> dict[str, int]:
    """Where a reset's ranges must begin: a landed table continues, a live one begins anywhere and books nothing."""
    return ends if note["job"] == "ingest" else {partition: end for partition, (_, end) in ranges["offsets"].items()}


def _range_defects(offsets: dict[str, list[int]], ends: dict[str, int]) -> list[str]:
    defects = []
    for partition, (start, end) in offsets.items():
        expected = ends.get(partition, 0)
        if start != expected:
            kind = "overlap" if start < expected else "gap"
            defects.append(f"{kind}: partition {partition} goes on at {start}, not at {expected}")
        if end < start:
            defects.append(f"backwards: partition {partition} goes from {start} to {end}")
    return defects


def booked_as_lost(notes: Iterable[dict[str, Any]], topic: str) -> set[tuple[int, int]]:
    """Partition and offset of all records that resets have skipped in the topic as it is now."""
    resets = [note["topics"][topic] for note in notes if is_reset(note)]
    ranges = [r["offsets"] for r in resets if r["topic_id"] == resets[-1]["topic_id"]]
    return {(int(partition), at) for found in ranges for partition, span in found.items() for at in range(*span)}


def coverage_defects(
    rows: Iterable[dict[str, Any]], records: Iterable[Record], booked: Collection[tuple[int, int]] = ()
) -> list[str]:
    """I1: each offset is there exactly once, except that offsets booked as lost are not there.

    Records of a re-created topic may be given together with those of the earlier topic.
    """
    landed = Counter((row["partition"], row["offset"]) for row in rows)
    wanted = Counter((record.partition, record.offset) for record in records)
    return [
        *(f"lost: partition {p} offset {o}" for p, o in sorted(set(wanted - landed) - set(booked))),
        *(f"invented: partition {p} offset {o}" for p, o in sorted(set(landed) - set(wanted) - set(booked))),
        *(f"double: partition {p} offset {o}" for (p, o), n in sorted((landed - wanted).items()) if (p, o) in wanted),
        *(f"booked as lost, but there: partition {p} offset {o}" for p, o in sorted(set(landed) & set(booked))),
    ]


def content_defects(source: str, rows: Iterable[dict[str, Any]], records: Iterable[Record]) -> list[str]:
    """Each row matches its record: it has the same columns, or a reason and the raw bytes."""
    by_offset: dict[tuple[int, int], list[Record]] = defaultdict(list)
    for record in records:
        by_offset[record.partition, record.offset].append(record)
    defects = []
    for row in rows:
        candidates = by_offset[row["partition"], row["offset"]]
        found = [_content_defect(source, row, record) for record in candidates]
        if found and None not in found:
            defects.append(f"{row['partition']}, {row['offset']}: {found[0]}")
    return defects


def _content_defect(source: str, row: dict[str, Any], record: Record) -> str | None:
    event = oracle.accept(source, record)
    if event is None:
        if row["reason"] is None or row["raw"] != record.value or row["raw_key"] != record.key:
            return f"{record.value!r} should be rejected, with its bytes: {row}"
    elif row["reason"] is not None:
        return f"{record.value!r} should be accepted, reason={row['reason']!r}"
    elif {name: row[name] for name in event.columns} != event.columns or _ms(row["event_time"]) != event.event_ms:
        return f"{row} is not {event.columns} at {event.event_ms}"
    return None


def landed_defects(lake: Path, source: str, records: list[Record]) -> list[str]:
    """Every defect of `events/<source>`."""
    table = read_table(lake / "events" / source)
    return [
        *ranges_defects(table.notes, source),
        *coverage_defects(table.rows, records, booked_as_lost(table.notes, source)),
        *content_defects(source, table.rows, records),
    ]


def live_defects(lake: Path, pipeline: str, records: list[Record]) -> list[str]:
    """Every defect of `live/<pipeline>`: each row must follow from the events counted so far, batch after batch."""
    table = read_table(lake / "live" / pipeline)
    return [
        *ranges_defects(table.notes, oracle.SOURCE_OF[pipeline]),
        *cleared_defects(table.rows, table.notes),
        *rows_defects(pipeline, table.rows, records),
    ]


def cleared_defects(rows: Iterable[dict[str, Any]], notes: Iterable[dict[str, Any]]) -> list[str]:
    """A reset leaves no row of earlier epochs."""
    cleared = max((note["epoch"] for note in notes if is_reset(note)), default=0)
    return [f"not cleared by the reset of epoch {cleared}: {row}" for row in rows if row["epoch"] < cleared]


def rows_defects(pipeline: str, rows: list[dict[str, Any]], records: list[Record]) -> list[str]:
    """Replay the batch rows: find the events that each batch counted, and compare every window that they touched."""
    by_partition: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        by_partition[record.partition].append(record)
    states: dict[tuple[int, str], State] = defaultdict(State)
    defects = []
    batches = [row for row in rows if row["slice"] == BATCHES]
    if len({row["batch"] for row in batches}) != len(batches):
        defects.append("a batch is written twice")
    for batch in sorted(batches, key=lambda row: row["batch"]):
        counted = _in_ranges(by_partition, json.loads(batch["offsets"]))
        touched = _count(pipeline, counted, _ms(batch["watermark"]), states)
        written = [row for row in rows if row["batch"] == batch["batch"] and row["slice"] != BATCHES]
        found = [f"batch {batch['batch']}: {defect}" for defect in _batch_defects(pipeline, written, touched, states)]
        defects += found
    return defects


def _count(
    pipeline: str, records: list[Record], watermark_ms: int, states: dict[tuple[int, str], State]
) -> set[tuple[int, str]]:
    """Add the records that the batch counted, and return the windows and keys that they touched."""
    size_ms, slide_ms = oracle.SHAPES[pipeline]
    touched = set()
    for record in records:
        event = oracle.accept(oracle.SOURCE_OF[pipeline], record)
        if event is None or event.event_ms > record.arrival_ms + WATERMARK_DELAY_MS:
            continue
        open_windows = [s for s in oracle.windows_of(event.event_ms, size_ms, slide_ms) if s + size_ms > watermark_ms]
        for at in ((start, part) for start in open_windows for part in oracle.contributions(pipeline, event)):
            start, (key, amount) = at
            states[start, key].total += amount
            states[start, key].events += 1
            touched.add((start, key))
    return touched


def _batch_defects(
    pipeline: str, rows: list[dict[str, Any]], touched: set[tuple[int, str]], states: dict[tuple[int, str], State]
) -> list[str]:
    key_column = "word" if pipeline == "word_count" else "key"
    found = {(_ms(row["window_start"]), row[key_column]): row for row in rows}
    defects = ["a window is written twice"] if len(found) != len(rows) else []
    defects += [f"no row for {at}" for at in sorted(touched - set(found))]
    defects += [f"row for {at} without an event" for at in sorted(set(found) - touched)]
    for at in sorted(touched & set(found)):
        wanted = oracle.measures(pipeline, states[at])
        if {name: found[at][name] for name in wanted} != wanted:
            defects.append(f"{at}: {found[at]} should be {wanted}")
    return defects


def current_windows(pipeline: str, rows: list[dict[str, Any]]) -> dict[tuple[int, str], dict[str, Any]]:
    """The newest row of each window and key, by epoch, then batch."""
    key_column = "word" if pipeline == "word_count" else "key"
    windows = [row for row in rows if row["slice"] != BATCHES]
    windows.sort(key=lambda row: (row["epoch"], row["batch"]))
    return {(_ms(row["window_start"]), row[key_column]): row for row in windows}


def _in_ranges(by_partition: dict[int, list[Record]], ranges: dict[str, list[int]]) -> list[Record]:
    return [
        record
        for partition, (start, end) in ranges.items()
        for record in by_partition[int(partition)]
        if start <= record.offset < end
    ]


def _ms(moment: datetime) -> int:
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return round(aware.timestamp() * 1000)


def final_defects(
    lake: Path, pipeline: str, records: list[Record], *, due_ms: int, blocked: Collection[str] = ()
) -> list[str]:
    """Every defect of a lake's final slices."""
    rows = read_table(lake / "final" / pipeline).rows
    return final_rows_defects(pipeline, rows, records, due_ms=due_ms, blocked=blocked)


def final_rows_defects(
    pipeline: str, rows: list[dict[str, Any]], records: list[Record], *, due_ms: int, blocked: Collection[str] = ()
) -> list[str]:
    """Every final slice holds the oracle's result for the events within its header's offsets, and no slice is left out.

    ``due_ms`` is the moment, by the broker's clock, of the last plan that looked at all slices. Each slice that was
    over by then must be final. The newest header cannot give this moment: the last slices may be the missing ones.
    Slices are due from the first event on that lies within the offsets of any header. An older event that arrived
    after the last plan was not known to it.
    """
    headers = {row["final_slice"]: json.loads(row["header"]) for row in rows if row.get("final_slice")}
    windows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row.get("window_start") is not None:
            windows[_slice_of(row, headers)].append(row)
    defects = [f"rows without a header: slice {name}" for name in sorted(set(windows) - set(headers))]
    events = [event for record in records if (event := oracle.accept(oracle.SOURCE_OF[pipeline], record))]
    for name, header in headers.items():
        defects += _slice_defects(pipeline, name, header, windows[name], events)
    return defects + _left_out(pipeline, headers, events, due_ms, blocked)


def _slice_of(row: dict[str, Any], headers: dict[str, dict[str, Any]]) -> str:
    """The slice of a final row: that of its folder or, where rows of many slices are folded, that of its window."""
    if not str(row["slice"]).startswith("rows-") or not headers:
        return str(row["slice"])
    length = next(iter(headers.values()))["slice_seconds"] * 1000
    start_ms = round(row["window_start"].timestamp() * 1000)
    return _name(start_ms - start_ms % length)


def _left_out(
    pipeline: str,
    headers: dict[str, dict[str, Any]],
    events: list[oracle.Event],
    due_ms: int,
    blocked: Collection[str],
) -> list[str]:
    """I6: from the first event on that a plan knew, each slice that was over at ``due_ms`` is final, or blocked."""
    if not headers:
        return ["nothing is final"] if events else []
    length = next(iter(headers.values()))["slice_seconds"] * 1000
    known = [event.event_ms for header in headers.values() for event in _counted(header, events)]
    first = min([_start(min(headers)), *known])
    size_ms, slide_ms = oracle.SHAPES[pipeline]
    # A slice that begins later was not over yet.
    last = due_ms - (size_ms - slide_ms) - ALLOWED_LATENESS_MS - CLOCK_SKEW_MS - length
    behind = max(_start(max(headers)), last + 1)
    due = {_name(start) for start in range(first - first % length, behind, length)}
    return [f"left out: slice {name}" for name in sorted(due - set(headers) - set(blocked))]


def _start(name: str) -> int:
    return round(datetime.strptime(name, _SLICE).replace(tzinfo=UTC).timestamp() * 1000)


def _name(start_ms: int) -> str:
    return datetime.fromtimestamp(start_ms / 1000, UTC).strftime(_SLICE)


def _counted(header: dict[str, Any], events: list[oracle.Event]) -> list[oracle.Event]:
    """The events within the offsets of a slice's header."""
    ends = {int(partition): offset for partition, offset in header["offsets"].items()}
    return [event for event in events if event.record.offset < ends.get(event.record.partition, 0)]


def _slice_defects(
    pipeline: str, name: str, header: dict[str, Any], rows: list[dict[str, Any]], events: list[oracle.Event]
) -> list[str]:
    start = _start(name)
    end = start + header["slice_seconds"] * 1000
    counted = _counted(header, events)
    wanted = {at: row for at, row in oracle.aggregate(pipeline, counted).items() if start <= at[0] < end}
    key = "word" if pipeline == "word_count" else "key"
    found = {(_ms(row["window_start"]), row[key]): row for row in rows}
    defects = [f"double: {len(rows) - len(found)} windows of slice {name}"] if len(found) < len(rows) else []
    defects += [f"missing: slice {name} window {at}" for at in sorted(set(wanted) - set(found))]
    defects += [f"invented: slice {name} window {at}" for at in sorted(set(found) - set(wanted))]
    for at in sorted(set(found) & set(wanted)):
        said = {measure: found[at][measure] for measure in wanted[at]}
        if said != wanted[at]:
            defects.append(f"wrong: slice {name} window {at} is {said}, not {wanted[at]}")
    versions = {row["version"] for row in rows} - {header["version"]}
    if versions:
        defects.append(f"mixed: slice {name} has versions {versions} beside {header['version']}")
    if header["rows"] != len(rows):
        defects.append(f"counts: slice {name} says {header['rows']} rows, has {len(rows)}")
    inside = sum(start <= event.event_ms < end for event in counted)
    if header["events"] != inside:
        defects.append(f"counts: slice {name} says {header['events']} events, has {inside}")
    return defects
