"""`tideline query` as a process: its output, its limits, and that it leaves no file behind."""

import csv
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select

import psutil
import pytest

from jobs.settings import PROJECT

# Longer than any of these queries takes on a busy machine, and longer than any limit that they set.
PATIENCE_SECONDS = 90
ENDLESS = "SELECT * FROM range(100000000000)"
HOSTILE = "'a' || chr(27) || '[31m' || chr(7) || chr(13) || chr(10) || chr(155) || chr(8238) || 'z'"
RAW = "a\x1b[31m\x07\r\n\x9b\u202ez"
STEERING = ("\x1b[31m", "\x07", "\x9b", "\u202e")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "jobs", "query", *words]


def environment(lake: Path, **settings: str) -> dict[str, str]:
    path = f"{PROJECT}{os.pathsep}{PROJECT / 'plugins'}"
    return {**os.environ, "PYTHONPATH": path, "LAKE_ROOT": str(lake / "lake"), **settings}


def ask(place: Path, *words: str, **settings: str) -> "subprocess.CompletedProcess[str]":
    env = environment(place, **settings)
    done = subprocess.run(
        command(*words), cwd=place, env=env, capture_output=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert not list(place.iterdir()), "no file is left behind"
    # Not as text: that would make a carriage return a line of its own.
    out, said = done.stdout.decode(), done.stderr.decode()
    assert "Traceback" not in said
    return subprocess.CompletedProcess(words, done.returncode, out, said)


@contextmanager
def on_a_terminal(place: Path, *words: str) -> Iterator[list[str]]:
    """The output of a query on a terminal, after the query has ended by itself."""
    ours, its = pty.openpty()
    process = subprocess.Popen(command(*words), cwd=place, env=environment(place), stdout=its, stderr=its, stdin=its)
    os.close(its)
    sent, deadline = b"", time.monotonic() + PATIENCE_SECONDS
    try:
        while time.monotonic() < deadline:
            if select([ours], [], [], 1)[0]:
                try:
                    sent += os.read(ours, 65536)
                except OSError:
                    break
        assert process.wait(timeout=PATIENCE_SECONDS) == 0, sent
        yield [sent.decode()]
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_json_that_ends_early_is_whole_and_says_so(tmp_path: Path) -> None:
    done = ask(tmp_path, ENDLESS, "--format", "json", "--rows", "5000")
    assert json.loads(done.stdout) == [{"range": number} for number in range(5000)]
    assert done.returncode == 1
    assert done.stderr.startswith("tideline: the answer has more than 5,000 rows, and the rest is left out: add LIMIT")
    assert "--rows or QUERY_ROWS" in done.stderr


def test_csv_ends_at_the_limit_of_rows(tmp_path: Path) -> None:
    done = ask(tmp_path, ENDLESS, "--format", "csv", QUERY_ROWS="3000")
    assert done.stdout.splitlines() == ["range", *map(str, range(3000))]
    assert (done.returncode, "more than 3,000 rows" in done.stderr) == (1, True)


def test_as_many_rows_as_are_allowed_are_no_error(tmp_path: Path) -> None:
    done = ask(tmp_path, "SELECT * FROM range(3000)", "--format", "csv", QUERY_ROWS="3000")
    assert (len(done.stdout.splitlines()), done.returncode, done.stderr) == (3001, 0, "")


def test_a_table_shows_the_first_rows_and_says_that_there_are_more(tmp_path: Path) -> None:
    done = ask(tmp_path, ENDLESS)
    assert done.stdout.splitlines()[-1] == "1,000 rows; there are more: --format csv or json prints all"
    assert (done.stdout.count("│ 999 "), done.returncode, done.stderr) == (1, 0, "")


def test_a_table_ends_at_the_limit_of_rows(tmp_path: Path) -> None:
    done = ask(tmp_path, ENDLESS, "--rows", "7")
    assert done.stdout.splitlines()[-1].startswith("7 rows; there are more")
    assert (done.returncode, "more than 7 rows" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT count(*) FROM range(1000000000000)",
        # One call of a function, which cannot be interrupted.
        "SELECT levenshtein(repeat('a', 3000000), repeat('b', 3000000))",
    ],
)
def test_a_query_that_never_returns_is_stopped(tmp_path: Path, sql: str) -> None:
    done = ask(tmp_path, sql, "--seconds", "1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("tideline: the query was stopped after 1 s: ask for less")
    assert "--seconds or QUERY_SECONDS" in done.stderr


def test_rows_that_came_before_the_time_was_over_are_printed(tmp_path: Path) -> None:
    slow = "SELECT range, repeat('x', 1000), CASE WHEN range > 30000 THEN sleep_ms(600000) END FROM range(40000)"
    done = ask(tmp_path, slow, "--seconds", "2", "--format", "json")
    numbers = [row["range"] for row in json.loads(done.stdout)]
    assert numbers == list(range(len(numbers)))
    assert numbers
    assert (done.returncode, "stopped after 2 s" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT random() AS r FROM range(1000000000) ORDER BY r",
        # This memory is not in the count of the database.
        "SELECT length(repeat('x', 2000000000) || repeat('y', 2000000000))",
    ],
)
def test_memory_is_limited(tmp_path: Path, sql: str) -> None:
    done = ask(tmp_path, sql, QUERY_MEMORY_MB="100")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("tideline: the query needs more than 100 MB of memory")
    assert "QUERY_MEMORY_MB" in done.stderr


def test_a_long_answer_takes_no_more_memory_than_a_short_one(tmp_path: Path) -> None:
    place, sql = tmp_path / "here", "SELECT range, 'text ' || range AS words FROM range({rows})"
    place.mkdir()

    def peak_bytes(rows: int) -> int:
        peak = 0
        words = command(sql.format(rows=rows), "--format", "csv", "--rows", "10000000")
        with (tmp_path / "answer.csv").open("w") as out:
            process = psutil.Popen(words, cwd=place, env=environment(place), stdout=out)
            while process.poll() is None:
                with suppress(psutil.Error):
                    peak = max(peak, process.memory_info().rss)
                time.sleep(0.01)
        with (tmp_path / "answer.csv").open(newline="") as answer:
            assert sum(1 for _ in csv.reader(answer)) == rows + 1
        return peak

    assert peak_bytes(200_000) < peak_bytes(1000) + 40 * 1024 * 1024


def test_ctrl_c_ends_a_query_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    words = command("SELECT range % 10 FROM range(1000000000000)", "--format", "csv", "--rows", "1000000000")
    process = subprocess.Popen(
        words, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stderr
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.stdout.close()
    assert process.wait(timeout=PATIENCE_SECONDS) == -signal.SIGINT
    assert process.stderr.read() == ""
    process.stderr.close()
    assert not list(tmp_path.iterdir())


def test_a_reader_that_has_seen_enough_is_no_error_of_ours(tmp_path: Path) -> None:
    words = " ".join(f"'{word}'" for word in command(ENDLESS, "--format", "csv"))
    done = subprocess.run(
        f"{words} | head -2", shell=True, cwd=tmp_path, env=environment(tmp_path), capture_output=True, check=False
    )
    assert (done.stdout, done.stderr) == (b"range\n0\n", b"")


def test_bytes_are_exact_in_a_pipe(tmp_path: Path) -> None:
    sql = f"SELECT {HOSTILE} AS hostile"
    written = ask(tmp_path, sql, "--format", "csv").stdout
    assert written == f'hostile\n"{RAW}"\n'
    assert json.loads(ask(tmp_path, sql, "--format", "json").stdout) == [{"hostile": RAW}]


def test_a_table_never_steers_a_terminal(tmp_path: Path) -> None:
    shown = ask(tmp_path, f"""SELECT {HOSTILE} AS "head\x1b[31m\u202e" """).stdout
    assert not [sign for sign in STEERING if sign in shown]
    assert "\\x1b[31m\\x07\\r\\n\\x9b\\u202ez" in shown
    assert "head\\x1b[31m\\u202e" in shown


@pytest.mark.parametrize("format_", ["csv", "json", "table"])
def test_data_on_a_terminal_is_spelled_out(tmp_path: Path, format_: str) -> None:
    with on_a_terminal(tmp_path, f"SELECT {HOSTILE} AS h", "--format", format_) as (sent,):
        # Rich draws its table with bold letters of its own.
        assert not [sign for sign in STEERING if sign in sent]
        if format_ == "json":
            assert json.loads(sent) == [{"h": RAW}]
        else:
            assert "a\\x1b[31m\\x07\\r\\n\\x9b\\u202ez" in sent


def test_an_error_that_quotes_data_is_spelled_out_too(tmp_path: Path) -> None:
    done = ask(tmp_path, f"SELECT ({HOSTILE})::INT")
    assert done.returncode == 1
    assert "\\x1b[31m\\x07\\r" in done.stderr
    assert not [sign for sign in STEERING if sign in done.stderr]
