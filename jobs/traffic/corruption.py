"""Records that `ingest` must reject: all the ways to corrupt the bytes of a format."""

import csv
import io
import json
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from jobs.pipelines.source import Format, Source
from jobs.traffic.wire import Record

Corruption = Callable[[Source, Record, Random], Record]

_NESTED_LEVELS = 10_000
_TOO_BIG = 99_999_999_999_999_999_999
_FAR_TIMES_MS = (-1, 0, 31_536_000_000, 253_402_300_800_000, 2**63 - 1)


def corrupted(source: Source, record: Record, kind: str, rng: Random) -> Record:
    """The record, corrupted in one of the ways of `kinds`."""
    return _corruptions(source)[kind](source, record, rng)


def kinds(source: Source) -> tuple[str, ...]:
    """The ways to corrupt a record of the source."""
    return tuple(_corruptions(source))


def _corruptions(source: Source) -> dict[str, Corruption]:
    return _CORRUPTIONS[source.format] | (_KEY if source.key else {})


def _number_field(source: Source, rng: Random) -> str:
    return rng.choice([field.name for field in source.fields if field.type != "STRING"])


def _time_field(source: Source, rng: Random) -> str:
    return str(source.event_time_field)


def _any_field(source: Source, rng: Random) -> str:
    return rng.choice(source.fields).name


def _edited(
    edit: Callable[[dict[str, Any], str, Random], None], choose: Callable[[Source, Random], str] = _number_field
) -> Corruption:
    """A corruption that edits the fields of a JSON or CSV record and writes it again."""

    def corrupt(source: Source, record: Record, rng: Random) -> Record:
        fields = _read(source, record.value or b"")
        edit(fields, choose(source, rng), rng)
        return record._replace(value=_written(source, fields))

    return corrupt


def _read(source: Source, value: bytes) -> dict[str, Any]:
    if source.format is Format.JSON:
        return dict(json.loads(value))
    names = [field.name for field in source.fields]
    return dict(zip(names, next(csv.reader([value.decode()])), strict=True))


def _written(source: Source, fields: dict[str, Any]) -> bytes:
    if source.format is Format.JSON:
        return json.dumps(fields, ensure_ascii=False).encode()
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields.values())
    return line.getvalue().encode()


def _set(value: Any, fields: dict[str, Any], field: str, rng: Random) -> None:
    fields[field] = value


def _drop(fields: dict[str, Any], field: str, rng: Random) -> None:
    del fields[field]


def _far_time(fields: dict[str, Any], field: str, rng: Random) -> None:
    fields[field] = rng.choice(_FAR_TIMES_MS)


def _fraction_of_time(fields: dict[str, Any], field: str, rng: Random) -> None:
    fields[field] = int(fields[field]) + 0.5


def _replaced(value: bytes | None, source: Source, record: Record, rng: Random) -> Record:
    return record._replace(value=value)


def _truncated(source: Source, record: Record, rng: Random) -> Record:
    """Cut the record so that at least one field is missing and the rest is never valid."""
    value = record.value or b""
    end = value.find(b"," if source.format is Format.CSV else b":")
    return record._replace(value=value[: rng.randint(1, max(end, 1))])


def _invalid_utf8(source: Source, record: Record, rng: Random) -> Record:
    """Insert two bytes that UTF-8 never has: into the first text of JSON, anywhere in other formats."""
    value = record.value or b""
    at = value.find(b'"') + 1 if source.format is Format.JSON else rng.randint(0, len(value))
    return record._replace(value=value[:at] + b"\xff\xfe" + value[at:])


def _nested(source: Source, record: Record, rng: Random) -> Record:
    """Replace a number by thousands of nested brackets."""
    fields = _read(source, record.value or b"")
    field = _number_field(source, rng)
    del fields[field]
    deep = b"[" * _NESTED_LEVELS + b"]" * _NESTED_LEVELS
    return record._replace(value=_written(source, fields)[:-1] + b', "' + field.encode() + b'": ' + deep + b"}")


def _unclosed_quote(source: Source, record: Record, rng: Random) -> Record:
    return record._replace(value=(record.value or b"").replace(b",", b',"', 1))


def _extra_column(source: Source, record: Record, rng: Random) -> Record:
    return record._replace(value=(record.value or b"") + b",1")


def _header(value: bytes, source: Source, record: Record, rng: Random) -> Record:
    return record._replace(headers=((str(source.event_time_header), value),))


def _far_header(source: Source, record: Record, rng: Random) -> Record:
    return _header(str(rng.choice(_FAR_TIMES_MS)).encode(), source, record, rng)


def _rekeyed(key: bytes | None, source: Source, record: Record, rng: Random) -> Record:
    return record._replace(key=key)


_KEY: dict[str, Corruption] = {"no_key": partial(_rekeyed, None), "key_not_utf8": partial(_rekeyed, b"\xff\xfe")}
_ANY_FORMAT: dict[str, Corruption] = {"null_value": partial(_replaced, None), "invalid_utf8": _invalid_utf8}
_FIELDS: dict[str, Corruption] = {
    "empty_value": partial(_replaced, b""),
    "truncated": _truncated,
    "wrong_type": _edited(partial(_set, "twelve")),
    "overflow": _edited(partial(_set, _TOO_BIG)),
    "not_a_number": _edited(partial(_set, float("nan"))),
    "far_time": _edited(_far_time, _time_field),
    "fraction_of_time": _edited(_fraction_of_time, _time_field),
}
_CORRUPTIONS: dict[Format, dict[str, Corruption]] = {
    Format.JSON: {
        **_ANY_FORMAT,
        **_FIELDS,
        "not_json": partial(_replaced, b"no JSON at all"),
        "missing_field": _edited(_drop, _any_field),
        "null_field": _edited(partial(_set, None), _any_field),
        "nested": _nested,
    },
    Format.CSV: {
        **_ANY_FORMAT,
        **_FIELDS,
        "missing_column": _edited(_drop, _any_field),
        "extra_column": _extra_column,
        "empty_number": _edited(partial(_set, "")),
        "unclosed_quote": _unclosed_quote,
    },
    Format.TEXT: {
        **_ANY_FORMAT,
        "far_time": _far_header,
        "time_overflow": partial(_header, str(_TOO_BIG).encode()),
        "time_is_text": partial(_header, b"soon"),
        "fraction_of_time": partial(_header, b"1763465000000.5"),
        "time_is_not_utf8": partial(_header, b"\xff\xfe"),
    },
}
