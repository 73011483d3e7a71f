"""The rules for definitions. A definition that breaks one is refused, with a text that says what to write instead."""

import re
from collections.abc import Iterable

_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_EXACT_TYPE = re.compile(r"BIGINT|STRING|TIMESTAMP|DECIMAL\(\d{1,2},\d{1,2}\)")


class RefusedDefinitionError(ValueError):
    """A definition breaks a rule. The text says how to correct it."""


def require(condition: bool, refusal: str) -> None:
    """Refuse a definition unless the condition holds."""
    if not condition:
        raise RefusedDefinitionError(refusal)


def check_name(what: str, name: str) -> None:
    """Refuse a name that cannot become a topic, a table and a DAG id."""
    require(
        _NAME.fullmatch(name) is not None,
        f"{what} name={name!r} must match {_NAME.pattern}: it becomes a topic, a table and a DAG id",
    )


def check_type(what: str, sql_type: str) -> None:
    """Refuse a type that does not hold exact values."""
    require(
        _EXACT_TYPE.fullmatch(sql_type) is not None,
        f"{what} type={sql_type!r} is not one of BIGINT, STRING, TIMESTAMP, DECIMAL(p,s); "
        "the last digit of a DOUBLE depends on the order of the records: use DECIMAL(18,6)",
    )
    if sql_type.startswith("DECIMAL"):
        precision, scale = digits_of(sql_type)
        require(
            0 < precision <= 38 and scale <= precision,
            f"{what} type={sql_type!r}: precision must be from 1 to 38, scale from 0 to the precision",
        )


def digits_of(decimal: str) -> tuple[int, int]:
    """The precision and scale of a DECIMAL type.

    >>> digits_of("DECIMAL(18,6)")
    (18, 6)
    """
    precision, scale = decimal.removeprefix("DECIMAL(").rstrip(")").split(",")
    return int(precision), int(scale)


def check_unique(what: str, names: Iterable[str]) -> None:
    """Refuse a name that occurs twice."""
    seen: set[str] = set()
    for name in names:
        require(name not in seen, f"{what} {name!r} is defined twice: rename one of the two")
        seen.add(name)


def check_sql(what: str, text: str) -> None:
    """Refuse SQL text with simple mistakes. Spark's own analysis follows when it plans the query."""
    depth, quote = 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"`":
            quote = char
        elif char in "()":
            depth += 1 if char == "(" else -1
            require(depth >= 0, f"{what} is not SQL, a ')' has no '(': {text!r}")
    require(bool(text.strip()), f"{what} is empty: write a Spark SQL expression")
    require(not quote, f"{what} is not SQL, a {quote} is not closed: {text!r}")
    require(depth == 0, f"{what} is not SQL, a '(' is not closed: {text!r}")
    require(";" not in text, f"{what} holds a ';': write one expression, not a script: {text!r}")
