"""Read Spark's own files in a checkpoint: the offsets that it planned and the batches that it committed."""

import json
import uuid
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from jobs.pipelines.layout import checkpoint_of
from jobs.refusal import Refusal
from jobs.storage.folders import Folder

Offsets = dict[str, dict[int, int]]

# The errors that a damaged JSON document causes: a wrong type, a missing key, an infinite number.
_DAMAGE = (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError)


def reset_command(job: str, source: str | None = None, to: str = "earliest") -> str:
    """The command that begins a stream's checkpoint anew; without `--apply` it only shows its plan."""
    return f"`tideline reset {job}{f' --source {source}' if source else ''} --to {to}`"


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """A micro-batch as `offsets/N` plans it: ends are exclusive, per topic and partition.

    ``conf`` has the settings that Spark keeps for the life of the checkpoint, even if a later session sets others.
    """

    timestamp_ms: int
    watermark_ms: int
    ends: Offsets
    conf: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint folder of one streaming query; ``way_out`` is the command that begins a new one."""

    path: Folder
    way_out: str = reset_command("JOB")

    @classmethod
    def of(cls, lake_root: Folder, job: str, source: str | None = None) -> Self:
        """The checkpoint of a streaming job; `ingest` has one per source."""
        return cls(lake_root / checkpoint_of(job, source), reset_command(job, source))

    def exists(self) -> bool:
        """Whether a query began here, or some of its files are left. A bucket does not delete a folder at once."""
        left = any((self.path / name).is_dir() for name in ("sources", "state"))
        return left or self.last_planned() is not None or self._metadata.exists()

    @property
    def _metadata(self) -> Folder:
        return self.path / "metadata"

    def query_id(self) -> str:
        """The identity that every write of this checkpoint carries; a new checkpoint has a new one."""
        try:
            return str(uuid.UUID(json.loads(_read(self._metadata))["id"]))
        except _DAMAGE as error:
            raise self._damaged(self._metadata, error) from error

    def last_planned(self) -> int | None:
        """The newest batch with written offsets."""
        return max(_batches(self.path / "offsets"), default=None)

    def last_committed(self) -> int | None:
        """The newest batch that Spark reported done."""
        return max(_batches(self.path / "commits"), default=None)

    def planned(self, batch: int) -> PlannedBatch:
        """The plan of one batch."""
        file = self.path / "offsets" / str(batch)
        try:
            metadata, *offsets = _lines(_read(file))
            head = json.loads(metadata)
            return PlannedBatch(
                timestamp_ms=_whole(head["batchTimestampMs"]),
                watermark_ms=_whole(head["batchWatermarkMs"]),
                ends=_offsets(json.loads(line) for line in offsets if line != "-"),
                conf=dict(head.get("conf", {})),
            )
        except _DAMAGE as error:
            raise self._damaged(file, error) from error

    def starts(self, batch: int) -> Offsets:
        """The begin of a batch: the end of the batch before it, or the first offsets of the query."""
        return self.planned(batch - 1).ends if batch > 0 else self._first()

    def first(self) -> Offsets | None:
        """The first offsets of the query; None as long as it has not looked at its topic."""
        return self._first() if self._first_files() else None

    def _first_files(self) -> list[Folder]:
        return sorted((self.path / "sources").glob("*/0"))

    def _first(self) -> Offsets:
        files = self._first_files()
        try:
            return _offsets(json.loads(line) for file in files for line in _lines(_read(file).removeprefix("\0")))
        except _DAMAGE as error:
            raise self._damaged(self.path / "sources", error) from error

    def check(self) -> None:
        """Refuse a checkpoint that cannot be read completely, before Spark fails on it."""
        if not self._metadata.exists():
            raise self._damaged(self._metadata, FileNotFoundError("the file is gone"))
        self.query_id()
        for batch in _batches(self.path / "offsets"):
            self.planned(batch)
        planned, committed = self.last_planned(), self.last_committed()
        ahead = (-1 if planned is None else planned) - (-1 if committed is None else committed)
        if ahead not in (0, 1):
            raise self._damaged(
                self.path / "offsets",
                ValueError(f"its last planned batch is {planned}, its last committed batch {committed}"),
            )
        if planned is not None:
            self.starts(planned)
        for batch in _batches(self.path / "commits"):
            self.next_watermark_ms(batch)

    def next_watermark_ms(self, batch: int) -> int:
        """The watermark that a committed batch sets for the next one."""
        file = self.path / "commits" / str(batch)
        try:
            (commit,) = _lines(_read(file))
            return _whole(json.loads(commit)["nextBatchWatermarkMs"])
        except _DAMAGE as error:
            raise self._damaged(file, error) from error

    def _damaged(self, file: Folder, error: Exception) -> Refusal:
        return Refusal(
            f"checkpoint file {file} is damaged ({error}): restore it from a backup of this checkpoint, or begin a new "
            f"checkpoint with {self.way_out}; nothing was read or written"
        )


def _batches(folder: Folder) -> list[int]:
    return [int(file.name) for file in folder.iterdir() if file.name.isdecimal()] if folder.is_dir() else []


def _read(file: Folder) -> str:
    """The text of a file, if it matches the checksums that Hadoop's file system keeps beside it."""
    try:
        content, sums = file.read_bytes(), file.parent / f".{file.name}.crc"
        sound = not sums.is_file() or _fits(content, sums.read_bytes())
    except OSError as error:
        # A missing file is damage. An error of an object store has no number, and does not mean damage.
        if isinstance(error, FileNotFoundError) or error.errno is None:
            raise
        cannot = f"checkpoint file {file} cannot be read ({error.strerror})"
        raise Refusal(f"{cannot}: repair the disk, or correct the permissions of the file") from error
    if not sound:
        raise ValueError("its checksum does not match")
    return content.decode()


def _fits(content: bytes, sums: bytes) -> bool:
    """Whether a file matches its sums in Hadoop's format: `crc`, a null byte, the chunk size, each chunk's CRC-32."""
    size = int.from_bytes(sums[4:8], "big") or 1
    chunks = [content[at : at + size] for at in range(0, len(content), size)]
    return sums[:4] == b"crc\0" and sums[8:] == b"".join(zlib.crc32(chunk).to_bytes(4, "big") for chunk in chunks)


def _lines(text: str) -> list[str]:
    version, *lines = text.split("\n")
    if version != "v1":
        raise ValueError(f"unknown format {version!r}")
    return lines


def _offsets(documents: Iterable[Any]) -> Offsets:
    offsets = {
        topic: {int(partition): _whole(offset) for partition, offset in partitions.items()}
        for document in documents
        for topic, partitions in document.items()
    }
    if not offsets:
        raise ValueError("no offsets")
    return offsets


def _whole(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no offset and no time")
    return number
