"""The part of the lake that belongs to one pipeline: all its tables and documents are listed here."""

from dataclasses import dataclass

from jobs.control.folder import Control
from jobs.control.incidents import Incidents
from jobs.lake.accounts import Accounts
from jobs.lake.events import Landed
from jobs.lake.final import FinalTable
from jobs.lake.ledger import Ledger
from jobs.lake.live import Live
from jobs.pipelines.pipeline import Pipeline
from jobs.storage.documents import Documents
from jobs.storage.folders import Folder


@dataclass(frozen=True)
class PipelineLake:
    """The tables of a pipeline, and the documents of its jobs, below the root of the lake.

    ``final()`` opens a table to read, and returns None if the table does not exist yet. ``open_final()`` opens it to
    write, and creates it if it is missing. Its caller must hold the lease of the job that writes the table.
    """

    root: Folder
    pipeline: Pipeline

    def events(self, version: int | None = None) -> Landed | None:
        """The landed events of the pipeline's source, at the newest version of their table or at an older one."""
        return Landed.at(self.root, self.pipeline.source, version)

    def live(self) -> Live:
        """The live table. It is never None: before its stream has run for the first time, it is empty."""
        return Live.at(self.root, self.pipeline)

    def final(self, version: int | None = None) -> FinalTable | None:
        """The final table, at its newest version or at an older one."""
        return FinalTable.read(self.root, self.pipeline, version)

    def open_final(self) -> FinalTable:
        """The final table, to publish slices. The recompute job writes it."""
        return FinalTable.open(self.root, self.pipeline)

    def ledger(self) -> Ledger | None:
        """The ledger."""
        return Ledger.read(self.root, self.pipeline)

    def open_ledger(self) -> Ledger:
        """The ledger, to add lines. The recompute job writes it."""
        return Ledger.open(self.root, self.pipeline)

    def accounts(self) -> Accounts | None:
        """The drift and balance tables."""
        return Accounts.read(self.root, self.pipeline)

    def open_accounts(self) -> Accounts:
        """The drift and balance tables, to add accounts. The account job writes them."""
        return Accounts.open(self.root, self.pipeline)

    def documents(self, job: str) -> Documents:
        """The documents of one of the pipeline's jobs."""
        return Control.of(self.root, job).documents

    def incidents(self) -> Incidents:
        """The incidents of the whole lake."""
        return Incidents.of(self.root)
