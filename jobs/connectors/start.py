"""May a stream begin here? The checkpoint, the table and the topic must tell the same story.

Spark compares offsets only: a topic that was re-created and grew past our offset would pass unseen, and so would
a table or a checkpoint restored from another moment. A pure decision: what was seen in, the refusal out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jobs.connectors.checkpoint import Checkpoint, Offsets
from jobs.connectors.kafka import TopicState
from jobs.connectors.tables import Note
from jobs.refusal import Refusal


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a checkpoint got: the last batch planned and the last one committed.

    ``resume`` is where reading goes on (a batch that was planned but not committed is read again), ``reached``
    where the last planned batch ends, ``ends`` where each of the two does.
    """

    write_id: str
    planned: int | None = None
    committed: int | None = None
    resume: Offsets = field(default_factory=dict)
    reached: Offsets = field(default_factory=dict)
    ends: Mapping[int, Offsets] = field(default_factory=dict)

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "Progress | None":
        """None if the checkpoint does not exist; a `Refusal` if it is damaged."""
        if not checkpoint.exists():
            return None
        checkpoint.check()
        planned, committed = checkpoint.last_planned(), checkpoint.last_committed()
        if planned is None:
            return cls(write_id=checkpoint.query_id())
        ends = {batch: checkpoint.planned(batch).ends for batch in (planned, committed) if batch is not None}
        return cls(
            write_id=checkpoint.query_id(),
            planned=planned,
            committed=committed,
            resume=ends[planned] if planned == committed else checkpoint.starts(planned),
            reached=ends[planned],
            ends=ends,
        )


def check_start(
    job: str,
    progress: Progress | None,
    note: Note | None,
    topics: Mapping[str, TopicState],
    fingerprint: str | None = None,
) -> None:
    """Raise a `Refusal` with the reason unless the stream may begin; ``fingerprint`` is that of its definition."""
    reason = (
        _disagreement(progress, note)
        or _definition_changed(note, fingerprint)
        or _topic_changed(note, topics)
        or _out_of_reach(progress, topics)
    )
    if reason:
        raise Refusal(
            f"stream {job!r} is refused: {reason}. Nothing was read or written; docs/operations.md says how to reset."
        )


def _disagreement(progress: Progress | None, note: Note | None) -> str | None:
    if note is None:
        if progress is None or progress.committed is None:
            return None
        return (
            f"the checkpoint has committed batch {progress.committed}, but the table has none of it: "
            "the table was deleted; restore it, or reset the stream to begin both anew"
        )
    if progress is None or progress.planned is None:
        return (
            f"the table holds batch {note.batch}, but the checkpoint is gone: a new one would write everything "
            "twice; restore the checkpoint, or reset the stream"
        )
    if progress.write_id != note.write_id:
        return (
            f"the table was last written from another checkpoint (write identity {note.write_id}, this one is "
            f"{progress.write_id}): restore the one that belongs to it, or reset the stream"
        )
    return _batches_disagree(progress, note)


def _definition_changed(note: Note | None, fingerprint: str | None) -> str | None:
    if note is None or note.fingerprint == fingerprint:
        return None
    return (
        f"its definition has changed (fingerprint {fingerprint}, the rows so far are of {note.fingerprint}): the state "
        "in the checkpoint means something else; take the change back, or reset the stream"
    )


def _batches_disagree(progress: Progress, note: Note) -> str | None:
    if note.batch not in progress.ends:
        return (
            f"the table holds batch {note.batch}, the checkpoint planned batch {progress.planned} and committed "
            f"{progress.committed}: one of the two is from another moment; restore both from the same one"
        )
    if progress.ends[note.batch] != note.ends:
        return (
            f"the table says that batch {note.batch} ended at {note.ends}, the checkpoint says "
            f"{progress.ends[note.batch]}: restore both from the same moment"
        )
    return None


def _topic_changed(note: Note | None, topics: Mapping[str, TopicState]) -> str | None:
    for name, ranges in (note.topics if note else {}).items():
        if name not in topics:
            return f"topic {name!r} is gone: its records up to {note.ends[name] if note else {}} are landed"
        if note and topics[name].cluster_id != note.cluster_id:
            return (
                f"this is cluster {topics[name].cluster_id}, the table was filled from cluster {note.cluster_id}: "
                "correct KAFKA_BOOTSTRAP, or reset the stream"
            )
        if topics[name].topic_id != ranges.topic_id:
            return (
                f"topic {name!r} was re-created (its id is {topics[name].topic_id}, the table was filled from "
                f"{ranges.topic_id}): the same offsets now mean other records; reset the stream"
            )
    return None


def _out_of_reach(progress: Progress | None, topics: Mapping[str, TopicState]) -> str | None:
    """Compare where the stream goes on with what the topic still holds."""
    if progress is None or progress.planned is None:
        return None
    for name, resume in progress.resume.items():
        topic, reached = topics.get(name), progress.reached[name]
        if topic is None:
            return f"topic {name!r} is gone"
        for partition in sorted({*topic.latest, *reached}):
            end, begin = topic.latest.get(partition, -1), topic.earliest.get(partition, 0)
            if end < reached.get(partition, 0):
                return (
                    f"topic {name!r} partition {partition} ends at {max(end, 0)}, before offset {reached[partition]} "
                    "that the stream has reached: records are gone or it was re-created; reset the stream"
                )
            if progress.committed is None and begin < resume.get(partition, 0):
                return (
                    f"topic {name!r} partition {partition} begins at {begin}, before offset {resume[partition]} where "
                    "the stream began: it was re-created; reset the stream"
                )
            if begin > resume.get(partition, 0):
                return (
                    f"topic {name!r} partition {partition} begins at {begin}: its records from "
                    f"{resume.get(partition, 0)} on were deleted before they were read; reset the stream to book "
                    "them as lost"
                )
    return None
