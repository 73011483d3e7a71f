"""Conditions that a world must meet: at each commit of final slices, and in the end. They check records, not tables."""

import json
from collections.abc import Mapping

from jobs.finality.run.folder import RunFolder
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.slices import Header, LedgerLine, State
from jobs.pipelines.slices import over_at
from tests.judges.simulated_broker import SKEW_MS, Record, id_of, is_before
from tests.judges.simulated_world import (
    MINUTE_MS,
    SUM,
    World,
    came_in_time,
    in_slice,
    is_over,
    key_of,
    slice_of,
    start_of,
)

BEGUN = (State.CLOSED, State.REOPENED, State.RECOMPUTING, State.AUDITING)


def judge_commit(world: World) -> None:
    """A slice goes from one version to the next, and holds all records landed before its header's offsets."""
    before, after = world.history[-2:]
    for name, (header, content) in after.items():
        if after[name] == before.get(name):
            continue
        old = before[name][0].version if name in before else 0
        if header.version != old + 1:
            world.defects.append(f"slice {name} went from version {old} to {header.version}")
        if not header.verdict.startswith("rolled back"):
            world.defects += _content_defects(world, header, content)


def _content_defects(world: World, header: Header, content: int) -> list[str]:
    name, defects = header.slice, []
    if not is_over(world, name):
        defects.append(f"slice {name} was published before it was over")
    there = in_slice(world.broker.landed, name)
    wanted = sum(is_before(record, header.topic_id, header.offsets) for record in there)
    if content != wanted:
        defects.append(f"slice {name} holds {content}, its offsets {wanted}")
    boundaries = (entry.boundary for entry in world.lines if entry.slice == name and entry.boundary)
    boundary = next((each for each in boundaries if each.topic_id == header.topic_id), None)
    if boundary and any(header.offsets.get(partition, 0) < end for partition, end in boundary.ends.items()):
        defects.append(f"slice {name} was published without events that came in time")
    return defects


def judge_end(world: World) -> list[str]:
    """After an undisturbed run every due slice is final or blocked, and all tables agree."""
    defects, final = list(world.defects), world.history[-1]
    newest = {entry.slice: entry for entry in world.lines}
    for name, (header, content) in final.items():
        line = newest.get(name)
        said_final = line and (line.version, line.state) == (header.version, State.FINAL)
        blocked_since = line and line.state is State.BLOCKED and line.version > header.version
        if not (said_final or blocked_since):
            defects.append(f"slice {name} is at version {header.version}, the ledger says {line}")
        if said_final and line and not header.verdict.startswith("rolled back"):
            defects += judge_late(world, header, line)
        defects += judge_topic(world, header, content)
    defects += judge_blocked(world, newest) + judge_begun(world, newest) + judge_due(world, newest)
    defects += judge_too_early(world)
    versions = {(name, header.version) for state in world.history for name, (header, _) in state.items()}
    return defects + [f"reported, but not there: {success}" for success in world.reported if success not in versions]


def judge_topic(world: World, header: Header, content: int) -> list[str]:
    """The newest messages about a slice match its final content."""
    told = {key: topic_says(world, header.slice, key) for key in (key_of(0), key_of(1))}
    wanted = {key_of(content): (header.version, content)} if content else {}
    if {key: said for key, said in told.items() if said} == wanted:
        return []
    return [f"slice {header.slice} is {content} at version {header.version}, its topic says {told}"]


def topic_says(world: World, slice_: str, key: str) -> tuple[int, int] | None:
    """Version and events of a window's newest message; None if there is no message, or the window was removed."""
    value = world.topic.get(f'["{start_of(slice_):%Y-%m-%dT%H:%M:%S}.000Z","{key}"]'.encode())
    said = json.loads(value) if value else None
    return (said["version"], said["events"]) if said else None


def judge_due(world: World, newest: Mapping[str, LedgerLine]) -> list[str]:
    """Each slice that is over is final, or blocked."""
    defects, final = [], world.history[-1]
    first = min((record.time for record in world.broker.landed), default=world.clock_ms)
    at = slice_of(first).start_ms
    while over_at(SUM, slice_of(at)) <= world.clock_ms:
        name = slice_of(at).name
        line = newest.get(name)
        if name not in final and not (line and line.state is State.BLOCKED):
            defects.append(f"slice {name} is due and not final")
        at += MINUTE_MS
    return defects


def judge_late(world: World, header: Header, line: LedgerLine) -> list[str]:
    """A final slice misses as many events as its ledger line says, and none of them had come in time."""
    forgotten = [r for r in _missed(world, header) if came_in_time(r, header.slice) and not _excused(world, header, r)]
    defects = [f"slice {header.slice} is final without {len(forgotten)} events that came in time"] if forgotten else []
    return defects + _miscounted(world, header, line)


def judge_too_early(world: World) -> list[str]:
    """Without a plan by a wrong clock, no slice becomes final before all its events that come in time have come."""
    early = [] if world.plans_ahead else [line for line in world.lines if line.in_time]
    return [f"slice {line.slice} was computed without {line.in_time} events that came in time" for line in early]


def judge_begun(world: World, newest: Mapping[str, LedgerLine]) -> list[str]:
    """Each slice that a plan has begun is published or blocked in the end, also if its run was killed."""
    final = {name: header.version for name, (header, _) in world.history[-1].items()}
    begun = {(line.slice, line.version): line for line in world.lines if line.state in BEGUN}
    return [
        f"version {version} of slice {name} was begun by run {line.run} ({line.reason}), and forgotten"
        for (name, version), line in begun.items()
        if is_over(world, name)
        and final.get(name, 0) < version
        and (newest[name].state, newest[name].version) != (State.BLOCKED, version)
    ]


def judge_blocked(world: World, newest: Mapping[str, LedgerLine]) -> list[str]:
    """A blocked slice is tried again when enough events have come since, and they are counted, too.

    Until then a person can publish it, so its run has not ended.
    """
    blocked = {name: line for name, line in newest.items() if line.state is State.BLOCKED}
    lake = PipelineLake(world.root, SUM)
    ended = [name for name, line in blocked.items() if name not in RunFolder.of(lake, line.run).left]
    defects = [f"slice {name} is blocked, and its run has ended: nobody can approve it" for name in ended]
    return defects + [defect for line in blocked.values() for defect in _miscounted(world, line, line)]


def _missed(world: World, computed: Header | LedgerLine) -> list[Record]:
    """The events of a slice that landed after it was computed, as far as late events were counted."""
    counted = world.counted
    behind = in_slice(world.broker.landed[computed.events_version or 0 :], computed.slice)
    return [record for record in behind if counted and is_before(record, counted.topic_id, counted.ends)]


def _miscounted(world: World, computed: Header | LedgerLine, line: LedgerLine) -> list[str]:
    """Compare a ledger line with the events that a slice was computed without, and those of them that came in time."""
    missed = _missed(world, computed)
    sure = [record for record in missed if not _excused(world, computed, record)]
    again = [r for r in in_slice(world.broker.landed, computed.slice) if _may_count_again(world, r)]
    least = len(sure), sum(came_in_time(record, line.slice) for record in sure)
    most = len(missed) + len(again), sum(came_in_time(record, line.slice) for record in missed)
    said = line.late, line.in_time or 0
    if least[0] <= said[0] <= most[0] and least[1] <= said[1] <= most[1]:
        return []
    return [f"{line.state} slice {line.slice} says {said} events came late and in time, it missed {least} to {most}"]


def _excused(world: World, computed: Header | LedgerLine, record: Record) -> bool:
    """Whether an event may stay uncounted, as the offsets of a re-created topic do not continue those of the old one.

    An event that came while the topic was re-created may stay uncounted in three cases:
    - It belongs to the old topic, and no plan has seen it.
    - It belongs to the new topic, and ingest landed it after records that came later.
    - By its stamp it had already come when the slice was computed.

    So may an event if the slice's run wrote its ledger line after the re-creation: that line leaves out what others had
    counted.
    """
    if record.topic > 1 and (computed.slice, computed.version) in world.told_since:
        return True
    if id_of(record.topic) not in world.counts:
        return True
    first, last = world.counts[id_of(record.topic)]
    counted = world.counted
    if counted and last != counted and record.offset >= last.ends.get(record.partition, 0):
        return True
    if first.since_ms and record.offset >= first.ends.get(record.partition, 0) and record.arrival <= first.since_ms:
        return True
    at_ms = computed.as_of_ms if isinstance(computed, Header) else computed.at_ms
    return record.topic > 1 and record.arrival <= at_ms + SKEW_MS


def _may_count_again(world: World, record: Record) -> bool:
    """Whether the first count of a new topic may find an event that is already counted: it goes by arrival stamps."""
    counted = world.counted
    if counted is None or counted.topic_id == id_of(record.topic) or id_of(record.topic) not in world.counts:
        return False
    return record.arrival > world.counts[id_of(record.topic)][1].at_ms
