"""What Spark wrote into a checkpoint: which offsets it planned, which batches it committed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.refusal import Refusal

Offsets = dict[str, dict[int, int]]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A micro-batch as `offsets/N` plans it: ends are exclusive, per topic and partition."""

    batch: int
    timestamp_ms: int
    watermark_ms: int
    ends: Offsets


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint folder of one streaming query."""

    path: Path

    def exists(self) -> bool:
        """Whether a query ever planned a batch here."""
        return self.last_planned() is not None or self._metadata.exists()

    @property
    def _metadata(self) -> Path:
        return self.path / "metadata"

    def query_id(self) -> str:
        """The identity that every write of this checkpoint carries; a new checkpoint has a new one."""
        try:
            return str(json.loads(self._metadata.read_text())["id"])
        except (OSError, ValueError, KeyError) as error:
            raise self._damaged(self._metadata, error) from error

    def last_planned(self) -> int | None:
        """The newest batch whose offsets are written."""
        return max(_batches(self.path / "offsets"), default=None)

    def last_committed(self) -> int | None:
        """The newest batch that Spark reported done."""
        return max(_batches(self.path / "commits"), default=None)

    def planned(self, batch: int) -> Planned:
        """The plan of one batch."""
        file = self.path / "offsets" / str(batch)
        try:
            version, metadata, *offsets = file.read_text().splitlines()
            if version != "v1":
                raise ValueError(f"unknown format {version!r}")
            head = json.loads(metadata)
            return Planned(
                batch=batch,
                timestamp_ms=int(head["batchTimestampMs"]),
                watermark_ms=int(head["batchWatermarkMs"]),
                ends=_offsets(json.loads(line) for line in offsets if line != "-"),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(file, error) from error

    def starts(self, batch: int) -> Offsets:
        """Where a batch begins: where the one before ended, or where the query first began."""
        if batch > 0:
            return self.planned(batch - 1).ends
        files = sorted((self.path / "sources").glob("*/0"))
        try:
            return _offsets(json.loads(file.read_text().lstrip("\0").split("\n", 1)[1]) for file in files)
        except (OSError, ValueError, IndexError) as error:
            raise self._damaged(self.path / "sources", error) from error

    def check(self) -> None:
        """Refuse a checkpoint that cannot be read through, before Spark stumbles over it."""
        if not self._metadata.exists():
            raise self._damaged(self._metadata, FileNotFoundError("the file is gone"))
        self.query_id()
        for batch in _batches(self.path / "offsets"):
            self.planned(batch)
        planned, committed = self.last_planned(), self.last_committed()
        if committed is not None and (planned is None or planned not in (committed, committed + 1)):
            raise self._damaged(
                self.path / "offsets", ValueError(f"last batch planned is {planned}, committed {committed}")
            )
        if planned is not None:
            self.starts(0) if planned == 0 else self.starts(planned)
        for batch in _batches(self.path / "commits"):
            self._check_commit(batch)

    def _check_commit(self, batch: int) -> None:
        file = self.path / "commits" / str(batch)
        try:
            json.loads(file.read_text().split("\n", 1)[1])
        except (OSError, ValueError, IndexError) as error:
            raise self._damaged(file, error) from error

    def _damaged(self, file: Path, error: Exception) -> Refusal:
        return Refusal(
            f"checkpoint file {file} is damaged ({error}): restore it from a backup of the same moment, or reset the "
            f"stream to begin a new checkpoint; nothing was read or written"
        )


def _batches(folder: Path) -> list[int]:
    return [int(file.name) for file in folder.iterdir() if file.name.isdecimal()] if folder.is_dir() else []


def _offsets(documents: Any) -> Offsets:
    return {
        topic: {int(partition): int(offset) for partition, offset in partitions.items()}
        for document in documents
        for topic, partitions in document.items()
    }
