"""Decide whether a stream may begin: its checkpoint, its table and its topic must agree.

Spark itself compares offsets only. It does not notice that a topic was re-created, if the new one has grown past the
offset of the stream. Nor does it notice that a table or a checkpoint was restored from an older backup. `check_start`
is pure: it reads its arguments only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jobs.broker.kafka import TopicState
from jobs.control.checkpoint import Checkpoint, Offsets, reset_command
from jobs.lake.stream_tables import Note
from jobs.refusal import Refusal

# Spark's number for the earliest offset.
EARLIEST = -2
# Spark's options on which the state in a checkpoint depends, each with the setting by which a user changes it.
_BOUND = {
    "spark.sql.shuffle.partitions": "SPARK_SHUFFLE_PARTITIONS",
    "spark.sql.streaming.stateStore.providerClass": "spark.sql.streaming.stateStore.providerClass",
}


@dataclass(frozen=True, kw_only=True)
class CheckpointProgress:
    """How far a checkpoint got: the last batch planned and the last one committed.

    ``resume`` is where reading goes on: a batch that was planned but not committed is read again. ``reached`` is the
    end of the last planned batch, and ``ends`` has the ends of both batches. ``first`` is where the query began, once
    it has looked at its topic. ``conf`` has the settings that Spark keeps for the life of the checkpoint.
    """

    write_id: str
    planned: int | None = None
    committed: int | None = None
    resume: Offsets = field(default_factory=dict)
    reached: Offsets = field(default_factory=dict)
    ends: Mapping[int, Offsets] = field(default_factory=dict)
    first: Offsets | None = None
    conf: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "CheckpointProgress | None":
        """Read a checkpoint; None if it does not exist, a `Refusal` if it is damaged."""
        if not checkpoint.exists():
            return None
        checkpoint.check()
        planned, committed = checkpoint.last_planned(), checkpoint.last_committed()
        if planned is None:
            return cls(write_id=checkpoint.query_id(), first=checkpoint.first())
        ends = {batch: checkpoint.planned(batch).ends for batch in (planned, committed) if batch is not None}
        return cls(
            write_id=checkpoint.query_id(),
            planned=planned,
            committed=committed,
            resume=ends[planned] if planned == committed else checkpoint.starts(planned),
            reached=ends[planned],
            ends=ends,
            first=checkpoint.first(),
            conf=checkpoint.planned(planned).conf,
        )


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a stream without a checkpoint begins, and the topic as it was when the start was allowed.

    ``noted_ends``: the end offsets in the table's newest `Note`, the metadata of a commit; empty if the table has no
    note. If the stream has no checkpoint, a reset wrote this note: `check_start` refuses any other.
    """

    topic: TopicState
    noted_ends: Mapping[int, int]

    @classmethod
    def of(cls, name: str, topics: Mapping[str, TopicState], note: Note | None) -> "Start":
        """The start of a stream; ``note`` is the newest of its table."""
        return cls(topic=topics[name], noted_ends=note.ends.get(name, {}) if note else {})

    @property
    def begins(self) -> dict[int, int]:
        """An offset for every partition, as Spark requires; empty if the table has no note.

        >>> topic = TopicState(cluster_id="c", topic_id="t1", partitions=2, earliest={0: 5, 1: 0}, latest={0: 90, 1: 9})
        >>> Start(topic=topic, noted_ends={0: 40}).begins, Start(topic=topic, noted_ends={}).begins
        ({0: 40, 1: -2}, {})
        """
        known = self.noted_ends
        return (
            {partition: known.get(partition, EARLIEST) for partition in {*self.topic.latest, *known}} if known else {}
        )

    @property
    def reached(self) -> dict[int, int]:
        """The offsets that a stream has reached before its first batch.

        >>> topic = TopicState(cluster_id="c", topic_id="t1", partitions=2, earliest={0: 5, 1: 0}, latest={0: 90, 1: 9})
        >>> Start(topic=topic, noted_ends={0: 40}).reached
        {0: 40, 1: 0}
        """
        return {**self.topic.earliest, **self.noted_ends}


def check_start(
    job: str,
    progress: CheckpointProgress | None,
    note: Note | None,
    topics: Mapping[str, TopicState],
    *,
    source: str | None = None,
    fingerprint: str | None = None,
    conf: Mapping[str, str] | None = None,
) -> None:
    """Raise a `Refusal` with the reason unless the stream may begin.

    ``source`` is given for a job that has a stream per source. A job with state in its checkpoint also gives the
    ``fingerprint`` of its definition, and in ``conf`` the present settings of Spark.
    """
    reset = reset_command(job, source)
    reason = (
        _disagreement(progress, note, reset)
        or _definition_changed(note, fingerprint, job)
        or _state_is_bound(progress, conf or {}, job)
        or _topic_changed(note, topics, reset)
        or _out_of_reach(progress, note, topics, reset)
    )
    if reason:
        name = f"{job} of {source}" if source else job
        raise Refusal(f"stream {name!r} is refused: {reason}. Nothing was read or written.")


def _disagreement(progress: CheckpointProgress | None, note: Note | None, reset: str) -> str | None:
    if note is None:
        if progress is None or progress.committed is None:
            return None
        return (
            f"the checkpoint has committed batch {progress.committed}, but the table has no batch: "
            f"the table was deleted; restore it, or begin both again with {reset}"
        )
    if note.is_reset:
        return _not_begun_anew(progress, note, reset) if progress else None
    if progress is None or progress.planned is None:
        return (
            f"the table holds batch {note.batch}, but the checkpoint is gone: a new one would write everything "
            f"twice; restore the checkpoint, or begin a new one with {reset}"
        )
    if progress.write_id != note.write_id:
        return (
            f"the table was last written from another checkpoint (write identity {note.write_id}, this one is "
            f"{progress.write_id}): restore the checkpoint that belongs to the table, or begin a new one with {reset}"
        )
    return _batches_disagree(progress, note, reset)


def _not_begun_anew(progress: CheckpointProgress, note: Note, reset: str) -> str | None:
    """After a reset, accept only a checkpoint that began where the reset said, and that has written nothing yet."""
    if progress.write_id == note.write_id or progress.committed is not None or (progress.planned or 0) > 0:
        return (
            f"the table was reset, but the checkpoint (write identity {progress.write_id}, batch {progress.planned} "
            f"planned, {progress.committed} committed) is older: the reset was interrupted, or that checkpoint was "
            f"restored; reset again, e.g. with {reset}"
        )
    for topic, first in (progress.first or {}).items():
        wanted = note.ends.get(topic, {})
        if any(first.get(partition, start) != start for partition, start in wanted.items()):
            return (
                f"the table was reset to {wanted} of topic {topic!r}, but the checkpoint begins at {first}: checkpoint "
                f"and table do not belong together; begin a new checkpoint with {reset}"
            )
    return None


def _definition_changed(note: Note | None, fingerprint: str | None, job: str) -> str | None:
    if note is None or note.fingerprint == fingerprint:
        return None
    return (
        f"its definition has changed (fingerprint {fingerprint}, the rows so far are of {note.fingerprint}), and the "
        f"state in the checkpoint does not fit the new definition; take the change back, or {_ways_on(job)}"
    )


def _state_is_bound(progress: CheckpointProgress | None, conf: Mapping[str, str], job: str) -> str | None:
    """Refuse settings other than those of the checkpoint: Spark would use the checkpoint's without a warning."""
    kept = progress.conf if progress else {}
    for name, setting in _BOUND.items():
        if name in kept and name in conf and kept[name] != conf[name]:
            return (
                f"the state in its checkpoint was written with {setting}={kept[name]}, now it is {conf[name]}: set it "
                f"back, or {_ways_on(job)}"
            )
    return None


def _ways_on(job: str) -> str:
    return (
        f"begin again at the first record that the topic still has: {reset_command(job)}, or after the last landed "
        f"record: {reset_command(job, to='landed')}"
    )


def _batches_disagree(progress: CheckpointProgress, note: Note, reset: str) -> str | None:
    ends = next((ends for batch, ends in progress.ends.items() if batch == note.batch), None)
    if ends is None:
        return (
            f"the table holds batch {note.batch}, the checkpoint planned batch {progress.planned} and committed "
            f"{progress.committed}: checkpoint and table do not belong together; restore both from one backup, or "
            f"begin a new checkpoint with {reset}"
        )
    if ends != note.ends:
        return (
            f"batch {note.batch} ended at {note.ends} by the table, and at {ends} by the checkpoint: they do not "
            f"belong together; restore both from one backup, or begin a new checkpoint with {reset}"
        )
    return None


def _topic_changed(note: Note | None, topics: Mapping[str, TopicState], reset: str) -> str | None:
    for name, ranges in (note.topics if note else {}).items():
        if name not in topics:
            landed = note.ends[name] if note else {}
            return (
                f"topic {name!r} does not exist, but the table has its records up to {landed}: {_create_again(reset)}"
            )
        if note and topics[name].cluster_id != note.cluster_id:
            return (
                f"this is cluster {topics[name].cluster_id}, the table was filled from cluster {note.cluster_id}: "
                f"correct KAFKA_BOOTSTRAP, or begin again on this one with {reset}"
            )
        if topics[name].topic_id != ranges.topic_id:
            return (
                f"topic {name!r} was re-created (its id is {topics[name].topic_id}, the table was filled from "
                f"{ranges.topic_id}): the same offsets now mean other records; begin the new topic with {reset}"
            )
    return None


def _create_again(reset: str) -> str:
    return f"correct KAFKA_BOOTSTRAP, or create the topic with `tideline topics apply` and begin again with {reset}"


def _out_of_reach(
    progress: CheckpointProgress | None, note: Note | None, topics: Mapping[str, TopicState], reset: str
) -> str | None:
    """Compare the offsets where the stream goes on with the offsets that the topic still holds."""
    planned = progress is not None and progress.planned is not None
    first = note.ends if note and note.is_reset else {}
    resume = progress.resume if progress and planned else first
    reached = progress.reached if progress and planned else first
    for name, starts in resume.items():
        if name not in topics:
            return f"topic {name!r} does not exist, but the checkpoint has its offsets: {_create_again(reset)}"
        reason = _partition_out_of_reach(topics[name], starts, reached[name])
        # The table has no note, so the id of the topic that the checkpoint has read is unknown. Only the first offset
        # of the topic can show that it was re-created.
        if reason is None and note is None and progress and progress.committed is None:
            reason = _begins_before(topics[name], starts)
        if reason:
            return f"topic {name!r} {reason}; begin again with the records that it still has: {reset}"
    return None


def _partition_out_of_reach(topic: TopicState, resume: Mapping[int, int], reached: Mapping[int, int]) -> str | None:
    """Why the topic does not hold the offsets where a stream goes on, or None if it does.

    >>> topic = TopicState(cluster_id="c", topic_id="t1", partitions=1, earliest={0: 50}, latest={0: 90})
    >>> _partition_out_of_reach(topic, resume={0: 50}, reached={0: 91}).partition(": ")[0]
    'partition 0 ends at 90, before offset 91 that the stream has reached'
    >>> _partition_out_of_reach(topic, resume={0: 49}, reached={0: 90})
    'partition 0 begins at 50: its records from 49 on were deleted before they were read'
    """
    for partition in sorted({*topic.latest, *reached}):
        end, begin = topic.latest.get(partition, -1), topic.earliest.get(partition, 0)
        if end < reached.get(partition, 0):
            return (
                f"partition {partition} ends at {max(end, 0)}, before offset {reached[partition]} that the stream has "
                "reached: records were lost, or the topic was re-created"
            )
        if begin > resume.get(partition, 0):
            return (
                f"partition {partition} begins at {begin}: its records from {resume.get(partition, 0)} on were deleted "
                "before they were read"
            )
    return None


def _begins_before(topic: TopicState, resume: Mapping[int, int]) -> str | None:
    """Why the topic cannot be the one in which a stream began, or None if it can.

    The first offset of a topic only grows, as old records are deleted. A smaller one belongs to a new topic.

    >>> topic = TopicState(cluster_id="c", topic_id="t1", partitions=1, earliest={0: 0}, latest={0: 90})
    >>> _begins_before(topic, resume={0: 50})
    'partition 0 begins at 0, before offset 50 where the stream began: the topic was re-created'
    """
    for partition, begin in sorted(topic.earliest.items()):
        if begin < resume.get(partition, 0):
            return (
                f"partition {partition} begins at {begin}, before offset {resume[partition]} where the stream began: "
                "the topic was re-created"
            )
    return None
