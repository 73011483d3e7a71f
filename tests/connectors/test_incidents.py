"""An incident is opened once, updated by news only and closed once: in a folder and in an object store alike."""

from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from queue import Queue

import pytest
from obstore.store import LocalStore, MemoryStore

from jobs.connectors import incidents as module
from jobs.connectors.documents import Documents
from jobs.connectors.incidents import Happening, Incident, Incidents, crash_loop, stalled
from jobs.pipelines.spec import INCIDENTS
from tests import processes

KEY = "stream.ingest.crash-loop"


@pytest.fixture(params=["folder", "object store"])
def documents(request: pytest.FixtureRequest, tmp_path: Path) -> Documents:
    return Documents(LocalStore(tmp_path / INCIDENTS, mkdir=True) if request.param == "folder" else MemoryStore())


@pytest.fixture
def incidents(documents: Documents) -> Incidents:
    return Incidents(documents)


class Clock:
    """The time of day, in hours: it stands until it is set."""

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
    """Each incident: the hours when it was opened and last spoken of, its text, and whether it is over."""
    return [(one.opened / 3600, one.updated / 3600, one.text, one.closed) for one in incidents.all()]


def said(documents: Documents) -> list[str]:
    """What was written, in order."""
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
    keys = [crash_loop("rolling_sum"), stalled("rolling_sum"), stalled("rolling_sum_sliding"), "lag.numbers"]
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
    """Between a look at what is there and the next word another one speaks."""

    def __init__(self, documents: Documents) -> None:
        super().__init__(documents._store)
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
