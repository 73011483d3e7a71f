"""The parts of a page: its style, its tables, and links in them."""

from collections.abc import Iterable
from html import escape
from typing import NamedTuple

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #1b2733 }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% } th { text-align: left; font-weight: 600 }
th, td { border-bottom: 1px solid #d8e0e8; padding: .35rem .6rem; vertical-align: top }
td.n { font-variant-numeric: tabular-nums }
.state { border-radius: 1rem; padding: .1rem .7rem; color: #fff; background: #64748b; font-size: .9rem }
.running { background: #15803d } .starting, .stopping { background: #0369a1 }
.stalled { background: #b45309 } .failed, .dead { background: #b91c1c }
.incident { border-left: .3rem solid #b91c1c; background: #fef2f2; padding: .5rem 1rem }
@media (prefers-color-scheme: dark) {
  body { background: #111827; color: #e5e7eb } a { color: #7dd3fc } th, td { border-color: #374151 }
  .incident { background: #3b1d1d }
}
"""


class Link(NamedTuple):
    """A table cell with a link; empty if there is no address."""

    text: str
    href: str | None


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table with a line of heads."""
    cells = "".join(f"<th>{head}</th>" for head in heads)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, Link):
        return f'<td><a href="{escape(value.href)}">{escape(value.text)}</a></td>' if value.href else "<td></td>"
    if value is None:
        return "<td></td>"
    if isinstance(value, int | float):
        return f'<td class="n">{value:,}</td>'
    return f"<td>{escape(str(value))}</td>"
