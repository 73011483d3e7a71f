"""State words, messages, file names and outputs that pages quote are those of the code."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import pytest

from jobs.control.epochs import Health
from jobs.finality import plan_report
from jobs.lake.slices import State
from jobs.pipelines import SOURCES
from jobs.query.lake import Lake
from jobs.settings import PROJECT
from jobs.streaming.reset_plan import To
from jobs.transforms.drift import Cause
from local.bench.run import CHOICES
from local.demo import run as demo
from local.platform.doctor import checks
from local.platform.settings import StackSettings
from tests import pages
from tests.empty_lake import empty_lake
from tests.pages import CONTRIBUTING, MANUALS, PAGES, blocks, code, command, in_backticks, is_printed, is_said, queries


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return empty_lake(tmp_path_factory.mktemp("lake"))


# -- Words of which there are only so many --


def in_code(file: str, pattern: str) -> set[str]:
    return set(re.findall(pattern, (PROJECT / file).read_text()))


# The page, the chapter and the head of the column that lists them.
CLOSED: dict[tuple[str, str, str], Collection[str]] = {
    ("recompute.md", "Slices", "state"): list(State),
    ("streams.md", "Reset", "`--to`"): list(To),
    ("drift.md", "Causes", "cause"): list(Cause),
    ("streams.md", "The control folder", "document"): {
        f"{name}-N" for name in in_code("jobs/control/folder.py", r'_name\("(\w+)"')
    },
}


@pytest.mark.parametrize("place", CLOSED, ids=" ".join)
def test_a_page_lists_all_words_of_a_kind_and_no_others(place: tuple[str, str, str]) -> None:
    assert sorted(pages.table(*place).names) == sorted(CLOSED[place])


def test_every_state_of_a_stream_is_explained() -> None:
    rows = pages.table("streams.md", "What each state means", "state").rows
    assert sorted(row[0] for row in rows) == sorted(["never started", *Health])
    assert is_said("never started")


def test_every_kind_of_a_balance_is_explained() -> None:
    cells = {row[0]: row[2] for row in pages.table("drift.md", "`balance_PIPELINE`: totals", "column").rows}
    of_code = [in_code(f"jobs/finality/{file}.py", r'"kind": "(\w+)"') for file in ("account", "comparison")]
    assert set(in_backticks(cells["`kind`"])) == set.union(*of_code)


def test_every_reason_of_a_rejection_is_explained() -> None:
    header = f"header {SOURCES['lines'].event_time_header}"
    # The reasons are literals in SQL, each behind the condition that it belongs to.
    reasons = in_code("jobs/transforms/parse.py", r"(?:THEN|NULL,|malformed},) '([a-z][^']+)'")
    plain = {
        re.sub(r"\{.*\}", "FIELD", reason.replace("header {source.event_time_header}", header)) for reason in reasons
    }
    assert set(pages.table("data.md", "`quarantine_SOURCE`", "reason").names) == plain


def test_every_part_of_the_benchmark_is_named() -> None:
    assert set(CHOICES) <= set(in_backticks(pages.page("benchmarks.md").read_text()))


def test_every_check_of_the_doctor_is_named() -> None:
    (named,) = re.findall(r"`tideline doctor` checks ([^.]+)\.", pages.page("README.md").read_text())
    assert set(re.findall(r"\w+", named)) - {"and", "the"} == set(checks(StackSettings.from_env({})))


# -- What the product says --


def messages() -> Iterator[str]:
    """What pages quote in a table of messages, and DAG files in italics where they say what to do."""
    for path in PAGES:
        for table in pages.tables(path):
            if table.head[0].startswith("message"):
                yield from (row[0] for row in table.rows)
    for path in MANUALS:
        _, _, triage = pages.read(path).partition("**Triage.**")
        yield from (" ".join(quoted.split()) for quoted in re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", triage))


@pytest.mark.parametrize("message", sorted(set(messages())))
def test_a_message_that_is_quoted_is_one_of_the_product(message: str) -> None:
    assert is_said(message)


def test_there_are_messages_to_check() -> None:
    assert len(set(messages())) > 30
    assert not is_said("this is … of nobody")


def names_quoted() -> set[str]:
    """Files and folders of the lake whose names begin with an underscore, and names of Tideline in Airflow."""
    for_users = [path for path in PAGES if path != CONTRIBUTING]
    return {
        name
        for path in for_users
        for line in code(path)
        for name in re.findall(r"(?<!\w)_\w[\w.]*|\btideline_\w+", line)
    }


@pytest.mark.parametrize("name", sorted(names_quoted()))
def test_a_name_that_is_quoted_is_one_of_the_product(name: str) -> None:
    assert is_said(name)


# -- Queries, and what commands print --


@dataclass(frozen=True, kw_only=True)
class Output:
    """A block of a page that shows what a command prints, and the command: the last one of an earlier block."""

    page: str
    command: tuple[str, ...]
    lines: tuple[str, ...]

    def __str__(self) -> str:
        """The name in a list of tests."""
        return f"{self.page}: {' '.join(self.command)[:40]}"


def outputs() -> Iterator[Output]:
    for path in PAGES:
        last: tuple[str, ...] = ()
        for block in blocks(pages.read(path)):
            lines = tuple(block.splitlines())
            typed = [command(line.replace("make ", "tideline ")) for line in lines]
            if any(typed):
                last = next(words for words in reversed(typed) if words)
            elif last and (lines[0][0] in "┃│" or is_printed(lines[0])):
                yield Output(page=path.name, command=last, lines=lines)


def heads(words: tuple[str, ...], lake: Lake) -> list[list[str]]:
    """The heads of the tables that a command prints."""
    if words[0] == "query":
        return [lake.query(words[1]).column_names]
    if words[0] == "demo":
        shown = [*(demo._newest(lake, name) for name in demo.SHOWN), demo._slices(lake)]
        return [[str(column.header) for column in table.columns] for table in shown]
    return [list(plan_report.COLUMNS)] if words[0] in ("plan", "restate") else []


@pytest.mark.parametrize("output", list(outputs()), ids=str)
def test_an_output_is_one_of_its_command(output: Output, lake: Lake) -> None:
    head = list[str]()
    for line in output.lines:
        cells = [cell.strip() for cell in re.split("[┃│]", line)[1:-1]]
        if line.startswith("┃"):
            head = cells
            assert head in heads(output.command, lake)
        elif line.startswith("│"):
            assert len(cells) == len(head), "a table has its head, and a cell for each column"
            assert dict(zip(head, cells, strict=True)).get("state", State.OPEN) in list(State)
        else:
            assert is_printed(line), line


def steps_of_code() -> set[tuple[str, str]]:
    """Every long step whose usual duration is shown: what it does, and how long it usually takes."""
    files = [*(PROJECT / "local").rglob("*.py"), *(PROJECT / "local").rglob("*.sh")]
    return {
        found
        for file in files
        for found in re.findall(r'(?:step|report)\W[^"\n]*"([^"]+)",? "([^"]+)"', file.read_text())
    }


def test_the_steps_of_the_quickstart_are_those_of_the_product() -> None:
    (shown,) = [block for block in blocks(pages.read(pages.page("quickstart.md"))) if re.search(r": \d+ s \(", block)]
    steps = [re.fullmatch(r"(?:\w+: )?([^:]+): \d+ s \(([^)]+)\).*", line) for line in shown.splitlines()]
    assert {step and step.groups() for step in steps} <= steps_of_code()


def test_there_are_outputs_to_check() -> None:
    assert len(list(outputs())) == 6
    assert not is_printed("5 slices of nobody")


@pytest.mark.parametrize("sql", queries())
def test_a_query_is_answered_where_no_stream_has_ever_run(sql: str, lake: Lake) -> None:
    assert lake.query(sql).num_columns
