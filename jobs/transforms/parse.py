"""Kafka records -> columns, or the reason why not. `ingest` keeps the rejected ones, the live jobs ignore them.

Spark's own readers are lenient: they take `"3.5"` for a number, round what does not fit and ignore what
follows the first object. So a JSON record that is not of the plain shape (flat, each field of its type) takes a
second, strict path, and a rejected one a third, which finds the reason. The plain path costs one regular expression.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from jobs.pipelines.spec import Field, Format, Source

_MILLISECONDS = r"^-?[0-9]{1,18}$"
_WHOLE = r"^-?[0-9]+$"
_NUMBER = r"^-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
_POSITION = ("topic", "partition", "offset", "arrival_time")
_JSON_OPTIONS = {"allowNonNumericNumbers": "false", "allowSingleQuotes": "false"}


def accepted(records: DataFrame, source: Source) -> DataFrame:
    """The events among the records.

    Args:
        records: rows as Spark's Kafka reader gives them, with headers.
        source: what the records should be.

    Returns:
        topic, partition, offset, arrival_time, event_time and the source's columns.
    """
    read = _read(records, source)
    columns = (column.alias(name) for name, column in _columns(read, source).items())
    return read.records.where(_is_event(read, source)).select(*_POSITION, *columns)


def parse(records: DataFrame, source: Source) -> DataFrame:
    """Give each record its columns, or null columns and a reason.

    Args:
        records: rows as Spark's Kafka reader gives them, with headers.
        source: what the records should be.

    Returns:
        topic, partition, offset, arrival_time, event_time, the source's columns, reason (null: accepted),
        and of rejected records raw, raw_key and raw_headers.
    """
    read = _read(records, source)
    accepted = _is_event(read, source)
    problems = _undecodable(source), read.problem, _out_of_bounds(read.event_ms, source), F.lit("malformed")
    rejected = {
        "reason": F.coalesce(*problems),
        "raw": F.col("_value"),
        "raw_key": F.col("_key"),
        "raw_headers": F.col("_headers"),
    }
    return read.records.select(
        *_POSITION,
        *(F.when(accepted, column).alias(name) for name, column in _columns(read, source).items()),
        *(F.when(~accepted, column).alias(name) for name, column in rejected.items()),
    )


@dataclass(frozen=True, kw_only=True)
class _Read:
    """Records, and by expressions on them the fields (null where there is none), the event time and the reason why not.

    What is costly is a column of the records: Spark repeats the parsing in every expression that uses it otherwise.
    """

    records: DataFrame
    fields: dict[str, Column]
    event_ms: Column
    problem: Column


def _read(records: DataFrame, source: Source) -> _Read:
    # Spark may take a name for a column of the result that is made, so these are none of a source's.
    renamed = (F.col(name).alias(f"_{name}") for name in ("key", "value", "headers"))
    position = ("topic", "partition", "offset", F.col("timestamp").alias("arrival_time"))
    return _READERS[source.format](records.select(*position, *renamed), source)


def _columns(read: _Read, source: Source) -> dict[str, Column]:
    key = {source.key: _text("_key")} if source.key else {}
    columns = {field.name: (read.fields | key)[field.name] for field in source.columns}
    return {"event_time": F.timestamp_millis(read.event_ms), **columns}


def _is_event(read: _Read, source: Source) -> Column:
    whole = F.col("_readable")
    for column in (*read.fields.values(), read.event_ms):
        whole = whole & column.isNotNull()
    return whole & _out_of_bounds(read.event_ms, source).isNull()


def _text(column: str) -> Column:
    return F.col(column).cast("string")


def _readable(source: Source) -> Column:
    """Whether the value, and the key if it counts, are texts."""
    value = F.col("_value").isNotNull() & F.is_valid_utf8(_text("_value"))
    return value & F.col("_key").isNotNull() & F.is_valid_utf8(_text("_key")) if source.key else value


def _undecodable(source: Source) -> Column:
    """Why they are not."""
    value = F.when(F.col("_value").isNull(), "null value").when(~F.is_valid_utf8(_text("_value")), "invalid UTF-8")
    key = F.when(F.col("_key").isNull(), "no key").when(~F.is_valid_utf8(_text("_key")), "invalid UTF-8: key")
    return F.coalesce(value, key) if source.key else value


def _read_text(records: DataFrame, source: Source) -> _Read:
    headers = F.filter("_headers", lambda header: header["key"] == F.lit(source.event_time_header))
    last = F.try_element_at(headers, F.lit(-1))
    stamp = F.col("_last.value").cast("string")
    event_ms = F.when(F.col("_last").isNull(), F.unix_millis("arrival_time")).when(
        stamp.rlike(_MILLISECONDS), stamp.cast("bigint")
    )
    return _Read(
        records=records.withColumns({"_readable": _readable(source), "_last": last}).withColumn("_event_ms", event_ms),
        fields={source.fields[0].name: _text("_value")},
        event_ms=F.col("_event_ms"),
        problem=F.when(F.col("_event_ms").isNull(), f"wrong type: header {source.event_time_header}"),
    )


def _read_json(records: DataFrame, source: Source) -> _Read:
    types = ", ".join(f"`{field.name}` {field.type}" for field in source.fields)
    plain = F.when(_is_plain(source), F.from_json(_text("_value"), types, _JSON_OPTIONS))
    strict = _given(_read_strictly(source), lambda read: F.when(read["problem"].isNull(), read["fields"]))
    readable = _readable(source)
    fields = F.when(readable, F.coalesce(plain, strict))
    return _Read(
        records=records.withColumns({"_readable": readable, "_fields": fields}),
        fields=_fields(source),
        event_ms=F.col(f"_fields.`{source.event_time_field}`"),
        problem=_read_strictly(source)["problem"],
    )


def _fields(source: Source) -> dict[str, Column]:
    return {field.name: F.col(f"_fields.`{field.name}`") for field in source.fields}


def _given(value: Column, use: Callable[[Column], Column]) -> Column:
    """`use` of the value, which is computed once: Spark repeats what is used twice, but a function's argument it has.

    Functions of higher order are interpreted. In generated code the strict path would cost every record more than
    the plain one, though hardly any record takes it.
    """
    return F.transform(F.array(value), use)[0]


def _is_plain(source: Source) -> Column:
    """Whether the text is an object without another inside, and every field is written as its type wants.

    What this misses is read by the strict path: it may be too strict, never too lenient.
    """
    text = _text("_value")
    # A name that is written with an escape may be any field's; most texts have no escape at all.
    plain = ~text.contains("\\") | ~text.rlike(r'\\.[^"]*+"\s*+:')
    for shape in [_plain_shape(field) for field in source.fields if field.type != "BIGINT"] or [
        r"^\s*+\{[^{}]*+\}\s*+$"
    ]:
        plain = plain & text.rlike(shape)
    return plain


def _plain_shape(field: Field) -> str:
    """A flat object in which the field's name stands for the last time before a value of its type.

    Spark's reader, too, takes the last of repeated names. Of a BIGINT it takes only whole numbers.
    """
    if field.type == "STRING":
        value = '"'
    else:
        whole, scale = _digits(field)
        value = rf"-?[0-9]{{1,{whole}}}+(?:\.[0-9]{{1,{scale}}}+)?+(?=[\s,}}])"
    return rf'^\s*+\{{(?>[^{{}}]*"{field.name}")\s*+:\s*+{value}[^{{}}]*+\}}\s*+$'


def _read_strictly(source: Source) -> Column:
    """Of a JSON text `problem`, the reason why it is rejected, and `fields`."""
    text = _text("_value")
    types = ", ".join(f"`{f.name}` {_strict_type(f)}" for f in source.fields)
    # Spark would write out all the digits of 1e10000000 before it finds that they do not fit.
    endless = text.rlike(r':\s*+"?+-?[0-9.]++[eE][+-]?[0-9]{4}')
    texts = F.when(~endless, F.from_json(text, types, _JSON_OPTIONS))
    document = F.try_parse_json(F.concat(F.lit("["), text, F.lit(',"'), F.md5(text), F.lit('"]')))

    def convert(read: Column) -> Column:
        return F.struct(*(_convert_json(f, read["texts"][f.name], text).alias(f.name) for f in source.fields))

    def judge(read: Column, fields: Column) -> Column:
        problem = F.coalesce(
            F.when(~_is_one_object(read["document"], text), "malformed JSON"),
            F.when(read["texts"].isNull(), "does not fit: exponent"),
            *(_json_field_problem(f, read, fields[f.name]) for f in source.fields),
        )
        return F.struct(problem.alias("problem"), fields.alias("fields"))

    return _given(
        F.struct(texts.alias("texts"), document.alias("document")),
        lambda read: _given(convert(read), lambda fields: judge(read, fields)),
    )


def _digits(field: Field) -> tuple[int, int]:
    """How many digits a DECIMAL has before and after the point."""
    precision, scale = field.type.removeprefix("DECIMAL(").rstrip(")").split(",")
    return int(precision) - int(scale), int(scale)


def _strict_type(field: Field) -> str:
    """A DECIMAL as fine as one can be, to see what would be rounded; all else as it is written."""
    return f"DECIMAL(38,{38 - _digits(field)[0]})" if field.type.startswith("DECIMAL") else "STRING"


def _is_one_object(document: Column, text: Column) -> Column:
    """`[text,"its digest"]` holds exactly these two, the first an object: nothing stood before or after it.

    The reader stops at the first `]`, so a text could bring an end of its own, but not with its own digest.
    """
    end = F.try_variant_get(document, "$[1]", "string")
    kind = F.schema_of_variant(F.try_variant_get(document, "$[0]", "variant"))
    beyond = F.try_variant_get(document, "$[2]", "variant")
    return F.coalesce(kind.startswith("OBJECT") & (end == F.md5(text)) & beyond.isNull(), F.lit(False))


def _json_field_problem(field: Field, read: Column, converted: Column) -> Column:
    right = "^STRING$" if field.type == "STRING" else "^(BIGINT|DECIMAL|DOUBLE)"
    whole = read["texts"][field.name].rlike(_WHOLE) if field.type == "BIGINT" else F.lit(True)
    kind = F.schema_of_variant(F.try_variant_get(read["document"], f"$[0].{field.name}", "variant"))
    return _given(
        kind,
        lambda kind: (
            F.when(kind.isNull() | (kind == "VOID"), f"missing: {field.name}")
            .when(~(kind.rlike(right) & whole), f"wrong type: {field.name}")
            .when(converted.isNull(), f"does not fit: {field.name}")
        ),
    )


def _convert_json(field: Field, read: Column, text: Column) -> Column:
    """What the strict path read as the field's type; null if it is none or would have to be rounded."""
    if not field.type.startswith("DECIMAL"):
        return _convert_text(field, read)
    # Numbers so long that even the finest DECIMAL rounds them, and those that it makes zero.
    # A name may be written with escapes.
    named = rf'(?:"{field.name}"|\\u[^"]*+")\s*+:\s*+-?'
    rounded = text.rlike(rf"{named}(?:[0-9.]{{28}}|[0-9.]{{19,}}+[eE])")
    vanished = (read == 0) & text.rlike(rf"{named}[0.]*+[1-9]")
    fitting = read.try_cast(field.type)
    return F.when(~rounded & ~vanished & (fitting == read), fitting)


def _read_csv(records: DataFrame, source: Source) -> _Read:
    columns = ", ".join(f"`{field.name}` STRING" for field in source.fields)
    # A quote within quotes is doubled (RFC 4180); a backslash is a backslash.
    options = {"columnNameOfCorruptRecord": "_corrupt", "mode": "PERMISSIVE", "escape": '"'}
    line = F.regexp_replace(_text("_value"), r"\r?\n$", "")
    # Spark's reader fails, whatever its mode, on a line of more than 20,480 columns.
    one_line = ~line.rlike(r"[\r\n]") & (F.length(line) - F.length(F.replace(line, F.lit(","))) < 1000)
    texts = F.when(one_line, F.from_csv(line, f"{columns}, `_corrupt` STRING", options))
    given = {field: F.col(f"_texts.`{field.name}`") for field in source.fields}
    fields = F.struct(*(_convert_text(field, text).alias(field.name) for field, text in given.items()))
    malformed = F.col("_texts").isNull() | F.col("_texts._corrupt").isNotNull()
    return _Read(
        records=records.withColumns({"_readable": _readable(source), "_texts": texts}).withColumn(
            "_fields", F.when(~malformed, fields)
        ),
        fields=_fields(source),
        event_ms=F.col(f"_fields.`{source.event_time_field}`"),
        problem=F.coalesce(
            F.when(malformed, "malformed CSV"), *(_csv_field_problem(field, text) for field, text in given.items())
        ),
    )


def _csv_field_problem(field: Field, text: Column) -> Column:
    converted = _convert_text(field, text)
    number = text.rlike(_NUMBER if field.type.startswith("DECIMAL") else _WHOLE)
    return (
        F.when(text.isNull(), f"missing: {field.name}")
        .when(converted.isNull() & ~number, f"wrong type: {field.name}")
        .when(converted.isNull(), f"does not fit: {field.name}")
    )


def _convert_text(field: Field, text: Column) -> Column:
    """A text as the field's type; null if it is none or would have to be rounded."""
    if field.type == "STRING":
        return text
    if field.type == "BIGINT":
        return F.when(text.rlike(_WHOLE), text.try_cast("bigint"))
    return F.when(text.rlike(_NUMBER) & (_decimals(text) <= _digits(field)[1]), text.try_cast(field.type))


def _decimals(text: Column) -> Column:
    """How many digits after the point the number needs, exponent included."""
    fraction = F.regexp_replace(F.regexp_extract(text, r"\.([0-9]+)", 1), r"(?<!0)0++$", "")
    exponent = F.regexp_extract(text, r"[eE]([+-]?[0-9]+)$", 1).try_cast("int")
    return F.length(fraction) - F.when(text.rlike("[eE]"), F.coalesce(exponent, F.lit(-99))).otherwise(0)


def _out_of_bounds(event_ms: Column, source: Source) -> Column:
    """Bounds relative to arrival give the same answer whenever they are asked."""
    arrival_ms = F.unix_millis("arrival_time")
    return F.when(event_ms > arrival_ms + source.max_ahead_seconds * 1000, "event time too far ahead").when(
        event_ms < arrival_ms - source.horizon_hours * 3_600_000, "event time too old"
    )


_READERS = {Format.JSON: _read_json, Format.CSV: _read_csv, Format.TEXT: _read_text}
