"""The pages about slices and audits, requested over HTTP. Airflow decides whether a user may see them."""

import re
from pathlib import Path
from urllib.parse import quote

import pytest

from jobs.finality.auditing import audit_page
from jobs.lake.ledger import Ledger
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.publication import Publication
from jobs.lake.slices import LedgerLine, State
from jobs.pipelines import PIPELINES
from jobs.pipelines.days import DAY_MS
from jobs.pipelines.slices import slice_at
from jobs.times import iso
from tests.finality.test_due import header
from tests.lake.test_events_kept import NOON_MS, Events
from tests.plugins.console_pages import ask

SUM = PIPELINES["rolling_sum"]
PAGE = f"/slices/{SUM.recompute_job}"
FIRST, SECOND = "20260131T120000Z", "20260131T120100Z"
RUN = "scheduled__2026-01-31T12:03:00+00:00__x"
EVIL = "<script>alert('x')</script>"
# Of events that arrived at noon, those before this time are removed.
BEGIN_MS = NOON_MS - 2 * DAY_MS


def told(lake: Path, **states: str) -> None:
    ledger = Ledger.open(lake, SUM)
    for slice_, state in states.items():
        line = LedgerLine(
            slice=slice_[1:], state=State(state), at_ms=1_769_860_980_000, run=RUN, version=1, reason=EVIL
        )
        ledger.append([line])


@pytest.mark.parametrize("path", [PAGE, f"{PAGE}/{FIRST}", f"/quality/{SUM.recompute_job}/x.html"])
def test_without_a_login_nothing_is_shown(lake: Path, path: str) -> None:
    told(lake, **{f"s{FIRST}": "open"})
    answer = ask(path)
    assert answer.status_code == 401
    assert FIRST not in answer.text


def test_the_newest_slices_come_first_and_lead_to_their_history(lake: Path, agreed: None) -> None:
    told(lake, **{f"s{FIRST}": "open", f"s{SECOND}": "open"})
    told(lake, **{f"s{FIRST}": "blocked"})
    shown = ask(PAGE).text
    assert re.findall(r'/tideline(/slices/[^"]+)', shown) == [f"{PAGE}/{SECOND}", f"{PAGE}/{FIRST}"]
    assert f"Blocked: {FIRST}." in shown
    assert EVIL not in shown
    history = ask(f"{PAGE}/{FIRST}").text
    assert history.index("blocked") < history.index("<td>open</td>")
    assert EVIL not in history


@pytest.mark.parametrize("before", [[], [BEGIN_MS - DAY_MS]], ids=["no slice final", "the first one final"])
def test_the_tide_line_skips_slices_whose_events_were_removed(lake: Path, agreed: None, before: list[int]) -> None:
    """The pipeline was paused for a day. The slices of that day are not final, and their events are gone."""
    events, final = Events(lake), PipelineLake(lake, SUM).open_final()
    events.land(BEGIN_MS - DAY_MS, BEGIN_MS - 1, BEGIN_MS, NOON_MS)
    told(lake, **{f"s{slice_at(SUM, BEGIN_MS - DAY_MS).name}": "open"})
    headers = [header(slice_at(SUM, at_ms), rows=0) for at_ms in (*before, BEGIN_MS)]
    final.publish([Publication(header=each, files=()) for each in headers])
    line = f"Final up to {iso(before[0] + 60_000)}." if before else "The first slice is not final yet."
    assert f"<p>{line}</p>" in ask(PAGE).text
    events.remove_old()
    assert f"<p>Final up to {iso(BEGIN_MS + 60_000)}.</p>" in ask(PAGE).text


def test_an_audit_is_shown_as_it_was_written(lake: Path, agreed: None) -> None:
    page = audit_page(PipelineLake(lake, SUM), RUN)
    page.parent.mkdir(parents=True)
    page.write_text("<h1>An audit</h1>")
    assert ask(f"/quality/{SUM.recompute_job}/{quote(RUN, safe='')}.html").text == "<h1>An audit</h1>"
    told(lake, **{f"s{FIRST}": "blocked"})
    assert quote(RUN, safe="") in ask(f"{PAGE}/{FIRST}").text


@pytest.mark.parametrize(
    "path",
    [
        "/slices/recompute_nothing",
        f"{PAGE}/20260131T120001Z",
        f"{PAGE}/20260131T120000Z",
        f"{PAGE}/..%2F..",
        "/quality/recompute_nothing/x.html",
        f"/quality/{SUM.recompute_job}/x.html",
        f"/quality/{SUM.recompute_job}/..%2F..%2F..%2Fsecret.html",
    ],
)
def test_what_is_not_there_is_not_found(lake: Path, agreed: None, path: str) -> None:
    (lake.parent / "secret.html").write_text("secret")
    answer = ask(path)
    assert answer.status_code == 404
    assert "secret</" not in answer.text
