"""The task `recompute`: it computes the windows of the planned slices, and stages them."""

from airflow.sdk import Context

from jobs.control.room import Room
from jobs.finality.run.folder import Plan, RunFolder
from jobs.finality.run.isolation import ComputeError, isolate
from jobs.finality.run.tries import StagedSlice, Try
from tideline_airflow.operators.batch import BatchJobOperator, DriverError
from tideline_airflow.operators.plan import plan_or_skip


class RecomputeOperator(BatchJobOperator):
    """Computes the windows of all planned slices in one Spark job; without windows it starts no job.

    If the job fails in the task's last try, the slices are halved until those are found that fail alone. These will be
    blocked; the others become final.
    """

    def execute(self, context: Context) -> None:
        """Stage rows, after removing the rows of earlier tries of this task."""
        run_id, task = context["dag_run"].run_id, context["ti"]
        folder = RunFolder.of(self.lake(), run_id)
        plan = plan_or_skip(folder)
        folder.begin(plan)
        staged = {work.slice: StagedSlice() for work in plan.work if not work.window_events}
        if not plan.has_windows:
            folder.keep_staged(staged)
            self.log.info("The %d planned slices have no windows, so no Spark job is started.", len(plan.work))
            return
        busy = plan.only(name for name in plan.names if name not in staged)
        if task.try_number <= task.max_tries:
            # The failure may be temporary, so the next try takes all slices again.
            folder.keep_staged(staged | self._compute(folder, busy))
            return
        try:
            found = isolate(busy.names, lambda group: self._compute_group(folder, busy.only(group)))
        except ComputeError as error:
            raise DriverError(f"the cause is probably outside of the slices, so none is blocked: {error}") from error
        for result in found.results:
            staged |= result
        folder.keep_staged(staged, found.failing)
        for name, why in found.failing.items():
            self.log.error("slice %s cannot be computed: %s", name, why)

    def _compute_group(self, folder: RunFolder, part: Plan) -> dict[str, StagedSlice]:
        try:
            return self._compute(folder, part)
        except DriverError as error:
            if Room.of(self.lake().root).is_short():
                # The full disk is the cause. Smaller groups would find room, so a slice would be blamed wrongly.
                raise
            self.log.warning("a Spark job for %d slices failed: %s", len(part.work), error)
            raise ComputeError(str(error)) from error

    def _compute(self, folder: RunFolder, part: Plan) -> dict[str, StagedSlice]:
        own = Try.begin(folder.path, part.names)
        events = sum(work.window_events for work in part.work)
        try:
            self.submit("recompute", self.pipeline, "--run", part.run, "--try", own.name, events=events)
            return own.result()
        except BaseException:
            own.discard()
            raise
