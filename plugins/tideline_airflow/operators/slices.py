"""A person's decisions about one slice, as tasks: publish it although its checks failed, or roll it back."""

from typing import Any

from airflow.sdk import Context

from jobs.finality.run.folder import RunFolder
from jobs.lake.slices import LedgerLine, State
from jobs.pipelines.rules import RefusedDefinitionError
from jobs.pipelines.slices import slice_named
from jobs.refusal import Refusal
from tideline_airflow.links import SlicesLink
from tideline_airflow.listeners import RUN_NOTE, RUN_NOTE_LENGTH
from tideline_airflow.operators.batch import PipelineOperator
from tideline_airflow.operators.publish import PublishOperator
from tideline_airflow.refusals import fails_for_good_on


def _blocked(operator: PipelineOperator, slice_: str) -> LedgerLine:
    """The ledger's newest line of a slice; refused unless its state is blocked."""
    slice_named(operator.definition, slice_)
    ledger = operator.lake().ledger()
    entry = ledger.newest([slice_]).get(slice_) if ledger else None
    if entry is None or entry.state is not State.BLOCKED:
        state = entry.state if entry else "unknown"
        raise Refusal(
            f"slice {slice_} of {operator.pipeline!r} is not blocked, its state is {state}: there is nothing to approve"
        )
    return entry


def _shown(folder: RunFolder, slice_: str) -> str:
    """Identifies the rows that a person is shown. The run's name is not enough: a cleared run keeps its name."""
    verdict = (folder.verdicts() or {}).get(slice_, {})
    return f"{folder.plan().as_of_ms} {verdict.get('checksum')}"


class ShowBlockedOperator(PipelineOperator):
    """Shows why a slice is blocked, and what publishing it would change."""

    template_fields = ("pipeline", "slice")
    operator_extra_links = (SlicesLink(),)

    def __init__(self, *, slice: str, **kwargs: Any) -> None:
        """Pipeline and slice may be templates."""
        super().__init__(**kwargs)
        self.slice = slice

    def execute(self, context: Context) -> dict[str, Any]:
        """Return the facts for the decision; refused if the slice is not blocked."""
        with fails_for_good_on(Refusal, RefusedDefinitionError):
            entry = _blocked(self, self.slice)
            folder = RunFolder.of(self.lake(), entry.run)
            verdict = (folder.verdicts() or {}).get(self.slice)
            if verdict is None:
                raise Refusal(
                    f"the rows that run {entry.run} staged for slice {self.slice} were deleted: restate the slice "
                    "instead"
                )
            shown = _shown(folder, self.slice)
        failures = [f"* {f['expectation']}: {f['observed']} ({f['severity']})" for f in verdict["failures"]]
        heads = [
            f"Slice **{self.slice}** of **{self.pipeline}**, {verdict['rows']:,} rows, run `{entry.run}`.",
            f"It would become version {entry.version}. These checks failed:",
        ]
        body = "\n\n".join([*heads, "\n".join(failures)])
        self.log.info("%s", body)
        subject = f"Publish slice {self.slice} of {self.pipeline} although its checks failed?"
        return {"run": entry.run, "shown": shown, "subject": subject, "body": body}


class PublishBlockedOperator(PublishOperator):
    """Publishes a blocked slice that a person has approved; the ledger records who and why."""

    template_fields = ("pipeline", "slice", "run", "shown", "by", "reason")

    def __init__(self, *, slice: str, run: str, shown: str, by: str, reason: str, **kwargs: Any) -> None:
        """All may be templates."""
        super().__init__(**kwargs)
        self.slice = slice
        self.run = run
        self.shown = shown
        self.by = by
        self.reason = reason

    def execute(self, context: Context) -> dict[str, int]:
        """Return the version that is served from now on."""
        with fails_for_good_on(Refusal):
            if not (self.reason or "").strip():
                raise Refusal("a blocked slice needs a reason to be published: enter one with the approval")
            folder = RunFolder.of(self.lake(), self.run)
            if _blocked(self, self.slice).run != self.run or _shown(folder, self.slice) != self.shown:
                raise Refusal(f"slice {self.slice} was computed again since it was shown: trigger this DAG again")
            approved = {self.slice: f"{self.by}: {self.reason.strip()}"}
        return self.tell(context, self.publish(self.run, approved))


class RollBackOperator(PublishOperator):
    """Publishes an earlier version of a slice again, as a new version; a dry run only shows both."""

    template_fields = ("pipeline", "slice", "to_version", "reason", "apply", "by")

    def __init__(
        self, *, slice: str, to_version: int | str, reason: str | None, apply: bool | str, by: str, **kwargs: Any
    ) -> None:
        """All may be templates, or params of the DAG. Params keep their types, and a reason is not rendered."""
        super().__init__(**kwargs)
        self.slice = slice
        self.to_version = to_version
        self.reason = reason
        self.apply = apply
        self.by = by

    def execute(self, context: Context) -> Any:
        """Return rows and checksums of both versions, and the result unless it is a dry run."""
        with fails_for_good_on(Refusal, RefusedDefinitionError):
            lines = self._look()
            if self.apply:
                lines += self._roll_back(context)
            else:
                lines.append("A dry run: nothing is changed.")
        self.log.info("%s", "\n".join(lines))
        context["ti"].xcom_push(RUN_NOTE, "\n\n".join(lines)[:RUN_NOTE_LENGTH])
        return {"said": lines}

    def _look(self) -> list[str]:
        from jobs.finality.rollback import earlier

        slice_named(self.definition, self.slice)
        lake = self.lake()
        final = lake.final()
        now = final.header(self.slice) if final else None
        if final is None or now is None:
            raise Refusal(f"slice {self.slice} of {self.pipeline!r} is not final: there is nothing to roll back")
        old, _ = earlier(lake, final, self.slice, int(self.to_version))
        return [
            f"Slice {header.slice}, version {header.version}: {header.rows:,} rows, checksum {header.checksum}, "
            f"verdict: {header.verdict}, reason: {header.reason}."
            for header in (now, old)
        ]

    def _roll_back(self, context: Context) -> list[str]:
        from jobs.finality import rollback

        reason = (self.reason or "").strip()
        if not reason:
            raise Refusal("a roll-back needs a reason: set reason, and the ledger records it")
        run, version = context["dag_run"].run_id, int(self.to_version)
        lake, kafka, now_ms = self.lake(), self.settings().kafka, self.broker_now_ms()
        header = rollback.roll_back(lake, kafka, self.slice, version, run=run, reason=reason, by=self.by, now_ms=now_ms)
        self.add_events(context, [self.slice])
        return [f"Done: the rows of version {version} are served again, as version {header.version}."]
