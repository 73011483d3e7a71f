"""Writes answers as JSON, CSV or a table, batch by batch, so that a long answer needs no more memory.

Each writer takes the text file that it writes to. With ``safe=True`` characters that control a terminal are escaped.
"""

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import chain, islice
from typing import Any, TextIO

import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jobs.refusal import Refusal

# A table on a screen is not readable with more rows.
TABLE_ROWS = 1000
# Characters that move the cursor, ring the bell, or change the direction of text: C0, C1, line separators, and signs
# without a width that set text directions. The joiners U+200C and U+200D are left out, because words contain them.
_STEERING = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\xad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb"
    "\\U000e0000-\\U000e007f]"
)
_SHORT = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}
_STEERING_IN_LINES = re.compile("(?!\\n)" + _STEERING.pattern)


def visible(text: str) -> str:
    r"""The text with its control characters spelled out.

    >>> print(visible("a\x1b[31mb\n\u202e"))
    a\x1b[31mb\n\u202e
    """
    return _STEERING.sub(_spelled, text)


def visible_lines(text: str) -> str:
    """The text of several lines with its control characters spelled out. The line breaks stay."""
    return _STEERING_IN_LINES.sub(_spelled, text)


def _spelled(found: re.Match[str]) -> str:
    sign, code = found[0], ord(found[0])
    return _SHORT.get(sign) or (
        f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    )


def write_json(names: Sequence[str], batches: Iterable[pa.RecordBatch], out: TextIO, *, safe: bool = False) -> None:
    """Write an array with one object per row and line. Decimals are exact numbers, and times are ISO 8601 in UTC.

    The array is closed even if the rows end early. So the output is valid JSON, and the error says that rows are
    missing.
    """
    keys, separator = [f"{json.dumps(name)}: " for name in names], ""
    out.write("[")
    try:
        for row in _rows(batches):
            text = "{" + ", ".join(key + _json(value) for key, value in zip(keys, row, strict=True)) + "}"
            # JSON has two forms of a character: itself, and an escape. A program reads the same string from either.
            out.write(separator + (_STEERING.sub(lambda sign: json.dumps(sign[0])[1:-1], text) if safe else text))
            separator = ",\n "
    finally:
        out.write("]\n")


def write_csv(names: Sequence[str], batches: Iterable[pa.RecordBatch], out: TextIO, *, safe: bool = False) -> None:
    """Write a header and the rows; NULL is empty."""
    writer = csv.writer(out, lineterminator="\n")
    for row in chain([names], texts(batches)):
        writer.writerow([visible(cell) for cell in row] if safe else row)


def write_table(names: Sequence[str], batches: Iterable[pa.RecordBatch], out: TextIO) -> None:
    """Write a table for people, with the first rows of a long answer. Control characters are always spelled out."""
    rows = texts(batches)
    table = Table()
    for name in names:
        table.add_column(Text(visible(name)))
    refusal = None
    try:
        for row in islice(rows, TABLE_ROWS):
            # As `Text`, brackets in the data are not read as markup.
            table.add_row(*(Text(visible(cell)) for cell in row))
        is_more = next(rows, None) is not None
    except Refusal as error:
        if not table.row_count:
            raise
        refusal, is_more = error, True
    # In a pipe or a file no column is cut.
    console = Console(file=out, width=None if out.isatty() else 1000)
    console.print(table)
    more = "; there are more: --format csv or json prints all" if is_more else ""
    console.print(f"{table.row_count:,} rows{more}", highlight=False, soft_wrap=True)
    if refusal:
        raise refusal


def texts(batches: Iterable[pa.RecordBatch]) -> Iterator[list[str]]:
    """The rows as people read them; NULL is empty."""
    return (["" if value is None else _text(value) for value in row] for row in _rows(batches))


def as_text(answer: pa.Table) -> list[list[str]]:
    """The rows of a short answer as people read them."""
    return list(texts(answer.to_batches()))


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Any, ...]]:
    for batch in batches:
        try:
            columns = [column.to_pylist(maps_as_pydicts="lossy") for column in batch.columns]
        except (ValueError, OverflowError) as error:
            text = f"the answer holds a time outside the years 1 to 9999: cast it to VARCHAR ({error})"
            raise Refusal(text) from error
        yield from zip(*columns, strict=True)


def _json(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "null"
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, list):
        return "[" + ", ".join(_json(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(name))}: {_json(item)}" for name, item in value.items()) + "}"
    return json.dumps(_text(value), ensure_ascii=False)


def _text(value: Any) -> str:
    if isinstance(value, datetime):
        moment = value.astimezone(UTC) if value.tzinfo else value
        precision = "microseconds" if moment.microsecond % 1000 else "milliseconds"
        return moment.replace(tzinfo=None).isoformat(timespec=precision) + ("Z" if value.tzinfo else "")
    if isinstance(value, bytes):
        return "".join(chr(byte) if 32 <= byte < 127 and byte != 92 else f"\\x{byte:02X}" for byte in value)
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, list | dict | bool):
        return _json(value)
    if isinstance(value, pa.MonthDayNano):
        return f"P{value.months}M{value.days}DT{format(Decimal(value.nanoseconds) / 10**9, 'f')}S"
    return value.isoformat() if isinstance(value, date) else str(value)
