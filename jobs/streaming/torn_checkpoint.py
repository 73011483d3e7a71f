"""Keep the checkpoint of a stream through a power cut. Spark does not make its files durable, so this module does.

Before the table takes a micro-batch, all files that Spark wrote for it are made durable: its plan, its state, and the
commit of the batch before. So a power cut can tear two files only, and Spark can write both again. One is the plan of a
batch that the table does not have. The other is the commit of a batch that the table has.
"""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from jobs.control.checkpoint import Checkpoint
from jobs.lake.stream_tables import Note
from jobs.pipelines.layout import PUT_ASIDE
from jobs.refusal import Refusal
from jobs.storage.folders import Folder, make_durable, put_aside

log = logging.getLogger(__name__)


@dataclass
class CheckpointFiles:
    """The files of a checkpoint. New ones are found by their names, which Spark gives to complete files only."""

    path: Folder
    _known: dict[str, frozenset[str]] = field(default_factory=dict)

    def make_durable(self) -> None:
        """Make the files durable that are new since the last call, and the folders that list them."""
        if isinstance(self.path, Path):
            self._make_durable(str(self.path))

    def _make_durable(self, folder: str) -> None:
        known, names = self._known.get(folder, frozenset()), set[str]()
        for entry in os.scandir(folder):
            names.add(entry.name)
            if entry.is_dir():
                self._make_durable(entry.path)
            elif entry.name not in known:
                # Spark may remove old files meanwhile.
                with suppress(FileNotFoundError):
                    make_durable(Path(entry.path))
        if names != known:
            make_durable(Path(folder))
        self._known[folder] = frozenset(names)


def mend(checkpoint: Checkpoint, note: Note | None) -> None:
    """Put aside a file of the newest batch that a power cut has torn; all other damage is refused later.

    The holder of the lease calls it before Spark reads the checkpoint.
    """
    if not isinstance(checkpoint.path, Path) or not checkpoint.exists():
        return
    committed, planned = checkpoint.last_committed(), checkpoint.last_planned()
    if planned is None:
        return
    in_table = note.batch if note and note.batch is not None else -1
    if committed == planned:
        # Spark runs the batch again, and finds that the table has it.
        _put_aside_if_torn(checkpoint.path / "commits" / str(planned), checkpoint.next_watermark_ms, planned)
    elif in_table < planned:
        # The table has nothing of the batch, so Spark plans it anew.
        _put_aside_if_torn(checkpoint.path / "offsets" / str(planned), checkpoint.planned, planned)


def _put_aside_if_torn(file: Path, read: Callable[[int], object], batch: int) -> None:
    try:
        read(batch)
    except Refusal:
        _put_aside(file)


def _put_aside(file: Path) -> None:
    # Hadoop's checksums of a file lie beside it.
    file.with_name(f".{file.name}.crc").unlink(missing_ok=True)
    aside = put_aside(file, file.parent.parent / PUT_ASIDE, f"{file.parent.name}-{file.name}")
    log.warning(
        "checkpoint file %s is incomplete, as after a power cut: it was moved to %s, and Spark writes it again",
        file,
        aside,
    )
