"""What is published together, and why it cannot be."""

from collections.abc import Iterable
from dataclasses import dataclass

from jobs.lake.slices import Header
from jobs.refusal import Refusal
from jobs.storage.folders import Folder


class PublishedMeanwhileError(Refusal):
    """A slice is not at the version that was planned any more: another run was faster."""


class UnreadableRowsError(Refusal):
    """The rows that slices have until now cannot be read, so nobody can replace them."""

    def __init__(self, slices: Iterable[str], table: str, why: str) -> None:
        """``why``: what the reader says; it names the file."""
        self.sentences = {
            name: f"slice {name} stays as it is, since its rows of now cannot be read: restore the file in {table} "
            f"from a backup, and a later run does the slice; {why}"
            for name in slices
        }
        super().__init__(next(iter(self.sentences.values())))


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A slice to be published: its header, and its staged files (none if it is empty)."""

    header: Header
    files: tuple[Folder, ...]
