"""Heartbeats, receipts, and what follows from them."""

import logging
import subprocess
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from jobs.control.epochs import (
    STALE_SECONDS,
    Attach,
    Beat,
    Epoch,
    Health,
    Launch,
    Owner,
    Phase,
    QueryProgress,
    Receipt,
    Wait,
)
from jobs.control.folder import Control, death_of, last_words
from jobs.control.lease import Lease
from jobs.refusal import Refusal
from jobs.storage.documents import Documents
from tests.control.made import JOB, elsewhere, ended, held, newest_health, write_lease
from tests.processes import wait_until

# -- Heartbeats and receipts --


def test_a_heartbeat_tells_what_is_shown(control: Control, quick: None) -> None:
    with held(control, stall_seconds=33.0) as lease:
        assert newest_health(control) is Health.STARTING
        numbers = QueryProgress(topic="numbers", stepped=time.time(), batch=7, rows=12, lag=3, watermark="2026")
        lease.update_heartbeat(phase=Phase.RUNNING, queries=(numbers,), ui="http://here:4040")
        wait_until(lambda: newest_health(control) is Health.RUNNING, "the beat", 10)
        beat = control.epoch(1).beat
        assert beat
        assert beat == Beat(
            time=beat.time,
            owner=Owner.this_process(),
            phase=Phase.RUNNING,
            stall_seconds=33.0,
            ui="http://here:4040",
            queries=(numbers,),
        )
        wait_until(lambda: control.epoch(1).last_sign > beat.time, "the next beat", 10)


def test_a_receipt_is_told_as_it_was_written(control: Control) -> None:
    receipt = Receipt(
        time=12.5, clean=True, cause="drained", batches={"numbers": 4}, offsets={"numbers": {0: 7, 11: 10**12}}
    )
    Lease.acquire(control, {}).release(receipt)
    assert control.epoch(1).receipt == receipt


def test_the_first_receipt_counts(control: Control) -> None:
    assert control.end(1, ended("first", clean=False))
    assert not control.end(1, ended("second"))
    receipt = control.epoch(1).receipt
    assert receipt
    assert receipt.cause == "first"


def test_after_its_release_it_beats_no_more(control: Control, quick: None) -> None:
    with held(control) as lease:
        pass
    assert not lease._beating.is_alive()
    assert newest_health(control) is Health.STOPPED


def test_the_death_of_a_driver_tells_how_far_it_came(control: Control) -> None:
    write_lease(control, 1, age=1000)
    done = (
        QueryProgress(topic="numbers", stepped=0, batch=7),
        QueryProgress(topic="lines", stepped=0),
        QueryProgress(topic="clicks", stepped=0, batch=0),
    )
    control.beat(1, Beat(time=86400.0, owner=elsewhere(), phase=Phase.RUNNING, queries=done))
    assert death_of(control.epoch(1)) == (
        "the driver died without a receipt (killed, or out of memory): process 1 on another-host, "
        "last heartbeat 1970-01-02 00:00:00 UTC, after numbers batch 7, clicks batch 0"
    )
    control.beat(1, Beat(time=86400.0, owner=elsewhere(), phase=Phase.STARTING))
    assert death_of(control.epoch(1)).endswith(", after no batch")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\nb\n", "b"),
        ("a\n\n  \n", "a"),
        ("tideline: no topic clicks\nTraceback\n", "tideline: no topic clicks"),
        ("tideline: one\ntideline: two\nbye", "tideline: two"),
        ("", "the log is empty"),
        ("x" * 10**6 + "\nthe end", "the end"),
        ("tideline: long ago\n" + "INFO x\n" * 10**5, "INFO x"),
    ],
    ids=["the last line", "that says something", "a refusal", "the last refusal", "nothing", "of many", "of its end"],
)
def test_the_last_words_of_a_log(text: str, words: str, tmp_path: Path) -> None:
    log_file = tmp_path / "driver.log"
    log_file.write_text(text)
    beat = Beat(time=0.0, owner=elsewhere(), phase=Phase.LAUNCHED, log=str(log_file))
    assert last_words(Epoch(number=1, taken=0.0, beat=beat)) == words


def test_a_log_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    beat = Beat(time=0.0, owner=elsewhere(), phase=Phase.LAUNCHED, log=str(tmp_path / "none.log"))
    told = last_words(Epoch(number=1, taken=0.0, beat=beat))
    assert told == f"{tmp_path / 'none.log'} cannot be read here (No such file or directory)"


# -- Documents of another version --

DOCUMENTS: dict[str, dict[str, Any]] = {
    "lease": {"time": 1.0, "owner": asdict(elsewhere()), "launched": True},
    "heartbeat": {
        "time": 2.0,
        "owner": asdict(elsewhere()),
        "phase": "running",
        "queries": [{"topic": "numbers", "stepped": 3.0, "lag": 4}],
    },
    "stop": {"time": 5.0, "by": "an operator", "drain": True},
    "receipt": {"time": 6.0, "clean": False, "cause": "no memory", "offsets": {"numbers": {"0": 7}}},
}


def told(kind: str, epoch: Epoch) -> object:
    """The part of an epoch that comes from one kind of document."""
    if kind == "lease":
        return (epoch.taken, epoch.owner, epoch.launched)
    return {"heartbeat": epoch.beat, "stop": epoch.stop, "receipt": epoch.receipt}[kind]


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_one_that_says_more_is_understood(kind: str, control: Control, caplog: pytest.LogCaptureFixture) -> None:
    control.documents.replace(f"{kind}-0000000001", DOCUMENTS[kind])
    control.documents.replace(f"{kind}-0000000002", saying_more(DOCUMENTS[kind]))
    understood = told(kind, control.epoch(2))
    assert understood == told(kind, control.epoch(1)) != told(kind, control.epoch(3))
    assert caplog.messages == []


def saying_more(value: Any, path: tuple[str, ...] = ()) -> Any:
    """The same document with one more field in each object, except in tables of topics and partitions."""
    if isinstance(value, list):
        return [saying_more(one, path) for one in value]
    if not isinstance(value, dict):
        return value
    more = {} if "offsets" in path else {"mood": "calm"}
    return {**{name: saying_more(one, (*path, name)) for name, one in value.items()}, **more}


UNREADABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "a lease whose owner says something else": ("lease", {"time": 1.0, "owner": {"name": "x"}}),
    "a lease whose owner is no object": ("lease", {"time": 1.0, "owner": "x"}),
    "a heartbeat without an owner": ("heartbeat", {"time": 1.0, "phase": "running", "queries": []}),
    "a heartbeat with another phase": ("heartbeat", {**DOCUMENTS["heartbeat"], "phase": "resting"}),
    "a heartbeat with other queries": ("heartbeat", {**DOCUMENTS["heartbeat"], "queries": ["numbers"]}),
    "a stop by nobody": ("stop", {"time": 1.0}),
    "a receipt without a cause": ("receipt", {"time": 1.0, "clean": True}),
    "a receipt with other partitions": ("receipt", {**DOCUMENTS["receipt"], "offsets": {"numbers": {"first": 7}}}),
}


@pytest.mark.parametrize(("kind", "document"), UNREADABLE.values(), ids=UNREADABLE)
def test_one_that_cannot_be_understood_tells_nothing(
    kind: str, document: dict[str, Any], control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    control.documents.replace(f"{kind}-0000000001", document)
    assert told(kind, control.epoch(1)) in (told(kind, control.epoch(3)), (1.0, None, False))
    assert f"document {kind}-0000000001 of job {JOB} cannot be read, and counts as missing" in caplog.messages


# -- What follows --


def test_one_that_died_without_a_word_gets_its_receipt_once(control: Control) -> None:
    control.write_missing_receipt()
    write_lease(control, 1, age=1000)
    assert newest_health(control) is Health.DEAD
    control.write_missing_receipt()
    receipt = control.epoch(1).receipt
    assert receipt
    assert not receipt.clean
    control.write_missing_receipt()
    assert control.epoch(1).receipt == receipt


def test_one_that_lives_or_ended_is_not_settled(control: Control) -> None:
    with held(control):
        control.write_missing_receipt()
        assert control.epoch(1).receipt is None
    control.write_missing_receipt()
    assert newest_health(control) is Health.STOPPED


def test_a_supervisor_launches_attaches_waits_and_launches_again(control: Control) -> None:
    assert control.next_step() == Launch()
    with held(control):
        assert control.next_step() == Attach(1)
    assert control.next_step() == Launch()
    for failed in (1, 2):
        write_lease(control, failed + 1, age=STALE_SECONDS + 1)
        step = control.next_step()  # This look sees the death, and writes the receipt.
        assert isinstance(step, Wait)
        assert step.failures == failed
        assert 0 < step.until - time.time() <= 5.0 * failed


def test_one_whose_process_is_gone_counts_as_failed_though_its_beat_is_fresh(
    shared: Control, holder: subprocess.Popen[str]
) -> None:
    assert shared.next_step() == Attach(1)
    holder.kill()
    holder.wait()
    step = shared.next_step()
    assert isinstance(step, Wait)
    assert step.failures == 1


def test_an_operator_forgives_the_failures_so_far(control: Control) -> None:
    control.reset_failures("an operator")
    assert control.next_step() == Launch()
    write_lease(control, 2, age=1000)
    assert isinstance(control.next_step(), Wait)
    control.reset_failures("an operator")
    assert control.next_step() == Launch()
    receipt = control.history()[-1].receipt
    assert receipt
    assert (receipt.clean, receipt.cause) == (True, "earlier failures do not count any more: started by an operator")
    with held(control), pytest.raises(Refusal, match="already running"):
        control.reset_failures("an operator")


class Full(Documents):
    """A store that refuses the next writes of a kind."""

    def __init__(self, refused: int, kind: str) -> None:
        super().__init__(MemoryStore())
        self.refused, self.kind = refused, kind
        self.armed = threading.Event()

    def create(self, name: str, document: dict[str, Any]) -> bool:
        self._refuse(name)
        return super().create(name, document)

    def replace(self, name: str, document: dict[str, Any], *, durable: bool = True) -> None:
        self._refuse(name)
        super().replace(name, document, durable=durable)

    def _refuse(self, name: str) -> None:
        if self.armed.is_set() and name.startswith(self.kind) and self.refused:
            self.refused -= 1
            raise OSError(28, "No space left on device")


def test_a_beat_that_fails_is_tried_again(quick: None, caplog: pytest.LogCaptureFixture) -> None:
    full = Full(3, "heartbeat")
    control = Control(full, JOB)
    with held(control) as lease:
        full.armed.set()
        lease.update_heartbeat(phase=Phase.RUNNING)
        wait_until(lambda: newest_health(control) is Health.RUNNING, "a beat after those that failed", 10)
        lease.check()
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in told] == [f"no heartbeat of {JOB} could be written"] * 3
