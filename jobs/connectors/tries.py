"""A try: one job that stages rows for a run, in a folder of its own, and says what it has staged when all is written.

The task that has begun a try takes what it says. A job whose task has died, or begun another try, ends itself; what it
still writes lies where nobody looks.
"""

import json
import logging
import os
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Self

from jobs.connectors.control import end_this_process
from jobs.connectors.epochs import Owner
from jobs.connectors.parquet import files_in, footer
from jobs.folders import Folder, make_durable, remove, write_whole
from jobs.refusal import Refusal

log = logging.getLogger(__name__)

# The process that waits for a job's end, as `process_words` writes it.
TASK_VARIABLE = "TIDELINE_TASK"
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class StagedSlice:
    """What a try has staged of one slice.

    ``read`` counts the accepted events of the slice; ``expected`` the rows that the transform makes of events, once
    for each window of the slice into which they fall. Neither comes from the staged rows. ``files`` are relative to
    the folder of the run.
    """

    read: int = 0
    expected: int = 0
    rows: int = 0
    files: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Try:
    """One try of a run, by the folder of the run and a name."""

    run: Folder
    name: str

    @classmethod
    def begin(cls, run: Folder, slices: Collection[str]) -> Self:
        """A new one for some slices of its run; it is under way until the run is begun anew."""
        begun = cls(run=run, name=uuid.uuid4().hex)
        write_whole(begun._marker, json.dumps({"slices": list(slices)}).encode())
        return begun

    def slices(self) -> list[str]:
        """What it is to stage."""
        if not self.is_under_way:
            raise Refusal(f"try {self.name} in {self.run} is over: its run was begun anew, or its task has given it up")
        return list(json.loads(self._marker.read_text())["slices"])

    @property
    def stage(self) -> Folder:
        """Where its rows go, a folder per slice."""
        return self.run / f"windows-{self.name}"

    @property
    def is_under_way(self) -> bool:
        """Whether what it says will be heard."""
        return self._marker.is_file()

    def staged_rows(self, written: int) -> dict[str, tuple[int, tuple[str, ...]]]:
        """Rows and files of each slice, durable from now on. ``written``: how many rows Spark has counted in all."""
        found: dict[str, tuple[int, tuple[str, ...]]] = {}
        files = files_in(self.stage)
        for file in files:
            slice_ = file.parent.name.partition("=")[2]
            rows, names = found.get(slice_, (0, ()))
            found[slice_] = (
                rows + footer(file).num_rows,
                (*names, f"{self.stage.name}/{file.parent.name}/{file.name}"),
            )
        make_durable(*files, *dict.fromkeys(file.parent for file in files), *([self.stage] if files else []), self.run)
        staged = sum(rows for rows, _ in found.values())
        if staged != written:
            raise Refusal(f"{written:,} rows were written into {self.stage}, {staged:,} are there: nothing is staged")
        return found

    def say(self, staged: Mapping[str, StagedSlice]) -> None:
        """All of it is written."""
        write_whole(self._result, json.dumps({name: asdict(slice_) for name, slice_ in staged.items()}).encode())

    def said(self) -> dict[str, StagedSlice]:
        """What it has staged."""
        if not self._result.is_file():
            raise Refusal(f"try {self.name} in {self.run} has said nothing: its job did not come to its end")
        read = json.loads(self._result.read_text())
        return {name: StagedSlice(**{**slice_, "files": tuple(slice_["files"])}) for name, slice_ in read.items()}

    def discard(self) -> None:
        """Remove what it has staged: its job has failed."""
        remove(self.stage)
        self._marker.unlink(missing_ok=True)

    @property
    def _marker(self) -> Folder:
        return self.run / f"try-{self.name}.json"

    @property
    def _result(self) -> Folder:
        return self.run / f"result-{self.name}.json"


def process_words() -> str:
    """This process, for `TASK_VARIABLE` of a job that it starts."""
    return json.dumps(asdict(Owner.this_process()))


@contextmanager
def ending_with_its_task(own: Try | None = None, env: Mapping[str, str] = os.environ) -> Iterator[None]:
    """End this process when the task that waits for it has died, or has given up this try."""
    over, task = threading.Event(), env.get(TASK_VARIABLE, "")

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            try:
                reason = _why_over(task, own)
            except Exception:
                # A store that does not answer says nothing about the try.
                log.warning("it cannot be seen whether this try is over", exc_info=True)
                continue
            if reason:
                log.error("%s: this job ends now", reason)
                end_this_process()

    watching = threading.Thread(target=look, name="task", daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


def _why_over(task: str, own: Try | None) -> str | None:
    owner = Owner(**json.loads(task)) if task else None
    if owner and owner.is_gone():
        return f"the task that waited for it (process {owner.pid}) has died"
    if own and not own.is_under_way:
        return f"its run was begun anew, and try {own.name} is over"
    return None
