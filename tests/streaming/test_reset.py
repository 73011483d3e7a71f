"""The request of a reset, the effects that it announces, and the note of its commit; without a broker."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from jobs.broker.kafka import TopicState
from jobs.control.checkpoint import Checkpoint
from jobs.lake.stream_tables import Note, Ranges
from jobs.pipelines import INGEST, PIPELINES, SOURCES
from jobs.refusal import Refusal
from jobs.streaming.reset import _queries, _state_of, _table_ends
from jobs.streaming.reset_plan import Move, Query, QueryReset, Request, ResetPlan, To, target
from jobs.times import parse_time
from tests.control import test_checkpoint

TOPIC = TopicState(cluster_id="c1", topic_id="t1", partitions=3, earliest={0: 0}, latest={0: 900})
MOVES = (
    Move(partition=0, table_end=100, start=40),
    Move(partition=1, table_end=100, start=100),
    Move(partition=2, table_end=None, start=7),
)
NOON = 1_795_003_524_439


def reset_of(job: str) -> QueryReset:
    (query,) = _queries(Request(job=job, to=To.EARLIEST, sources=("numbers",) if job == INGEST else ()))
    return QueryReset(query=query, topic=TOPIC, moves=MOVES, rows=1234, checkpoint="batch 3 planned", write_id="w1")


@pytest.mark.parametrize(
    ("request_", "command", "words"),
    [
        (Request(job="rolling_sum", to=To.LANDED), "tideline reset rolling_sum --to landed", "landed"),
        (
            Request(job=INGEST, to=To.EARLIEST, sources=("lines", "numbers")),
            "tideline reset ingest --to earliest --source lines --source numbers",
            "earliest",
        ),
        (
            Request(job="word_count", to=To.TIMESTAMP, timestamp_ms=NOON),
            "tideline reset word_count --to timestamp --timestamp 2026-11-18T12:05:24.439Z",
            "timestamp 2026-11-18T12:05:24.439Z",
        ),
    ],
)
def test_a_request_in_words(request_: Request, command: str, words: str) -> None:
    assert (request_.command, request_.words) == (command, words)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"job": "none"}, "there is no streaming job 'none': choose one of ingest, rolling_sum, "),
        ({"sources": ("numbers",)}, "'rolling_sum' reads one source only: leave out --source"),
        ({"job": INGEST, "sources": ("numbers", "no", "nor")}, "there is no source no, nor: choose among numbers, "),
        ({"to": To.TIMESTAMP}, "give --timestamp with --to timestamp"),
        ({"timestamp_ms": NOON}, "give --timestamp with --to timestamp, and only with it"),
        ({"to": To.TIMESTAMP, "timestamp_ms": -1}, "--timestamp 1969-12-31T23:59:59.999Z is before 1970"),
    ],
)
def test_what_cannot_be_meant_is_refused(asked: dict[str, object], reason: str) -> None:
    with pytest.raises(Refusal, match=reason):
        Request(**{"job": "rolling_sum", "to": To.EARLIEST, **asked})


def test_targets_have_names() -> None:
    assert [target(to.value) for to in To] == list(To)
    with pytest.raises(Refusal, match="--to 'now': choose one of earliest, latest, timestamp, landed"):
        target("now")


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-18T12:05:24.439Z",
        "2026-11-18T12:05:24.439",
        "2026-11-18 12:05:24.439+00:00",
        "2026-11-18T13:05:24.439+01:00",
        "20261118T120524.439Z",
    ],
)
def test_a_time_is_utc_unless_it_says_otherwise(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert parse_time(text) == NOON
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("text", ["", "noon", "1795003524439", "2026-02-30", "0001-01-01T00:00:00+01:00"])
def test_a_time_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(
        Refusal, match=f"{text!r} is no ISO 8601 time: write e.g. 2026-01-31T12:00:00Z".replace("+", r"\+")
    ):
        parse_time(text)


def test_every_streaming_job_has_its_queries() -> None:
    (query,) = _queries(Request(job="rolling_sum", to=To.LATEST))
    assert query == Query(
        job="rolling_sum",
        source=SOURCES["numbers"],
        table="live/rolling_sum",
        partition="slice",
        folder="checkpoints/rolling_sum",
        fingerprint=PIPELINES["rolling_sum"].fingerprint,
    )
    assert query.clears
    landed = list(_queries(Request(job=INGEST, to=To.LATEST)))
    assert [query.source.name for query in landed] == list(SOURCES)
    assert (landed[0].table, landed[0].folder, landed[0].fingerprint) == (
        "events/numbers",
        "checkpoints/ingest/numbers",
        None,
    )
    assert not any(query.clears for query in landed)
    (one,) = _queries(Request(job=INGEST, to=To.LATEST, sources=("lines",)))
    assert one.source.name == "lines"


def test_a_move_comes_again_or_passes_over() -> None:
    assert [(move.read_again, move.passed_over) for move in MOVES] == [(60, 0), (0, 0), (0, 7)]


def test_the_note_of_a_live_table_begins_anew_and_books_nothing() -> None:
    note = reset_of("rolling_sum").note(5)
    assert (note.is_reset, note.epoch, note.write_id, note.transactions) == (True, 5, "w1", [])
    assert note.fingerprint == PIPELINES["rolling_sum"].fingerprint
    assert note.topics == {"numbers": Ranges(topic_id="t1", offsets={0: (40, 40), 1: (100, 100), 2: (7, 7)})}
    assert note.ends == {"numbers": {0: 40, 1: 100, 2: 7}}


def test_the_note_of_a_landed_table_books_what_is_passed_over() -> None:
    note = reset_of(INGEST).note(5)
    assert note.topics["numbers"].offsets[2] == (0, 7)
    assert note.topics["numbers"].offsets[1] == (100, 100)
    assert note.fingerprint is None


def test_a_loss_names_its_ranges_and_a_live_table_has_none() -> None:
    gap = replace(reset_of(INGEST), moves=(*MOVES, Move(partition=3, table_end=1000, start=4000)))
    assert gap.loss("latest") == (
        "numbers: the reset to latest skipped at most 3,007 records, which are not landed: "
        "partition 2 [0, 7), partition 3 [1000, 4000)"
    )
    assert replace(gap, moves=MOVES[:2]).loss("latest") is None
    assert reset_of("rolling_sum").loss("latest") is None


def test_a_plan_for_people_and_for_programs() -> None:
    live, landed = reset_of("rolling_sum"), reset_of(INGEST)
    plan = ResetPlan(queries=(live, landed))
    assert plan.effects() == [
        "numbers: 1,234 rows of live/rolling_sum are cleared; the old checkpoint checkpoints/rolling_sum "
        "(batch 3 planned) moves to checkpoints/_aside",
        "numbers: 1,234 rows of events/numbers are kept; 7 offsets are skipped and recorded as lost; "
        "the old checkpoint checkpoints/ingest/numbers (batch 3 planned) moves to checkpoints/_aside",
    ]
    rows = json.loads(json.dumps(plan.as_rows()))
    assert [row["rows_cleared"] for row in rows] == [1234, 0]
    assert rows[1]["partitions"] == [
        {"partition": 0, "table": 100, "start": 40, "read_again": 60, "passed_over": 0, "lost": 0},
        {"partition": 1, "table": 100, "start": 100, "read_again": 0, "passed_over": 0, "lost": 0},
        {"partition": 2, "table": None, "start": 7, "read_again": 0, "passed_over": 7, "lost": 7},
    ]
    assert [part["lost"] for part in rows[0]["partitions"]] == [0, 0, 0]
    console = Console(width=100)
    with console.capture() as shown:
        console.print(plan.table())
    assert "│ numbers │ 0         │ 100           │ 40        │ 60         │ 0       │" in shown.get()
    assert "│ numbers │ 2         │ -             │ 7         │ 0          │ 7       │" in shown.get()


@pytest.mark.parametrize(
    ("topic", "landed"),
    [
        ({}, {0: 10}),
        ({"topic_id": "t2"}, {}),
        ({"cluster_id": "c2"}, {}),
    ],
)
def test_what_is_landed_of_another_topic_of_that_name_does_not_count(
    topic: dict[str, str], landed: dict[int, int]
) -> None:
    identity = {"cluster_id": "c1", "topic_id": "t1", **topic}
    ranges = Ranges(topic_id=identity["topic_id"], offsets={0: (0, 10)})
    note = Note(
        job=INGEST,
        write_id="w",
        batch=0,
        epoch=1,
        cluster_id=identity["cluster_id"],
        topics={"numbers": ranges},
    )
    assert _table_ends(note, SOURCES["numbers"], TOPIC) == landed
    assert _table_ends(None, SOURCES["numbers"], TOPIC) == {}
    assert _table_ends(note, SOURCES["lines"], TOPIC) == {}


path = test_checkpoint.path


def test_a_checkpoint_in_whatever_state_can_be_put_aside(path: Path, tmp_path: Path) -> None:
    assert _state_of(Checkpoint(tmp_path / "none")) == (None, "")
    assert _state_of(Checkpoint(path)) == ("batch 2 planned, 1 committed", test_checkpoint.QUERY_ID)
    (path / "offsets" / "1").unlink()
    assert _state_of(Checkpoint(path)) == ("damaged", "")
    (path / "offsets" / "empty").mkdir()
    (path / "metadata").unlink()
    assert _state_of(Checkpoint(path)) == ("damaged", "")
