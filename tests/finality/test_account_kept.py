"""Accounts of a year: a run reads only new days, old days are removed, and unexplained slices stay in the list."""

import json
import time
from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from jobs.control.folder import Control
from jobs.control.incident import unexplained_key
from jobs.control.incidents import Incidents
from jobs.finality import account
from jobs.finality import account_inputs as accounted_module
from jobs.finality.account_inputs import AccountProgress
from jobs.lake import accounts as module
from jobs.lake.accounts import Accounts, drift_schema
from jobs.lake.delta import fenced
from jobs.lake.delta.reading import rows_by_partition
from jobs.lake.final import FinalTable
from jobs.lake.pipeline_lake import PipelineLake
from jobs.pipelines.slices import slice_at
from jobs.settings import Settings
from tests.finality.accounts import FIRST, PIPELINE, Made, done, never, two_slices
from tests.judges.naive_stream import T0

DAY_MS = 86_400_000
OTHER = "made by another definition"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Spark must not start, and all machines have the same clock."""
    monkeypatch.setattr(account.session, "opened", never)
    monkeypatch.setattr(account, "_CLOCKS", timedelta(0))
    return Made(replace(Settings.from_env({}), lake_root=tmp_path / "lake"))


def name(day: int) -> str:
    """The slice of a day; days are counted from the first one."""
    return slice_at(PIPELINE, T0 - T0 % DAY_MS + day * DAY_MS).name


def finals(made: Made, *days: int) -> None:
    """One slice of each day is final, and has its account."""
    for day in days:
        made.publish(name(day), [], {0: 4})
    for day in days:
        done(made, (name(day), 1))


class Read:
    """The days of headers and totals that a run reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.days = set[str]()
        headers, done = FinalTable.headers, Accounts.done

        def read_headers(table: FinalTable, days: Collection[str] | None = None) -> Any:
            self.days |= set(table.days() if days is None else days)
            return headers(table, days)

        def read_done(accounts: Accounts, days: Collection[str] | None = None) -> Any:
            assert days is not None, "all totals there ever were"
            self.days |= set(days)
            return done(accounts, days)

        monkeypatch.setattr(FinalTable, "headers", read_headers)
        monkeypatch.setattr(Accounts, "done", read_done)


def test_a_run_reads_what_was_published_since_the_last_one_and_no_more(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    finals(made, *range(39, -1, -1))
    made.account()
    made.publish(name(7), [], {0: 4}, version=2, fingerprint="other")
    made.publish(name(40), [], {0: 4}, fingerprint="other")
    with monkeypatch.context() as patch:
        read = Read(patch)
        made.account()
    noted = {row[:2] for row in made.slices() if row[5] and row[5].startswith(OTHER)}
    assert noted == {(name(7), 2), (name(40), 1)}
    # Day 0 is read because the line of finished slices stops there: each day has only one slice.
    assert read.days == {name(day)[:8] for day in (0, 7, 40)}
    # The day that was published last is read once more, since a run reads all days from then on.
    read = Read(monkeypatch)
    made.account()
    assert read.days == {name(day)[:8] for day in (0, 40)}


def test_what_is_due_is_counted_without_a_look_at_what_is_old(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    finals(made, *range(39, -1, -1))
    made.account()
    made.publish(name(40), [], {0: 4}, events=7)
    made.publish(name(41), [], {0: 4}, events=5)
    read = Read(monkeypatch)
    assert accounted_module.events_due(PipelineLake(made.root, PIPELINE)) == 12
    assert read.days == {name(day)[:8] for day in (0, 40, 41)}


def test_what_a_run_did_not_get_to_is_looked_at_by_the_next(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    finals(made, 0)
    made.account()
    for day in range(1, 6):
        made.publish(name(day), [], {0: 4}, fingerprint="other")
    monkeypatch.setattr(accounted_module, "MAX_SLICES", 2)
    for _ in range(3):
        made.account()
    assert len(made.slices()) == 6
    made.publish(name(6), [], {0: 4}, fingerprint="other")
    with monkeypatch.context() as patch:
        patch.setattr(Accounts, "add", never)
        with pytest.raises(AssertionError):
            made.account("died")
    made.account("again")
    assert len(made.slices()) == 7


def test_what_is_published_while_the_clock_of_an_account_is_ahead_has_its_account(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    finals(made, 0, 1)
    with monkeypatch.context() as patch:
        ahead = time.time() + 5 * 3600
        patch.setattr(account.time, "time", lambda: ahead)
        made.account()
    made.publish(name(0), [], {0: 4}, version=2, fingerprint="other")
    made.account("again")
    assert (name(0), 2) in {row[:2] for row in made.slices()}


def test_what_is_published_by_a_clock_that_was_ahead_hides_nothing_that_is_published_later(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        ahead = time.time() + 5 * 3600
        patch.setattr(fenced.time, "time", lambda: ahead)
        finals(made, 0, 1)
    made.account()
    made.publish(name(0), [], {0: 4}, version=2, fingerprint="other")
    made.account("again")
    assert (name(0), 2) in {row[:2] for row in made.slices()}


@pytest.mark.parametrize("content", [b"", b'{"to_ms": "soon"}'])
def test_a_torn_document_costs_one_look_at_everything(made: Made, content: bytes) -> None:
    finals(made, 0, 1)
    made.account()
    made.publish(name(0), [], {0: 4}, version=2, fingerprint="other")
    (made.root / "control" / PIPELINE.account_job / "progress").write_bytes(content)
    made.account()
    assert {row[:2] for row in made.slices()} == {(name(0), 1), (name(0), 2), (name(1), 1)}
    assert AccountProgress.read(PipelineLake(made.root, PIPELINE)) is not None


def drift_file(accounts: Accounts, day: int) -> Path:
    """A file of one unexplained difference in a window of a slice."""
    stage, schema = accounts.new_stage(), drift_schema(PIPELINE)
    start = slice_at(PIPELINE, T0 - T0 % DAY_MS + day * DAY_MS).start
    row = {
        "window_start": start,
        "slice": name(day),
        "version": 1,
        "run": "r",
        "key": "k",
        "unexplained": {"events": 1},
    }
    file = stage / f"day={name(day)[:8]}" / "drift.parquet"
    file.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([row], schema.remove(schema.get_field_index("day"))), file)
    return stage


def accounted(made: Made, day: int, windows: int, version: int = 1) -> None:
    """Write an account of a slice with this number of unexplained windows."""
    accounts = Accounts.open(made.root, PIPELINE)
    row = {"slice": name(day), "version": version, "run": "r", "kind": "slice", "unexplained": windows}
    accounts.add(drift_file(accounts, day), 1, [row])
    accounts.maintain("")


def days_in(made: Made, kind: str) -> set[str]:
    return set(rows_by_partition(DeltaTable(made.root / kind / "rolling_sum")))


def off(made: Made) -> list[tuple[str, int]]:
    return [(row["slice"], row["version"]) for row in Accounts.open(made.root, PIPELINE).unexplained()]


def test_days_that_are_older_than_is_kept_go_and_never_come_back(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MERGE_EVERY_COMMITS", 1)
    monkeypatch.setenv("DRIFT_KEPT_DAYS", "10")
    for day in range(15):
        made.publish(name(day), [], {0: 4})
        accounted(made, day, windows=0)
    made.publish(name(15), [], {0: 4}, fingerprint="other")
    made.account()
    kept = {name(day)[:8] for day in range(5, 16)}
    assert (days_in(made, "drift"), days_in(made, "balance")) == (kept - {name(15)[:8]}, kept)
    (made.root / "control" / PIPELINE.account_job / "progress").unlink()
    made.publish(name(2), [], {0: 4}, version=2)
    with monkeypatch.context() as patch:
        patch.setattr(Accounts, "add", never)
        made.account("again")


def test_live_rows_of_slices_whose_account_was_removed_can_still_be_pruned(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRIFT_KEPT_DAYS", "10")
    scene = two_slices()
    made.land(scene.events)
    for number, batch in enumerate(scene.batches):
        made.stream(number, batch, [row for row in scene.live_rows() if row[-2] == number])
    made.publish(FIRST.name, [], {0: 4})
    finals(made, 30)
    made.account()
    asked = made.asked()
    assert asked
    assert asked["slices"] == [FIRST.name]


def test_what_is_unexplained_is_handed_on_and_read_from_no_total(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    accounted(made, 0, windows=2)
    for day in range(1, 4):
        accounted(made, day, windows=0)
    accounted(made, 4, windows=1)
    with monkeypatch.context() as patch:
        patch.setattr(module._DayTable, "rows", never)
        assert off(made) == [(name(0), 1), (name(4), 1)]
    accounted(made, 0, windows=0, version=2)
    assert off(made) == [(name(4), 1)]
    accounted(made, 4, windows=3, version=2)
    assert off(made) == [(name(4), 2)]


@pytest.mark.parametrize("most", [0, 1000])
def test_merges_and_long_lists_lose_nothing_that_is_unexplained(
    made: Made, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(module, "_MERGE_EVERY_COMMITS", 2)
    monkeypatch.setattr(module, "_MOST_UNEXPLAINED", most)
    wanted = []
    for day in range(8):
        accounted(made, day, windows=day % 2)
        wanted += [(name(day), 1)] if day % 2 else []
        assert off(made) == wanted


def test_accounts_of_an_older_release_are_read_once(made: Made) -> None:
    accounted(made, 0, windows=2)
    balance = Accounts.open(made.root, PIPELINE)._balance
    balance.transact([], json.dumps({"accounts": []}))
    assert off(made) == [(name(0), 1)]
    accounted(made, 1, windows=0)
    metadata = Accounts.open(made.root, PIPELINE)._balance.newest_metadata()
    assert metadata["unexplained"] == [[name(0), 1, 2]]


def test_an_incident_stays_open_for_as_long_as_its_account_is_kept(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MERGE_EVERY_COMMITS", 1)
    monkeypatch.setenv("DRIFT_KEPT_DAYS", "3")
    made.publish(name(0), [], {0: 4})
    accounted(made, 0, windows=1)
    is_open = []
    for day in range(1, 6):
        made.publish(name(day), [], {0: 4}, fingerprint="other")
        made.account()
        made.account()
        is_open.append(bool(Incidents.of(made.root).still_open(unexplained_key("rolling_sum"))))
    assert is_open == [True, True, True, False, False]
    assert Control.of(made.root, PIPELINE.account_job).documents.read("progress")
