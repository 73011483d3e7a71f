"""The pages say what the code is."""

import re

import pytest

from jobs.pipelines import PIPELINES, SOURCES
from jobs.settings import PROJECT
from local import pages

PAGES = sorted(pages.PAGES.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_generated_parts_are_current(page):
    text = page.read_text()
    assert pages.rendered(text) == text, "run `python -m local.pages`"


def test_every_source_and_pipeline_has_its_row():
    text = (pages.PAGES / "pipelines.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert {*SOURCES, *PIPELINES} <= rows


def test_an_old_part_is_replaced():
    old = "before\n<!-- begin: sources -->\nold\n<!-- end -->\nafter\n"
    new = pages.rendered(old)
    assert new.startswith("before\n<!-- begin: sources -->\n| source |")
    assert new.endswith("<!-- end -->\nafter\n")
    assert "old" not in new
    assert pages.rendered(new) == new


@pytest.mark.parametrize(
    "page", [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.name
)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert missing == []
