"""The pages of a stream, requested over HTTP. Airflow decides whether a user may see them: in these tests it agrees."""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from jobs.control.epochs import STALE_SECONDS, Beat, Owner, Phase, QueryProgress, Stop
from jobs.control.folder import Control
from jobs.control.incidents import Incidents
from jobs.pipelines import STREAMS
from jobs.pipelines.layout import dag_id_of
from tests.control.made import JOB, elsewhere, ended, run_elsewhere
from tests.plugins.console_pages import agree, ask
from tideline_airflow.console import streams
from tideline_airflow.console.app import app

PAGE = f"/streams/{dag_id_of(JOB)}"
EVIL = "<script>alert('x')</script> & \"more\""
Get = Callable[[str], httpx.Response]


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this stream's logs, below Airflow's log folder."""
    folder = tmp_path / "logs" / "drivers" / JOB
    folder.mkdir(parents=True)
    monkeypatch.setenv("AIRFLOW__LOGGING__BASE_LOG_FOLDER", str(tmp_path / "logs"))
    return folder


@pytest.fixture
def control(lake: Path) -> Control:
    return Control.of(lake, JOB)


@pytest.fixture
def get(lake: Path, agreed: None) -> Get:
    return ask


def end(control: Control, epoch: int, cause: str = "stopped", *, clean: bool = True) -> None:
    control.end(epoch, ended(cause, clean=clean))


def rows(page: str, number: int) -> list[list[str]]:
    """The cells of a table of the page, as they are written."""
    table = re.findall(r"<tbody>(.*?)</tbody>", page)[number]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)]


# -- Who may see them --


@pytest.mark.parametrize("page", ["", "/log", "/spark"])
def test_without_a_login_nothing_is_shown(page: str, control: Control, logs: Path) -> None:
    log = logs / "driver.log"
    log.write_text("secret")
    run_elsewhere(control, log=str(log), ui="http://secret:4040")
    answer = ask(PAGE + page)
    assert answer.status_code == 401
    assert "secret" not in answer.text + str(answer.headers)


def test_who_may_see_the_dag_may_not_yet_see_logs(control: Control, logs: Path) -> None:
    try:
        agree(streams.router.dependencies)
        run_elsewhere(control)
        assert [ask(PAGE + page).status_code for page in ("", "/log")] == [200, 401]
    finally:
        app.dependency_overrides.clear()


@pytest.mark.parametrize("page", ["", "/log", "/spark"])
@pytest.mark.parametrize("dag_id", ["stream_nope", JOB, "control_streams", "%2e%2e", "stream_rolling_sum%2f.."])
def test_a_dag_that_runs_no_stream_has_no_page(dag_id: str, page: str, get: Get, lake: Path) -> None:
    assert get(f"/streams/{dag_id}{page}").status_code == 404
    assert not lake.exists()


def test_there_is_no_page_beside_those_of_streams(get: Get) -> None:
    assert [get(path).status_code for path in ("/docs", "/redoc", "/openapi.json", "/", "/streams")] == [404] * 5


# -- How it does --


@pytest.mark.parametrize("job", STREAMS)
def test_each_stream_has_a_page_also_one_that_was_never_started(job: str, get: Get) -> None:
    answer = get(f"/streams/{dag_id_of(job)}")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert f"<h1>{job}</h1><p>It was never started.</p>" in answer.text


def test_the_page_shows_state_progress_and_epochs_newest_first(get: Get, control: Control) -> None:
    end(control, run_elsewhere(control), "no memory", clean=False)
    end(control, run_elsewhere(control), "stopped by an operator")
    stepped = QueryProgress(
        topic="numbers", stepped=86400.0, batch=1234567, rows=8, rows_per_second=16.5, lag=0, watermark="2026-01-01"
    )
    run_elsewhere(control, queries=(stepped, QueryProgress(topic="lines", stepped=0.0)), stall_seconds=time.time())
    control.ask_to_stop(3, Stop(time=time.time(), by="somebody"))
    page = get(PAGE).text
    assert '<span class="state stopping">stopping</span>' in page
    assert "Epoch 3, last heartbeat " in page
    assert rows(page, 0) == [
        ["numbers", "1,234,567", "8", "16.5", "0.0", "0", "2026-01-01", "1970-01-02 00:00:00 UTC"],
        ["lines", "", "0", "0.0", "0.0", "", "", "1970-01-01 00:00:00 UTC"],
    ]
    assert [[row[0], *row[3:]] for row in rows(page, 1)] == [
        ["3", "stopping", "asked to stop by somebody"],
        ["2", "stopped", "stopped by an operator"],
        ["1", "failed", "no memory"],
    ]
    assert [bool(row[2]) for row in rows(page, 1)] == [False, True, True]


def test_of_one_that_died_without_a_word_the_page_says_so(get: Get, control: Control) -> None:
    run_elsewhere(control)
    gone = replace(Owner.this_process(), pid=2**22 + 1)
    control.beat(1, Beat(time=time.time(), owner=gone, phase=Phase.RUNNING))
    ((number, _, ended, how, why),) = rows(get(PAGE).text, 1)
    assert (number, ended, how) == ("1", "", "dead")
    assert why.startswith("the driver died without a receipt (killed, or out of memory): process 4194305 on ")


def test_failures_in_a_row_are_counted(get: Get, control: Control) -> None:
    assert "Failures in a row" not in get(PAGE).text
    for _ in range(2):
        end(control, run_elsewhere(control), "no memory", clean=False)
    assert "Failures in a row: 2." in get(PAGE).text


def test_its_links_lead_to_its_other_pages(get: Get, control: Control, logs: Path) -> None:
    log = logs / "driver.log"
    log.write_text("hello")
    run_elsewhere(control, log=str(log), ui="http://driver:4040/")
    here = httpx.URL("http://airflow" + PAGE)
    links = [here.join(link).path for link in re.findall(r'<a href="(.*?)"', get(PAGE).text)]
    assert [get(link).status_code for link in links] == [200, 307]


def test_what_others_wrote_is_text_and_never_markup(get: Get, control: Control, lake: Path) -> None:
    end(control, run_elsewhere(control), f"failed: {EVIL}", clean=False)
    run_elsewhere(control, queries=(QueryProgress(topic=EVIL, stepped=0.0, watermark=EVIL),))
    control.ask_to_stop(2, Stop(time=time.time(), by=EVIL))
    Incidents.of(lake).open(f"stream.{JOB}.stalled", EVIL)
    page = get(PAGE).text
    safe = "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; &quot;more&quot;"
    assert page.count(safe) == 5
    assert "<script" not in page


def test_only_its_own_open_incidents_are_shown(get: Get, control: Control, lake: Path) -> None:
    run_elsewhere(control)
    incidents = Incidents.of(lake)
    incidents.open(f"stream.{JOB}.crash-loop", "its own, over")
    incidents.close(f"stream.{JOB}.crash-loop", "its own, closed")
    incidents.open(f"stream.{JOB}.stalled", "its own, open")
    incidents.open(f"stream.{JOB}_sliding.stalled", "of another one")
    assert re.findall(r'<p class="incident">(.*?)</p>', get(PAGE).text) == ["its own, open"]


# -- Its log --


def test_the_log_of_the_newest_driver_is_text(get: Get, control: Control, logs: Path) -> None:
    old, log = (logs / name for name in ("1.log", "2.log"))
    old.write_text("old")
    log.write_bytes(f"grüße {EVIL}\n".encode() + b"\xff")
    end(control, run_elsewhere(control, log=str(old)))
    run_elsewhere(control, log=str(log))
    answer = get(f"{PAGE}/log")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert answer.text == f"grüße {EVIL}\n\ufffd"
    end(control, 2)
    assert get(f"{PAGE}/log").text == answer.text


def test_of_a_long_log_its_end_is_shown(
    get: Get, control: Control, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_TAIL_BYTES", 10)
    log = logs / "driver.log"
    log.write_text("long ago\n" * 100 + "the end\n")
    run_elsewhere(control, log=str(log))
    assert get(f"{PAGE}/log").text == "o\nthe end\n"


@pytest.fixture
def outside(logs: Path) -> Path:
    """The log of another stream. The name of its folder begins with the name of this stream's folder."""
    folder = logs.with_name(f"{JOB}_sliding")
    folder.mkdir()
    secret = folder / "driver.log"
    secret.write_text("secret")
    return secret


@pytest.mark.parametrize(
    "way",
    [
        lambda logs, secret: str(secret),
        lambda logs, secret: f"{logs}/../{secret.parent.name}/{secret.name}",
        lambda logs, secret: str(logs / "link.log"),
        lambda logs, secret: "/etc/passwd",
        lambda logs, secret: f"{logs}/none.log",
        lambda logs, secret: str(logs),
        lambda logs, secret: "",
    ],
    ids=["outside", "up and outside", "a link to it", "the system's", "gone", "a folder", "no name"],
)
def test_a_log_that_is_not_in_the_folder_of_its_stream_is_not_shown(
    way: Callable[[Path, Path], str], get: Get, control: Control, logs: Path, outside: Path
) -> None:
    (logs / "link.log").symlink_to(outside)
    run_elsewhere(control, log=way(logs, outside))
    answer = get(f"{PAGE}/log")
    assert answer.status_code == 404
    assert "it lies on the machine where the task ran" in answer.json()["detail"]
    assert "secret" not in answer.text


def test_without_a_driver_or_its_log_there_is_none_to_show(get: Get, control: Control, logs: Path) -> None:
    told = {"detail": f"no log of {JOB} is known: was its driver started by hand?"}
    assert (get(f"{PAGE}/log").status_code, get(f"{PAGE}/log").json()) == (404, told)
    control.reserve(Owner.this_process(), launched=True)
    assert (get(f"{PAGE}/log").status_code, get(f"{PAGE}/log").json()) == (404, told)
    end(control, 1, clean=False)
    run_elsewhere(control)
    assert (get(f"{PAGE}/log").status_code, get(f"{PAGE}/log").json()) == (404, told)


# -- Its Spark UI --


def test_the_way_to_the_spark_ui_leads_there_while_the_driver_lives(get: Get, control: Control) -> None:
    epoch = run_elsewhere(control, ui="http://driver:4040/")
    answer = get(f"{PAGE}/spark")
    assert (answer.status_code, answer.headers["location"]) == (307, "http://driver:4040/")
    end(control, epoch)
    answer = get(f"{PAGE}/spark")
    assert answer.status_code == 404
    assert answer.json() == {"detail": f"no driver of {JOB} runs, so there is no Spark UI"}


@pytest.mark.parametrize("known", [{}, {"ui": "http://driver:4040/", "time": time.time() - STALE_SECONDS - 1000}])
def test_without_a_driver_or_its_address_there_is_no_spark_ui(
    known: dict[str, Any], get: Get, control: Control
) -> None:
    assert get(f"{PAGE}/spark").status_code == 404
    control.documents.replace("lease-0000000001", {"owner": None, "time": 0.0})
    control.beat(1, Beat(**{"time": time.time(), "owner": elsewhere(), "phase": Phase.RUNNING, **known}))
    assert get(f"{PAGE}/spark").status_code == 404
