"""An incident is opened, closed and announced once each, and updated by news only: in a folder and an object store."""

from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from multiprocessing.synchronize import Barrier
from pathlib import Path
from queue import Queue

import pytest
from obstore.store import MemoryStore

from jobs.control import incidents as module
from jobs.control.incident import (
    Happening,
    Incident,
    blocked_key,
    crash_loop_key,
    failed_run_key,
    missed_deadline_key,
    served_key,
    stalled_key,
    unexplained_key,
)
from jobs.control.incidents import Incidents
from jobs.pipelines.layout import INCIDENTS
from jobs.query.lake import incidents_table
from jobs.storage.documents import Documents
from tests import processes

KEY = "stream.ingest.crash-loop"


@pytest.fixture(params=["folder", "object store"])
def documents(request: pytest.FixtureRequest, tmp_path: Path) -> Documents:
    return Documents(tmp_path / INCIDENTS if request.param == "folder" else MemoryStore())


@pytest.fixture
def incidents(documents: Documents) -> Incidents:
    return Incidents(documents)


class Clock:
    """The time of day, in hours. It stands still until a test sets it."""

    def __init__(self) -> None:
        self.hour = 0.0

    def time(self) -> float:
        return self.hour * 3600


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def told(incidents: Incidents) -> list[tuple[float, float, str, bool]]:
    """Each incident: the hours of its opening and of its last document, its text, and whether it is over."""
    return [(one.opened / 3600, one.updated / 3600, one.text, one.closed) for one in incidents.all()]


def said(documents: Documents) -> list[str]:
    """The happenings that were written, in order."""
    found = [documents.read(name) for name in documents.names()]
    return [str(document["happening"]) for document in found if document]


def test_there_is_none_at_first_and_nothing_to_close(incidents: Incidents, documents: Documents) -> None:
    assert incidents.all() == []
    assert not incidents.close(KEY, "over")
    assert documents.names() == []


def test_it_is_opened_once_and_updated_by_news_only(incidents: Incidents, documents: Documents, clock: Clock) -> None:
    assert incidents.open(KEY, "no memory")
    for hour in (0, 1, 2):
        clock.hour = hour
        assert not incidents.open(KEY, "no memory")
    assert incidents.all() == [Incident(key=KEY, opened=0.0, updated=0.0, text="no memory", closed=False)]
    assert not incidents.open(KEY, "no disk")
    assert not incidents.open(KEY, "no disk")
    assert told(incidents) == [(0, 2, "no disk", False)]
    assert said(documents) == [Happening.OPENED, Happening.UPDATED]


def test_news_is_kept_once_an_hour(incidents: Incidents, documents: Documents, clock: Clock) -> None:
    for minute in range(0, 3 * 60, 7):
        clock.hour = minute / 60
        incidents.open(KEY, f"said at {minute}")
    assert said(documents) == [Happening.OPENED, Happening.UPDATED, Happening.UPDATED]
    assert [one.text for one in incidents.all()] == ["said at 126"]


def test_it_is_closed_once_whatever_the_hour(incidents: Incidents, documents: Documents, clock: Clock) -> None:
    incidents.open(KEY, "no memory")
    clock.hour = 0.1
    assert incidents.close(KEY, "epoch 7 runs well")
    assert not incidents.close(KEY, "epoch 7 runs well")
    assert told(incidents) == [(0, 0.1, "epoch 7 runs well", True)]
    assert said(documents) == [Happening.OPENED, Happening.CLOSED]


def test_what_was_closed_is_opened_again_as_another_one(incidents: Incidents, clock: Clock) -> None:
    incidents.open(KEY, "no memory")
    incidents.close(KEY, "it runs")
    clock.hour = 3
    assert incidents.open(KEY, "no memory")
    clock.hour = 5
    incidents.open(KEY, "still none")
    assert told(incidents) == [(3, 5, "still none", False), (0, 0, "it runs", True)]
    assert incidents.close(KEY, "it runs again")
    assert told(incidents) == [(3, 5, "it runs again", True), (0, 0, "it runs", True)]


def test_the_one_with_the_newest_word_comes_first(incidents: Incidents, clock: Clock) -> None:
    for clock.hour, key in enumerate("bac"):
        incidents.open(key, f"{key} opened")
    assert [one.key for one in incidents.all()] == ["c", "a", "b"]
    clock.hour = 4
    incidents.close("b", "over")
    clock.hour = 5
    incidents.open("a", "news of a")
    assert [one.text for one in incidents.all()] == ["news of a", "over", "c opened"]


def test_those_that_are_open_are_found_by_how_their_keys_begin(incidents: Incidents) -> None:
    keys = [
        crash_loop_key("rolling_sum"),
        stalled_key("rolling_sum"),
        stalled_key("rolling_sum_sliding"),
        "lag.numbers",
    ]
    for key in keys:
        incidents.open(key, "opened")
    incidents.close(keys[0], "over")
    assert [one.key for one in incidents.still_open("stream.rolling_sum.")] == [keys[1]]
    assert {one.key for one in incidents.still_open("stream.rolling_sum_sliding.", "lag.")} == {*keys[2:]}
    assert {one.key for one in incidents.still_open("stream.")} == {*keys[1:3]}
    assert incidents.still_open("nothing") == []


def test_keys_that_begin_alike_are_apart(incidents: Incidents) -> None:
    keys = ["stream.rolling_sum", "stream.rolling_sum.stalled", "stream.rolling_sum_sliding.stalled", "stream.rolling"]
    for key in keys:
        for _ in range(2):
            assert incidents.open(key, f"opened {key}")
            assert incidents.close(key, f"closed {key}")
    assert incidents.open(keys[1], "the third")
    found = incidents.all()
    assert {key: sum(one.key == key for one in found) for key in keys} == dict(zip(keys, (2, 3, 2, 2), strict=True))
    assert [one.key for one in found if not one.closed] == [keys[1]]


def test_more_than_nine_words_stay_in_order(incidents: Incidents, clock: Clock) -> None:
    for clock.hour in range(0, 50, 2):
        incidents.open(KEY, f"said at {clock.hour}")
    assert told(incidents) == [(0, 48, "said at 48", False)]


def test_a_word_that_a_power_cut_emptied_is_passed_over(tmp_path: Path, clock: Clock) -> None:
    incidents = Incidents.of(tmp_path)
    incidents.open(KEY, "no memory")
    clock.hour = 2
    incidents.open(KEY, "no disk")
    (tmp_path / INCIDENTS / f"{KEY}-000001").write_text("")
    assert told(incidents) == [(2, 2, "no disk", False)]
    assert not incidents.open(KEY, "no disk")
    assert incidents.close(KEY, "over")


def test_one_whose_opening_is_lost_is_closed_all_the_same(tmp_path: Path) -> None:
    incidents = Incidents.of(tmp_path)
    incidents.open(KEY, "no memory")
    incidents.close(KEY, "over")
    (tmp_path / INCIDENTS / f"{KEY}-000001").write_text("")
    assert incidents.still_open(KEY) == []


def test_all_that_was_written_is_read_by_another_reader(tmp_path: Path) -> None:
    Incidents.of(tmp_path).open(KEY, "no memory")
    assert [one.text for one in Incidents.of(tmp_path).all()] == ["no memory"]
    assert not Incidents.of(tmp_path).open(KEY, "no memory")


class Beaten(Documents):
    """A store in which another process writes between a listing of the names and the next write."""

    def __init__(self, documents: Documents) -> None:
        super().__init__(documents._place)
        self.other: Callable[[], object] | None = None

    def names(self) -> list[str]:
        seen = super().names()
        other, self.other = self.other, None
        if other:
            other()
        return seen


def test_one_that_looked_before_another_opened_opens_nothing(documents: Documents) -> None:
    beaten = Beaten(documents)
    beaten.other = lambda: Incidents(documents).open(KEY, "the first word")
    assert not Incidents(beaten).open(KEY, "the second word")
    assert [(one.text, one.closed) for one in Incidents(documents).all()] == [("the first word", False)]
    assert said(documents) == [Happening.OPENED]


def _open(folder: str, start: Barrier, results: "Queue[bool]") -> None:
    incidents = Incidents.of(Path(folder))
    for number in range(20):
        start.wait(60)
        results.put(incidents.open(f"key-{number}", "the same"))


def test_of_those_that_open_at_once_one_opens(tmp_path: Path) -> None:
    opened = processes.race(_open, tmp_path, racers=2, answers=40)
    assert sorted(opened) == [False] * 20 + [True] * 20
    assert len(Incidents.of(tmp_path).all()) == 20
    assert len(Documents.at(tmp_path / INCIDENTS).names()) == 20


# -- Messages about incidents --


def due(incidents: Incidents) -> list[tuple[str, bool]]:
    """The messages that are due: the key of each, and whether it is over."""
    return [(unsent.incident.key, unsent.incident.closed) for unsent in incidents.unsent()]


def tell(incidents: Incidents, *channels: str) -> None:
    """Send every due message through these channels."""
    for unsent in incidents.unsent():
        for channel in channels:
            claim = incidents.claim(unsent, channel)
            assert claim
            incidents.note_sent(claim)
        incidents.settle(unsent, channels)


def test_the_keys_of_incidents() -> None:
    assert blocked_key("rolling_sum", "20260101T000000Z") == "recompute.rolling_sum.blocked.20260101T000000Z"
    assert failed_run_key("stream_ingest") == "dag.stream_ingest.failed"
    assert missed_deadline_key("stream_ingest") == "dag.stream_ingest.deadline"
    assert served_key("rolling_sum") == "check.rolling_sum.served"
    assert unexplained_key("rolling_sum") == "account.rolling_sum.unexplained"


def test_an_opening_and_its_end_are_told_once_each(incidents: Incidents) -> None:
    key = blocked_key("rolling_sum", "20260101T000000Z")
    incidents.open(key, "total is null", link="http://here/docs")
    assert due(incidents) == [(key, False)]
    assert not incidents.all()[0].told
    tell(incidents, "smtp")
    assert due(incidents) == []
    incidents.close(key, "it passes")
    assert due(incidents) == [(key, True)]
    (incident,) = incidents.all()
    assert (incident.link, incident.was, incident.told) == ("http://here/docs", "total is null", False)
    tell(incidents, "smtp")
    assert due(incidents) == []
    (incident,) = incidents.all()
    assert incident.told


def test_news_of_what_was_told_is_no_message_and_leaves_nothing_to_read(
    incidents: Incidents, documents: Documents, clock: Clock
) -> None:
    incidents.open(KEY, "no memory")
    tell(incidents)
    clock.hour = 2
    incidents.open(KEY, "no disk")
    assert due(incidents) == []
    assert [one.told for one in incidents.all()] == [True]
    assert {f"{KEY}-000001.told", f"{KEY}-000002.told"} < set(documents.names())


def test_news_of_what_was_not_told_yet_is_in_its_message(incidents: Incidents, clock: Clock) -> None:
    incidents.open(KEY, "no memory")
    clock.hour = 2
    incidents.open(KEY, "no disk")
    assert [unsent.incident.text for unsent in incidents.unsent()] == ["no disk"]
    tell(incidents)
    assert due(incidents) == []


def test_what_is_over_before_it_was_told_is_one_message(incidents: Incidents, documents: Documents) -> None:
    incidents.open(KEY, "no memory")
    incidents.close(KEY, "it runs")
    assert due(incidents) == [(KEY, True)]
    tell(incidents)
    (incident,) = incidents.all()
    assert incident.told
    assert f"{KEY}-000001.told" not in documents.names()
    assert due(incidents) == []


def test_incidents_of_one_key_are_told_in_order(incidents: Incidents) -> None:
    incidents.open(KEY, "no memory")
    tell(incidents)
    incidents.close(KEY, "it runs")
    incidents.open(KEY, "no disk")
    assert due(incidents) == [(KEY, True), (KEY, False)]
    tell(incidents, "smtp")
    assert [one.told for one in incidents.all()] == [True, True]


def test_what_is_told_is_not_read_again(documents: Documents, monkeypatch: pytest.MonkeyPatch) -> None:
    incidents = Incidents(documents)
    for number in range(20):
        incidents.open(f"key-{number}", "opened")
    tell(incidents, "smtp")
    read: list[str] = []
    monkeypatch.setattr(documents, "read", read.append)
    assert incidents.unsent() == []
    assert read == []


def test_a_claim_keeps_others_away_until_it_is_given_back(incidents: Incidents, documents: Documents) -> None:
    incidents.open(KEY, "no memory")
    (unsent,) = incidents.unsent()
    claim = incidents.claim(unsent, "smtp")
    assert claim
    other = Incidents(documents)
    assert other.claim(unsent, "smtp") is None, "by what was seen before"
    assert other.claim(other.unsent()[0], "smtp") is None
    assert other.claim(unsent, "apprise_1"), "another channel"
    incidents.give_back(claim)
    assert other.claim(other.unsent()[0], "smtp")


def test_a_channel_that_has_the_message_is_not_asked_again(incidents: Incidents, clock: Clock) -> None:
    incidents.open(KEY, "no memory")
    (unsent,) = incidents.unsent()
    claim = incidents.claim(unsent, "smtp")
    assert claim
    incidents.note_sent(claim)
    clock.hour = 100
    (unsent,) = incidents.unsent()
    assert unsent.sent == {"smtp"}
    assert incidents.claim(unsent, "smtp") is None


@pytest.mark.parametrize("hours", [0.2, -5.0], ids=["old", "of a clock that was set back"])
def test_a_claim_whose_holder_died_is_taken_over_by_one(
    hours: float, incidents: Incidents, documents: Documents, clock: Clock
) -> None:
    clock.hour = 10
    incidents.open(KEY, "no memory")
    dead = incidents.claim(incidents.unsent()[0], "smtp")
    clock.hour += hours
    (unsent,) = incidents.unsent()
    taken = incidents.claim(unsent, "smtp")
    assert taken
    assert taken != dead
    assert Incidents(documents).claim(unsent, "smtp") is None
    assert Incidents(documents).claim(incidents.unsent()[0], "smtp") is None


def test_a_claim_that_a_power_cut_emptied_silences_nobody(tmp_path: Path) -> None:
    incidents = Incidents.of(tmp_path)
    incidents.open(KEY, "no memory")
    claim = incidents.claim(incidents.unsent()[0], "smtp")
    (tmp_path / INCIDENTS / str(claim)).write_text("")
    assert incidents.claim(incidents.unsent()[0], "smtp")


def _claim(folder: str, start: Barrier, results: "Queue[bool]") -> None:
    incidents = Incidents.of(Path(folder))
    for number in range(20):
        (unsent,) = [one for one in incidents.unsent() if one.incident.key == f"key-{number}"]
        start.wait(60)
        results.put(incidents.claim(unsent, "smtp") is not None)


def test_of_those_that_claim_at_once_one_sends(tmp_path: Path) -> None:
    for number in range(20):
        Incidents.of(tmp_path).open(f"key-{number}", "the same")
    claimed = processes.race(_claim, tmp_path, racers=2, answers=40)
    assert sorted(claimed) == [False] * 20 + [True] * 20


def test_they_are_a_table(incidents: Incidents, clock: Clock) -> None:
    incidents.open("a", "no memory", link="http://here")
    clock.hour = 1.5
    incidents.close("a", "it runs")
    clock.hour = 2
    incidents.open("b", "no disk")
    tell(incidents)
    incidents.open("c", "not told")
    table = incidents_table(incidents.all()).to_pylist()
    moments = {"opened": datetime.fromtimestamp(0, UTC), "updated": datetime.fromtimestamp(5400, UTC)}
    shown = {row["key"]: row for row in table}
    told = {"closed": moments["updated"], "text": "it runs", "link": "http://here", "told": True}
    assert shown["a"] == {"key": "a", **moments, **told}
    assert (shown["b"]["told"], shown["b"]["link"], shown["b"]["closed"]) == (True, None, None)
    assert not shown["c"]["told"]
    assert incidents_table([]).schema == incidents_table(incidents.all()).schema


def test_the_failure_of_a_run_is_known_once_it_is_noted(incidents: Incidents) -> None:
    assert not incidents.knows_failure("recompute_sums", "run 1")
    for run in ("run 1", "run 2"):
        incidents.note_failure("recompute_sums", run)
        assert incidents.knows_failure("recompute_sums", run)
    assert not incidents.knows_failure("recompute_sums", "run 1")
    assert not incidents.knows_failure("recompute", "run 2")
    assert incidents.all() == incidents.unsent() == []


# -- Incidents that were over and announced long ago --

DAY = 24.0


class Listed(Documents):
    """Counts how often the names were listed."""

    def __init__(self, documents: Documents) -> None:
        super().__init__(documents._place)
        self.listed = 0

    def names(self) -> list[str]:
        self.listed += 1
        return super().names()


def test_the_names_are_listed_once_for_all_slices_that_are_final(documents: Documents) -> None:
    listed = Listed(documents)
    slices = [f"20260101T00{minute:02d}00Z" for minute in range(20)]
    for name in slices[:2]:
        Incidents(documents).open(blocked_key("rolling_sum", name), "total is null")
    Incidents(listed).close_blocked("rolling_sum", slices)
    assert listed.listed == 1
    assert [one.closed for one in Incidents(documents).all()] == [True, True]
    Incidents(listed).close_blocked("rolling_sum", [])
    assert listed.listed == 1


def test_the_names_are_listed_once_for_all_slices_that_are_blocked(documents: Documents, clock: Clock) -> None:
    listed = Listed(documents)
    texts = {blocked_key("rolling_sum", f"20260101T00{minute:02d}00Z"): f"{minute}" for minute in range(20)}
    first, second, third, *_ = texts
    for key in (first, second, third):
        Incidents(documents).open(key, "as before")
    Incidents(documents).close(third, "the slice is final now")
    clock.hour = 2
    Incidents(listed).open_all(texts, link="http://here")
    assert listed.listed == 1
    incidents = Incidents(documents)
    assert {one.key: one.text for one in incidents.still_open("")} == texts
    assert len(incidents.all()) == len(texts) + 1, "two were open and get news, one was closed and is opened again"
    assert {one.link for one in incidents.still_open("")} == {"http://here"}
    Incidents(listed).open_all({})
    assert listed.listed == 1


def test_what_was_over_and_told_long_ago_goes_with_all_its_documents(
    incidents: Incidents, documents: Documents, clock: Clock
) -> None:
    incidents.open(KEY, "no memory")
    tell(incidents, "smtp", "apprise_1")
    clock.hour = 2
    incidents.open(KEY, "no disk")
    incidents.close(KEY, "it runs")
    tell(incidents, "smtp")
    clock.hour = 90 * DAY
    assert incidents.discard_old(90 * DAY * 3600) == 0
    clock.hour = 90 * DAY + 3
    assert incidents.discard_old(90 * DAY * 3600) == 9
    assert documents.names() == []
    assert incidents.open(KEY, "no memory")
    assert due(incidents) == [(KEY, False)]


@pytest.mark.parametrize("state", ["open", "closed", "told open"])
def test_what_is_open_or_not_told_stays(state: str, incidents: Incidents, documents: Documents, clock: Clock) -> None:
    incidents.open(KEY, "no memory")
    if state == "closed":
        incidents.close(KEY, "it runs")
    elif state == "told open":
        tell(incidents)
    before = documents.names()
    clock.hour = 1000 * DAY
    assert incidents.discard_old(3600.0) == 0
    assert documents.names() == before


def test_of_one_key_the_old_incidents_go_and_numbers_go_on(
    incidents: Incidents, documents: Documents, clock: Clock
) -> None:
    for clock.hour in (0, 100 * DAY):
        incidents.open(KEY, f"opened at {clock.hour}")
        incidents.close(KEY, "it runs")
        tell(incidents)
    assert incidents.discard_old(90 * DAY * 3600) == 3
    assert told(incidents) == [(100 * DAY, 100 * DAY, "it runs", True)]
    assert incidents.open(KEY, "no disk")
    assert f"{KEY}-000005" in documents.names()
    assert due(incidents) == [(KEY, False)]


class CutShort(Documents):
    """A store that kills its process after some deletions."""

    def __init__(self, documents: Documents, deletions: int) -> None:
        super().__init__(documents._place)
        self.deletions = deletions

    def delete(self, name: str) -> None:
        if not self.deletions:
            raise KeyboardInterrupt
        self.deletions -= 1
        super().delete(name)


@pytest.mark.parametrize("deletions", range(7))
@pytest.mark.parametrize("opened_again", [False, True])
def test_whenever_a_removal_is_cut_short_nothing_is_told_twice_or_taken_for_open(
    deletions: int, opened_again: bool, incidents: Incidents, documents: Documents, clock: Clock
) -> None:
    incidents.open(KEY, "no memory")
    tell(incidents, "smtp")
    incidents.close(KEY, "it runs")
    tell(incidents, "smtp")
    assert len(documents.names()) == 6
    clock.hour = 100 * DAY
    with pytest.raises(KeyboardInterrupt) if deletions < 6 else nullcontext():
        Incidents(CutShort(documents, deletions)).discard_old(90 * DAY * 3600)
    assert due(incidents) == []
    assert incidents.still_open(KEY) == []
    assert all(one.closed and one.told for one in incidents.all())
    if opened_again:
        assert incidents.open(KEY, "no disk")
        assert due(incidents) == [(KEY, False)]
    incidents.discard_old(90 * DAY * 3600)
    assert len(documents.names()) == opened_again
    assert due(incidents) == [(KEY, False)][:opened_again]
