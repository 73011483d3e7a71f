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
    columns = (column.alias(name) for name, column in _columns(source).items())
    return read.where("_accepted").select(*_position(), *columns)


def parse(records: DataFrame, source: Source) -> DataFrame:
    """Give each record its columns, or null columns and a reason.

    Args:
        records: rows as Spark's Kafka reader gives them, with headers.
        source: what the records should be.

    Returns:
        topic, partition, offset, arrival_time, event_time, the source's columns, reason (null: accepted),
        and of rejected records raw, raw_key and raw_headers.
    """
    reason = F.coalesce(
        "_undecodable", _READERS[source.format].problem(source), _out_of_bounds(source), F.lit("malformed")
    )
    rejected = {"reason": reason, "raw": F.col("value"), "raw_key": F.col("key"), "raw_headers": F.col("headers")}
    return _read(records, source).select(
        *_position(),
        *(F.when(F.col("_accepted"), column).alias(name) for name, column in _columns(source).items()),
        *(F.when(~F.col("_accepted"), column).alias(name) for name, column in rejected.items()),
    )


def _position() -> tuple[Column, ...]:
    return *(F.col(name) for name in ("topic", "partition", "offset")), F.col("timestamp").alias("arrival_time")


def _columns(source: Source) -> dict[str, Column]:
    key = {source.key: F.col("_key")} if source.key else {}
    fields = {field.name: key.get(field.name, F.col(_field(field))) for field in source.columns}
    return {"event_time": F.timestamp_millis("_event_ms"), **fields}


def _field(field: Field) -> str:
    return f"_fields.`{field.name}`"


def _read(records: DataFrame, source: Source) -> DataFrame:
    """Adds `_text`, `_key`, `_undecodable` (why one of them is no text), `_fields`, `_event_ms` and `_accepted`.

    `_fields` are typed, and null where there is none. They are a column before they are used, because Spark repeats
    the parsing in every expression that uses it otherwise.
    """
    text, key = F.col("value").cast("string"), F.col("key").cast("string")
    no_key = F.when(key.isNull(), "no key").when(~F.is_valid_utf8(key), "invalid UTF-8: key")
    problem = F.when(text.isNull(), "null value").when(~F.is_valid_utf8(text), "invalid UTF-8")
    decoded = records.withColumns(
        {"_key": key, "_text": text, "_undecodable": F.coalesce(problem, no_key) if source.key else problem}
    )
    read = _READERS[source.format].read(decoded, source)
    whole = F.col("_event_ms").isNotNull()
    for field in source.fields:
        whole = whole & F.col(_field(field)).isNotNull()
    return read.withColumn("_accepted", whole & _out_of_bounds(source).isNull())


def _read_text(decoded: DataFrame, source: Source) -> DataFrame:
    headers = F.filter("headers", lambda header: header["key"] == F.lit(source.event_time_header))
    # Most records have no header at all: looking into none must cost nothing.
    last = F.when(F.col("headers").isNotNull(), F.try_element_at(headers, F.lit(-1)))
    stamp = last["value"].cast("string")
    event_ms = F.when(last.isNull(), F.unix_millis("timestamp")).when(stamp.rlike(_MILLISECONDS), stamp.cast("bigint"))
    fields = F.struct(F.col("_text").alias(source.fields[0].name))
    return decoded.withColumns({"_fields": F.when(F.col("_undecodable").isNull(), fields), "_event_ms": event_ms})


def _text_problem(source: Source) -> Column:
    return F.when(F.col("_event_ms").isNull(), f"wrong type: header {source.event_time_header}")


def _read_json(decoded: DataFrame, source: Source) -> DataFrame:
    types = ", ".join(f"`{field.name}` {field.type}" for field in source.fields)
    plain = F.when(_is_plain(source), F.from_json("_text", types, _JSON_OPTIONS))
    strict = _given(_read_strictly(source), lambda read: F.when(read["problem"].isNull(), read["fields"]))
    fields = F.when(F.col("_undecodable").isNull(), F.coalesce(plain, strict))
    return _with_event_time(decoded.withColumn("_fields", fields), source)


def _json_problem(source: Source) -> Column:
    return _read_strictly(source)["problem"]


def _with_event_time(read: DataFrame, source: Source) -> DataFrame:
    return read.withColumn("_event_ms", F.col(f"_fields.`{source.event_time_field}`"))


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
    text = F.col("_text")
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
    text = F.col("_text")
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


def _read_csv(decoded: DataFrame, source: Source) -> DataFrame:
    columns = ", ".join(f"`{field.name}` STRING" for field in source.fields)
    # A quote within quotes is doubled (RFC 4180); a backslash is a backslash.
    options = {"columnNameOfCorruptRecord": "_corrupt", "mode": "PERMISSIVE", "escape": '"'}
    line = F.regexp_replace("_text", r"\r?\n$", "")
    # Spark's reader fails, whatever its mode, on a line of more than 20,480 columns.
    one_line = ~line.rlike(r"[\r\n]") & (F.length(line) - F.length(F.replace(line, F.lit(","))) < 1000)
    texts = F.when(one_line, F.from_csv(line, f"{columns}, `_corrupt` STRING", options))
    fields = (_convert_text(field, F.col(f"_texts.`{field.name}`")).alias(field.name) for field in source.fields)
    well_formed = F.col("_undecodable").isNull() & F.col("_texts._corrupt").isNull()
    return _with_event_time(
        decoded.withColumn("_texts", texts).withColumn("_fields", F.when(well_formed, F.struct(*fields))), source
    )


def _csv_problem(source: Source) -> Column:
    texts = F.col("_texts")
    return F.coalesce(
        F.when(texts.isNull() | texts["_corrupt"].isNotNull(), "malformed CSV"),
        *(_csv_field_problem(field, texts[field.name]) for field in source.fields),
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


def _out_of_bounds(source: Source) -> Column:
    """Bounds relative to arrival give the same answer whenever they are asked."""
    event_ms, arrival_ms = F.col("_event_ms"), F.unix_millis("timestamp")
    return F.when(event_ms > arrival_ms + source.max_ahead_seconds * 1000, "event time too far ahead").when(
        event_ms < arrival_ms - source.horizon_hours * 3_600_000, "event time too old"
    )


@dataclass(frozen=True)
class _Reader:
    """Of one format: what adds `_fields` and `_event_ms`, and the reason why they are none."""

    read: Callable[[DataFrame, Source], DataFrame]
    problem: Callable[[Source], Column]


_READERS = {
    Format.JSON: _Reader(_read_json, _json_problem),
    Format.CSV: _Reader(_read_csv, _csv_problem),
    Format.TEXT: _Reader(_read_text, _text_problem),
}
