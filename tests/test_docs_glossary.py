"""The glossary explains each word once, and each page links it where the first of its words stands."""

import re
from pathlib import Path

import pytest

from jobs.settings import PROJECT
from tests import pages
from tests.pages import DECISIONS, PAGES

GLOSSARY = pages.page("glossary.md")
# The index of the decisions is one of these pages; each decision is reached from there.
LINKING = [path for path in [*PAGES, *DECISIONS] if path != GLOSSARY and not path.name.startswith("0")]
# English uses these words of the glossary in other meanings, too: "the tests run", "a version of Docker".
_EVERYDAY = {"account", "cause", "check", "closed", "final", "identity", "live", "note", "over", "plan", "publish"}
_EVERYDAY |= {"reach", "recompute", "reset", "run", "stage", "try", "version"}


def entries() -> list[str]:
    return [text.strip() for text in pages.read(GLOSSARY).split("\n\n") if text.startswith("**")]


def words() -> list[str]:
    """The words that the glossary explains. An entry begins with them: "**Live** and **final.** A live row is"."""
    return [word.rstrip(".").lower() for entry in entries() for word in re.findall(r"\*\*([^*]+)\*\*", entry)]


def first_use(text: str) -> str:
    """The first link to the glossary, or the first of its words, if that word comes before the link."""
    # Code, headings and comments are left out, and so are the addresses of other links.
    prose = re.sub(r"^```.*?^```$|^#[^\n]*|<!--.*?-->|`[^`]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"(?<=\])\((?!\S*glossary\.md)[^)]*\)", "", prose)
    wanted = "|".join(re.escape(word) for word in words() if word not in _EVERYDAY)
    found = re.search(rf"\[[^\]]+\]\(\S*glossary\.md\)|\b(?:{wanted})(?:s|es|d|ed|ing)?\b", prose, re.IGNORECASE)
    return found[0] if found else ""


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(PROJECT)))
def test_a_page_links_the_glossary_where_its_first_word_stands(page: Path) -> None:
    assert first_use(page.read_text()).endswith("glossary.md)")


def test_a_word_before_the_link_is_found() -> None:
    page = "# A slice\n`slice` of [reading](slice.md)\n```\nslice\n```\nthen **slices**, [slice](glossary.md)"
    assert first_use(page) == "slices"
    assert first_use("A [slice](glossary.md) of a ledger") == "[slice](glossary.md)"


def test_every_word_is_explained_once_with_an_example() -> None:
    assert len(entries()) > 30
    assert [entry for entry in entries() if not entry.endswith("*")] == []
    assert sorted(words()) == sorted(set(words()))
    assert set(words()) > _EVERYDAY
