"""The files of a stage, counted before they are committed: another process may have removed some of them meanwhile."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import pyarrow.parquet as pq

from jobs.refusal import Refusal
from jobs.storage.folders import Folder, for_each
from jobs.storage.parquet import files_in, footer


class TornStageError(Refusal):
    """A stage does not have the files or rows that were written into it."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a fully written stage: its files, each with its parquet footer."""

    files: Mapping[Folder, pq.FileMetaData]

    @classmethod
    def of(cls, stage: Folder, rows: int | None = None) -> Self:
        """Read the files of a stage; refuse if they do not have as many rows as their writer counted (``rows``)."""
        staged_files = files_in(stage)
        files = dict(zip(staged_files, for_each(stage, footer, staged_files), strict=True))
        staged = sum(found.num_rows for found in files.values())
        if rows not in (None, staged):
            raise TornStageError(
                f"{rows:,} rows were written into {stage}, but {staged:,} are there: nothing is committed; the next "
                "start or run writes them again"
            )
        return cls(files=files)
