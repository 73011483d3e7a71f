"""The task that waits longest has the highest weight."""

import time
from types import SimpleNamespace
from unittest import mock

from tideline_airflow.first_come import FirstCome

NOW = 1_800_000_000.0


def weight_at(moment: float, run: str = "scheduled__2026-11-19T15:23:00+00:00", after: frozenset = frozenset()) -> int:
    ti = SimpleNamespace(run_id=run, task=SimpleNamespace(upstream_task_ids=after))
    with mock.patch.object(time, "time", return_value=moment):
        return FirstCome().get_weight(ti)


def test_the_earlier_weighs_more():
    assert weight_at(NOW) > weight_at(NOW + 1)


def test_a_backfill_takes_what_the_others_leave():
    """All its runs are created at once. By their age alone they would all come before every later run."""
    day = 86_400
    of_backfill = [weight_at(NOW + second, "backfill__2026-11-19T15:23:00+00:00") for second in range(2)]
    assert of_backfill == sorted(of_backfill, reverse=True)
    for run in ("scheduled__x", "manual__x", "asset_triggered__x"):
        assert weight_at(NOW + 30 * day, run) > of_backfill[0]


def test_what_was_planned_is_computed_before_anything_else_is_planned():
    """Runs that begin in the same second have the same weight, and the database would choose."""
    for run in ("scheduled__x", "backfill__x"):
        assert weight_at(NOW, run, frozenset({"plan"})) > weight_at(NOW, run)
    assert weight_at(NOW, "backfill__x", frozenset({"plan"})) < weight_at(NOW + 3600)


def test_it_fits_into_airflows_column_for_a_while():
    long_from_now = NOW + 60 * 365 * 86_400
    assert -(2**31) <= weight_at(long_from_now) < weight_at(NOW) < 2**31
