"""A try: one Spark job that stages rows for a run. It writes into its own folder, and writes its result last.

The task that began the try takes its result into the run. If the task is killed, or begins another try, the job stops
itself. Rows that it still writes are not read, because they lie in the folder of the old try.
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

import msgspec

from jobs.control.epochs import Owner
from jobs.control.lease import end_this_process
from jobs.refusal import Refusal
from jobs.storage.folders import Folder, make_durable, remove, write_whole
from jobs.storage.parquet import files_in, footer

log = logging.getLogger(__name__)

# The environment variable that tells a job which process waits for its end. `describe_process` makes its value.
TASK_VARIABLE = "TIDELINE_TASK"
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class StagedSlice:
    """The part of a try's result that is about one slice.

    ``read``: how many accepted events of the slice the job has read. ``expected``: how many rows of the transform fall
    into windows of the slice. A row counts in each of its windows: in windows of 1 s that begin every 250 ms, it counts
    four times. Both numbers come from the events, so the audit can compare them with the staged rows. ``rows`` and
    ``files`` describe the staged rows; the files are relative to the folder of the run.
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
        """Begin a try for some slices of a run. It is under way until it is discarded, or the run begins again."""
        begun = cls(run=run, name=uuid.uuid4().hex)
        write_whole(begun._marker, json.dumps({"slices": list(slices)}).encode())
        return begun

    def slices(self) -> list[str]:
        """The slices that it must stage."""
        if not self.is_under_way:
            raise Refusal(
                f"try {self.name} in {self.run} has ended: its run was planned again, or its task has ended it"
            )
        return list(json.loads(self._marker.read_text())["slices"])

    @property
    def stage(self) -> Folder:
        """The folder of its rows, with a folder for each slice."""
        return self.run / f"windows-{self.name}"

    @property
    def is_under_way(self) -> bool:
        """Whether its task still waits for its result."""
        return self._marker.is_file()

    def staged_rows(self, written: int) -> dict[str, tuple[int, tuple[str, ...]]]:
        """Make the files durable; return rows and files of each slice. ``written``: Spark's count of all rows."""
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
            raise Refusal(
                f"{written:,} rows were written into {self.stage}, but {staged:,} are there: nothing is staged"
            )
        return found

    def write_result(self, staged: Mapping[str, StagedSlice]) -> None:
        """Write the result, after all rows are written."""
        write_whole(self._result, json.dumps({name: asdict(slice_) for name, slice_ in staged.items()}).encode())

    def result(self) -> dict[str, StagedSlice]:
        """Each staged slice. Refused if the job ended before it had written all rows."""
        if not self._result.is_file():
            raise Refusal(f"try {self.name} in {self.run} has no result: its job ended before all rows were written")
        return msgspec.convert(json.loads(self._result.read_text()), dict[str, StagedSlice])

    def discard(self) -> None:
        """Remove the rows of a job that has failed."""
        remove(self.stage)
        self._marker.unlink(missing_ok=True)

    @property
    def _marker(self) -> Folder:
        return self.run / f"try-{self.name}.json"

    @property
    def _result(self) -> Folder:
        return self.run / f"result-{self.name}.json"


def describe_process() -> str:
    """Describe this process, for the `TASK_VARIABLE` of a job that it starts."""
    return json.dumps(asdict(Owner.this_process()))


@contextmanager
def stop_when_task_ends(own: Try | None = None, env: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Stop this process if the task that waits for it ends, or gives up this try."""
    over, task = threading.Event(), env.get(TASK_VARIABLE, "")

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            try:
                reason = _stop_reason(task, own)
            except Exception:
                # The store may not answer for a while. The try may still be under way.
                log.warning("the state of this try cannot be read, trying again", exc_info=True)
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


def _stop_reason(task: str, own: Try | None) -> str | None:
    owner = Owner(**json.loads(task)) if task else None
    if owner and owner.is_gone():
        return f"the task that waits for this job (process {owner.pid}) has died"
    if own and not own.is_under_way:
        return f"its run was planned again, and try {own.name} has ended"
    return None
