"""The pages agree with the code."""

import inspect
import re
from dataclasses import fields

import pytest

from jobs.control import incident
from jobs.pipelines import PIPELINES, SOURCES
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.source import Source
from jobs.settings import PROJECT, KeptDays
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


def test_every_incident_has_its_row():
    """The functions of one module make the keys; each is shown with its parameters in capitals."""
    makers = [made for _, made in inspect.getmembers(incident, inspect.isfunction) if _makes_a_key(made)]
    keys = {maker(*map(_shown, inspect.signature(maker).parameters)) for maker in makers}
    shown = re.findall(r"^\| `([^`]+\.[^`]+)` \|", (pages.PAGES / "alerts.md").read_text(), re.MULTILINE)
    assert set(shown) == keys


def _makes_a_key(function):
    return (function.__doc__ or "").startswith("The key of ")


def _shown(parameter):
    return parameter.strip("_").removesuffix("_id").upper()


def test_keys_of_incidents_are_made_nowhere_else():
    """A text that ends with a dot is only a prefix for a search, so it is allowed."""
    made = re.compile(r'f"(?:account|check|dag|recompute|stream)\.[^"]*[^."]"')
    code = [*(PROJECT / "jobs").rglob("*.py"), *(PROJECT / "plugins").rglob("*.py")]
    assert [file.name for file in code if made.search(file.read_text())] == ["incident.py"]


def test_nobody_budgets_a_retention_that_does_not_exist():
    """The page about the size of the disk uses the default of `events_kept_days`, after which events are removed."""
    text = " ".join((pages.PAGES / "growing.md").read_text().split())
    (default,) = (field.default for field in fields(Source) if field.name == "events_kept_days")
    assert f"`events_kept_days` of the source ({default} days unless it says otherwise)" in text
    per_day_gb = 10_000 * 30 * 86_400 / 1e9
    assert f"| `events` per day | {per_day_gb:.0f} GB |" in text
    assert f"| `events` in all, kept for {default} days | {per_day_gb * default / 1000:.1f} TB |" in text
    # A minute of 10,000 windows.
    assert f"| final windows per year | {round(10_000 * 30 * 1440 * 365 / 1e9, -1):.0f} GB |" in text


def test_nobody_forgets_the_disk_of_the_brokers():
    """An output topic has a message for each window, and keeps it for `output_kept_days`."""
    text = " ".join((pages.PAGES / "growing.md").read_text().split())
    (default,) = (field.default for field in fields(Pipeline) if field.name == "output_kept_days")
    assert f"`output_kept_days` of the pipeline ({default} days unless it says otherwise)" in text
    # 10,000 windows a minute, 300 bytes each; 3 copies of a final topic, and of a live one of twice its size.
    topics_tb = 10_000 * 1440 * default * 300 * 3 * 3 / 1e12
    assert f"| output topics of a pipeline, kept for {default} days, 3 copies | {topics_tb:.1f} TB |" in text


def test_the_page_of_growth_says_the_defaults_of_what_is_kept():
    text = (pages.PAGES / "operations.md").read_text()
    for definition, kept in ((Pipeline, "output_kept_days"), (Source, "retention_hours"), (Source, "events_kept_days")):
        (default,) = (field.default for field in fields(definition) if field.name == kept)
        assert f"`{kept}` ({default})" in text, kept
    for field in fields(KeptDays):
        assert f"`{field.name.upper()}_KEPT_DAYS` ({field.default})" in text, field.name
