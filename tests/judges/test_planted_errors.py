"""The simulation finds errors that are planted into the product."""

from pathlib import Path

import pytest

from jobs.finality import due, publishing
from jobs.lake.slices import Boundary
from jobs.pipelines.slices import slice_at
from tests.judges.histories import ASKED, settle, simulate
from tests.judges.simulated_tables import FinalModel
from tests.judges.simulated_world import BEGIN_MS, MINUTE_MS, SUM, World
from tests.judges.simulation import model_of, planner_of, run

# -- The simulation finds planted errors --


def test_a_publish_that_does_not_look_at_the_version_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FinalModel, "require_version", lambda *_: None)
    assert any(simulate(tmp_path, seed) for seed in range(100))


def test_a_run_that_forgets_what_a_dead_one_left_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(due, "_is_unannounced", lambda *_: False)
    assert any(simulate(tmp_path, seed) for seed in range(200))


def test_a_publish_that_does_not_look_at_the_clock_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "why_early", lambda *_: None)
    assert any(simulate(tmp_path, seed) for seed in range(0, 100, 5))


def test_a_plan_that_forgets_what_came_in_time_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due, "in_time_of", lambda *_: 0)
    monkeypatch.setattr(due, "reopens", lambda *_: False)
    assert any(simulate(tmp_path, seed) for seed in range(0, 500, 5))


def test_a_boundary_that_is_taken_too_early_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(Boundary, "is_reached", lambda *_: True)
    assert any(simulate(tmp_path, seed) for seed in range(200))


@pytest.mark.parametrize("begins", [False, True])
def test_late_events_of_an_old_day_reopen_a_slice_whichever_plan_counts_them(old: World, begins: bool) -> None:
    """A plan that waits for ingest counts them, as does a plan for another slice. Neither decides about this one."""
    late = slice_at(SUM, BEGIN_MS + MINUTE_MS)
    with model_of(old):
        run(old, "first")
        assert late.name[:8] != slice_at(SUM, old.clock_ms).name[:8]
        old.arrive(late.start_ms)
        old.broker.land_all()
        if begins:
            run(old, "counts", ASKED)
        else:
            planner_of(old).take_boundaries("counts")
        assert old.counted is not None
        assert old.counted.undecided == (late.name,)
        run(old, "second")
        assert old.history[-1][late.name][0].version == 2
        assert old.counted.undecided == ()
        assert settle(old) == []
