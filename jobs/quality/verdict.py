"""What an audit says."""

from dataclasses import dataclass

from jobs.pipelines.window import Severity


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One expectation that failed, for one slice or for all that is served."""

    expectation: str
    type: str
    column: str | None
    severity: Severity
    observed: str

    @property
    def sentence(self) -> str:
        """For people."""
        return f"{self.expectation} ({self.observed})"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found in one slice, or in all that is served."""

    slice: str
    failures: tuple[Failure, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing critical failed: the slice may be published."""
        return all(failure.severity is not Severity.CRITICAL for failure in self.failures)

    @property
    def sentence(self) -> str:
        """Everything that failed, for people."""
        return "; ".join(failure.sentence for failure in self.worst_first)

    @property
    def worst_first(self) -> list[Failure]:
        """What blocks before what only warns."""
        return sorted(self.failures, key=lambda failure: failure.severity is not Severity.CRITICAL)
