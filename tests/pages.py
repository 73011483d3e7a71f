"""The pages that people read, cut into what can be compared with the code: tables, code and commands."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jobs.settings import PROJECT

CONTRIBUTING = PROJECT / "CONTRIBUTING.md"
PAGES = [PROJECT / "README.md", CONTRIBUTING, *sorted((PROJECT / "docs").glob("*.md"))]
DECISIONS = sorted((PROJECT / "docs" / "decisions").glob("*.md"))
# Airflow shows the docstring of a DAG file as the page of its DAGs.
MANUALS = sorted((PROJECT / "dags").glob("*.py"))
EXAMPLE = PROJECT / ".env.example"
# All pages with something that a reader may type.
TYPED_FROM = [*PAGES, *MANUALS, EXAMPLE]
# A shorter text around a value, such as a separator, would fit to any line.
_TELLING = 12
_FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(?:docker compose exec \w+ |[A-Z_]+=\S+ )*(?:tideline|python -m jobs) (?P<words>.+)")


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a page, and the heading of its chapter."""

    page: str
    heading: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        """The name in a list of tests."""
        return f"{self.page}: {self.heading}"

    @property
    def names(self) -> list[str]:
        """All words in backticks in the first column."""
        return [name for row in self.rows for name in in_backticks(row[0])]


def page(name: str) -> Path:
    """The page of this name in `docs`, or in the project's folder."""
    return next(path for path in PAGES if path.name == name)


def read(path: Path) -> str:
    """The text of a page; of a DAG file its docstring."""
    text = path.read_text()
    return ast.get_docstring(ast.parse(text)) or "" if path.suffix == ".py" else text


def in_backticks(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def blocks(text: str) -> list[str]:
    """The blocks of code of a page, in order."""
    return _FENCED.findall(text)


def tables(path: Path) -> Iterator[Table]:
    heading, lines = "", list[str]()
    for line in [*_FENCED.sub("", read(path)).splitlines(), ""]:
        if line.startswith("|"):
            lines.append(line)
            continue
        if lines:
            head, _, *rows = (tuple(cell.strip() for cell in each[1:-1].split("|")) for each in lines)
            yield Table(page=path.name, heading=heading, head=head, rows=tuple(rows))
            lines = []
        if line.startswith("#"):
            heading = line.lstrip("# ")


def table(name: str, heading: str, column: str) -> Table:
    """The table of a chapter whose first column has this name."""
    found = [each for each in tables(page(name)) if (each.heading, each.head[0]) == (heading, column)]
    assert len(found) == 1, f"{name} has {len(found)} tables of {column!r} in the chapter {heading!r}"
    return found[0]


def code(path: Path) -> Iterator[str]:
    """Everything that is written as code: each line of a block, and each text in backticks."""
    text = read(path)
    for block in blocks(text):
        yield from block.splitlines()
    yield from (" ".join(inline.split()) for inline in in_backticks(_FENCED.sub("", text)))


def command(line: str) -> tuple[str, ...] | None:
    """The words of a command line of ours, without the program; None if the line is something else."""
    found = _COMMAND.fullmatch(line)
    return tuple(shlex.split(found["words"], comments=True)) if found else None


def commands() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every command line of the pages: its page and its words."""
    for path in TYPED_FROM:
        yield from ((path.name, words) for line in code(path) if (words := command(line)))


def queries() -> list[str]:
    """Every query of the pages, without those of made-up pipelines."""
    asked = {words[1] for _, words in commands() if words[0] == "query" and len(words) > 1}
    return sorted(sql for sql in asked if "my_pipeline" not in sql)


@cache
def texts_of_code() -> tuple[str, ...]:
    """All strings of the product's code; a NUL stands for a value that is put in."""
    files = [file for folder in ("jobs", "plugins", "local") for file in sorted((PROJECT / folder).rglob("*.py"))]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return tuple(dict.fromkeys(text for node in nodes if (text := _text(node))))


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def is_said(phrase: str) -> bool:
    """Whether code has a text with this phrase. Three dots in it stand for anything, and a number may be put in."""
    pattern = ".*".join(re.escape(part.strip()) for part in phrase.split("…"))
    wanted = re.compile(re.sub(r"\d+", r"(?:\g<0>|\0)", pattern), re.DOTALL)
    return any(wanted.search(text) for text in texts_of_code())


def is_printed(line: str) -> bool:
    """Whether code has a text that gives this whole line, once its values are put in."""
    return line in texts_of_code() or any(pattern.fullmatch(line) for pattern in _with_values())


@cache
def _with_values() -> tuple[re.Pattern[str], ...]:
    texts = (text.split("\0") for text in texts_of_code() if "\0" in text and len(text.replace("\0", "")) > _TELLING)
    return tuple(re.compile(".+".join(map(re.escape, parts))) for parts in texts)
