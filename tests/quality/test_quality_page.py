"""The page of an audit: complete or not there, readable without the internet, and no other file is left behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.quality import page
from jobs.quality.audit import audit, check_served
from tests.quality import made
from tests.quality.made import PIPELINE, SLICES, row

ROOT = Path(__file__).parents[2]
ONCE = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from pathlib import Path
from jobs.quality.audit import audit
from tests.quality import made
assert not {"great_expectations", "pyspark"} & set(sys.modules), "imported before it is needed"
rows = made.rows()
for number in range(2):
    audit(made.PIPELINE, made.frame(rows), made.slices(rows), run="run", docs=Path(sys.argv[1]) / f"{number}.html")
"""


def written(docs: Path, rows: list[dict[str, object]], run: str = "run") -> str:
    audit(PIPELINE, made.frame(rows), made.slices(rows), run=run, docs=docs)
    return docs.read_text(encoding="utf-8")


def test_it_says_what_is_blocked_and_what_was_observed(tmp_path: Path) -> None:
    text = written(tmp_path / "new" / "run.html", [*made.rows(), row(1, 9, events=-5), row(2, 9, events=101)])
    assert "Audit of rolling_sum" in text
    assert "Judged: 3, failed: 1, with warnings only: 1" in text
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", text)
    assert cells[:4] == [SLICES[1], "events is at least 1", "critical", "1 of 5 values, from -5 to -5"]
    assert cells[4:8] == [SLICES[2], "events is at most 100", "warning", "1 of 5 values, from 101 to 101"]
    # Great Expectations' own part: also the rules that hold, and the values that break a rule.
    assert "mean is between -1000000000 and 1000000000" in text
    assert "Evaluated Expectations" in text
    assert "1 unexpected values found" in text


def test_it_needs_no_internet_and_runs_no_script(tmp_path: Path) -> None:
    text = written(tmp_path / "run.html", [row(0, events=0)])
    assert re.findall(r"https?://|<script|src=|href=|@import|url\(", text) == []


def test_what_comes_from_data_is_text(tmp_path: Path) -> None:
    rows = [row(0, 0, key="<b>x"), row(0, 0, key="<b>x"), row(0, 1, slice="<b>y")]
    text = written(tmp_path / "run.html", rows, run="<i>run")
    assert "<b>" not in text
    assert "&lt;b&gt;x" in text
    assert "default-src 'none'" in text
    assert "<i>run" not in text
    assert "&lt;i&gt;run" in text


def test_a_page_replaces_the_one_before_and_leaves_no_other_file(tmp_path: Path) -> None:
    docs = tmp_path / "run.html"
    assert "failed: 1," in written(docs, [row(0, events=0)])
    assert "failed: 0," in written(docs, made.rows())
    assert [path.name for path in tmp_path.iterdir()] == ["run.html"]


def test_a_page_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    docs = tmp_path / "run.html"
    page.write(docs, "before")
    with pytest.raises(UnicodeEncodeError):
        page.write(docs, "after \ud800")
    assert docs.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["run.html"]


def test_of_many_slices_it_shows_the_first(tmp_path: Path) -> None:
    verdict = check_served(
        PIPELINE, made.frame(made.rows()), 100.0, 90.0, [], repeated=0, run="check", docs=tmp_path / "check.html"
    )
    text = page.of("Audit", "run", {f"slice {number}": verdict.failures for number in range(1000)}, {})
    assert "Judged: 1000, failed: 1000" in text
    assert text.count("windows are at most 90 s old") == 200
    assert "and 800 more" in text


def test_nothing_else_is_written_or_said(tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("home", "tmp", "here", "docs")}
    for place in places.values():
        place.mkdir()
    environment = os.environ | {"HOME": str(places["home"]), "TMPDIR": str(places["tmp"]), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ONCE, str(places["docs"])],
        cwd=places["here"], env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    left = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(left) == ["docs/0.html", "docs/1.html"]


def test_old_pages_go_and_nothing_else(tmp_path: Path) -> None:
    page.write(tmp_path / "old.html", "old")
    page.write(tmp_path / "new.html", "new")
    (tmp_path / "notes.txt").write_text("mine")
    for name in ("old.html", "notes.txt"):
        os.utime(tmp_path / name, (0, 0))
    page.discard_old(tmp_path, 3600)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["new.html", "notes.txt"]
    page.discard_old(tmp_path / "nothing", 3600)
