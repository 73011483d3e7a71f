"""The result of an audit or a check."""

from dataclasses import dataclass

from jobs.pipelines.window import Severity


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One expectation that failed, for one slice or for all served windows."""

    expectation: str
    type: str
    column: str | None
    severity: Severity
    observed: str

    @property
    def sentence(self) -> str:
        """The failure in words, for people."""
        return f"rule '{self.expectation}' failed: {self.observed}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The failures of one slice, or of all served windows."""

    failures: tuple[Failure, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing critical failed: the slice may be published."""
        return all(failure.severity is not Severity.CRITICAL for failure in self.failures)

    @property
    def sentence(self) -> str:
        """All failures in words, for people."""
        return "; ".join(failure.sentence for failure in self.worst_first)

    @property
    def worst_first(self) -> list[Failure]:
        """The failures, critical ones before warnings."""
        return sorted(self.failures, key=lambda failure: failure.severity is not Severity.CRITICAL)
