"""The fingerprint of checks: a slice that was blocked is tried again if its checks could now give another verdict."""

from dataclasses import fields, replace
from typing import Any

import pytest

from jobs.pipelines import PIPELINES
from jobs.pipelines.window import Check, Severity

SUM = PIPELINES["rolling_sum"]
CHECK = Check(column="total")
CHANGES: dict[str, Any] = {"column": "mean", "minimum": 1, "maximum": 9, "severity": Severity.WARNING}


def test_every_field_of_a_check_is_changed_here() -> None:
    assert set(CHANGES) == {field.name for field in fields(Check)}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_check_gives_another_fingerprint_of_the_checks_alone(name: str) -> None:
    before = replace(SUM, checks=(CHECK,))
    after = replace(SUM, checks=(replace(CHECK, **{name: CHANGES[name]}),))
    assert after.checks_fingerprint != before.checks_fingerprint
    assert after.fingerprint == before.fingerprint


def test_so_does_another_measure_that_counts() -> None:
    assert replace(SUM, counts=None).checks_fingerprint != SUM.checks_fingerprint
