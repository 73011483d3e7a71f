"""Two accounts at a time: neither takes staged rows from the other, and an account commits all of its rows or none."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from jobs.control.epochs import Receipt
from jobs.control.folder import Control
from jobs.control.lease import LeaseLostError
from jobs.finality import account
from jobs.finality.comparison import Comparison
from jobs.lake import accounts as module
from jobs.lake.accounts import Accounts
from jobs.lake.delta.manifest import TornStageError
from jobs.storage.folders import remove
from tests.finality.accounts import PIPELINE, Made, never, two_slices
from tests.finality.test_account_kept import days_in, drift_file, name


def total(day: int) -> dict[str, Any]:
    return {"slice": name(day), "version": 1, "run": "r", "kind": "slice", "windows": 1, "differing": 1}


def versions(made: Made) -> list[int]:
    return [DeltaTable(made.root / kind / "rolling_sum").version() for kind in ("drift", "balance")]


def test_an_account_that_was_suspended_leaves_the_rows_of_its_successor(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is suspended before its upkeep. Meanwhile its successor compares other slices, for which it needs no lease."""
    monkeypatch.setattr(module, "_MERGE_EVERY_COMMITS", 1)
    suspended = Accounts.open(made.root, PIPELINE)
    suspended.add(drift_file(suspended, 0), 1, [total(0)])
    successor = Accounts.open(made.root, PIPELINE)
    staged = drift_file(successor, 1)
    suspended.maintain("")
    successor.add(staged, 1, [total(1)])
    assert days_in(made, "drift") == days_in(made, "balance") == {name(day)[:8] for day in (0, 1)}


@pytest.mark.parametrize(("written", "left"), [(1, 0), (2, 1)])
def test_an_account_whose_drift_rows_are_gone_commits_nothing(made: Made, written: int, left: int) -> None:
    accounts = Accounts.open(made.root, PIPELINE)
    stage = drift_file(accounts, 0)
    if not left:
        remove(stage)
    before = versions(made)
    with pytest.raises(TornStageError, match=rf"{written} rows were written into .*, but {left} are there"):
        accounts.add(stage, written, [total(0)])
    assert versions(made) == before
    assert accounts.done({name(0)[:8]}) == set()


def test_an_account_says_how_many_drift_rows_it_has_staged(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    made.build(two_slices())

    def compare(*arguments: Any) -> Comparison:
        stage: Path = arguments[-1]
        assert not stage.exists(), "another process removed it"
        return Comparison(totals=[total(0)], drift_rows=1)

    monkeypatch.setattr(account.session, "opened", lambda *_: nullcontext())
    monkeypatch.setattr(account, "compare", compare)
    with pytest.raises(TornStageError):
        made.account()
    assert Accounts.open(made.root, PIPELINE).done({name(0)[:8]}) == set()


def test_an_account_that_has_lost_its_lease_merges_nothing(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MERGE_EVERY_COMMITS", 1)
    monkeypatch.setattr(account.session, "opened", never)
    add, committed = Accounts.add, list[list[int]]()

    def lose(accounts: Accounts, *rows: Any) -> None:
        add(accounts, *rows)
        control = Control.of(made.root, PIPELINE.account_job)
        control.end(control.newest(), Receipt(time=time.time(), clean=False, cause="it slept"))
        committed.append(versions(made))

    monkeypatch.setattr(Accounts, "add", lose)
    for version in (1, 2, 3):
        made.publish(name(0), [], {0: 4}, version=version, fingerprint="other")
        with pytest.raises(LeaseLostError):
            made.account()
        assert versions(made) == committed[-1]
