"""The page about one validation: the failures of each slice, then Great Expectations' own Data Docs of each suite.

A page is one file without scripts or addresses. So it can be read without internet, and writing it costs the same
however many pages there are.
"""

import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from jobs.pipelines.window import Severity
from jobs.quality.validation import render
from jobs.quality.verdict import Failure
from jobs.storage.folders import Folder, write_whole, written

# A page is for reading, so it shows only this many slices.
_SLICES_SHOWN = 200
_STYLE = Path(__file__).with_name("page.css")
_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title, run $run</title>
<style>$style</style>
</head>
<body>
<h1>$title</h1>
<p class="run">Run $run</p>
<p class="outcome $outcome">$summary</p>
$failures
$docs
</body>
</html>
""")


def of(title: str, run: str, failures: Mapping[str, Sequence[Failure]], results: Mapping[str, Any]) -> str:
    """The page about the failures of each slice, and about the results of Great Expectations, each under its name."""
    hard = [name for name, found in failures.items() if any(one.severity is Severity.CRITICAL for one in found)]
    soft = [name for name, found in failures.items() if found and name not in set(hard)]
    return _PAGE.substitute(
        title=escape(title),
        run=escape(run),
        style=_STYLE.read_text(encoding="utf-8"),
        outcome="critical" if hard else "warning" if soft else "passed",
        summary=f"Judged: {len(failures)}, failed: {len(hard)}, with warnings only: {len(soft)}",
        failures=_failures({name: failures[name] for name in (*hard, *soft)}),
        docs="\n".join(f"<h2>{escape(name)}</h2>\n{render(result)}" for name, result in results.items()),
    )


def write(path: Folder, text: str) -> None:
    """Write a page in one step: a reader sees the whole page or no page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode())


def discard_old(folder: Folder, kept_seconds: float) -> None:
    """Remove the pages that are older than ``kept_seconds``."""
    for page, at in written(folder).items():
        if page.name.endswith(".html") and time.time() - at > kept_seconds:
            page.unlink(missing_ok=True)


def _failures(failures: Mapping[str, Sequence[Failure]]) -> str:
    if not failures:
        return ""
    shown = list(failures.items())[:_SLICES_SHOWN]
    rows = "\n".join(_row(name, failure) for name, found in shown for failure in found)
    more = f"<p>and {len(failures) - _SLICES_SHOWN} more slices</p>" if len(failures) > _SLICES_SHOWN else ""
    head = "<tr><th>Slice</th><th>Expectation</th><th>Severity</th><th>Observed</th></tr>"
    return f'<table class="failures"><thead>{head}</thead><tbody>{rows}</tbody></table>{more}'


def _row(name: str, failure: Failure) -> str:
    cells = "".join(f"<td>{escape(str(text))}</td>" for text in (name, failure.expectation))
    return f"<tr>{cells}<td class='{failure.severity}'>{failure.severity}</td><td>{escape(failure.observed)}</td></tr>"
