"""A slice to be published, and the errors that prevent its publish.

`jobs.lake.final` raises them when versions differ or rows cannot be read. `jobs.finality.publishing` handles them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jobs.lake.slices import Header
from jobs.refusal import Refusal
from jobs.storage.folders import Folder


class PublishedMeanwhileError(Refusal):
    """A slice is no longer at the planned version, because another run has published it meanwhile."""


class UnreadableRowsError(Refusal):
    """The present rows of slices cannot be read, so they cannot be replaced."""

    def __init__(self, slices: Iterable[str], table: str, why: str) -> None:
        """Make a sentence per slice; ``why`` is the reader's error, which names the file."""
        self.sentences = {
            name: f"slice {name} is not replaced, because its present rows cannot be read: restore the file in {table} "
            f"from a backup, and a later run publishes the slice; {why}"
            for name in slices
        }
        super().__init__(next(iter(self.sentences.values())))


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A slice to be published: its header, and its staged files. An empty slice has no files."""

    header: Header
    files: tuple[Folder, ...]
