"""Kafka records -> columns, or the reason why not. `ingest` keeps the rejected ones, the live jobs ignore them.

Spark's own readers are lenient: they take `"3.5"` for a number, round what does not fit and ignore what
follows the first object. So a JSON record that is not of the plain shape (flat, each field of its type) takes a
second, strict path, which also finds the reason. The plain path costs one regular expression.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from jobs.pipelines.spec import Field, Format, Source

_MILLISECONDS = r"^-?[0-9]{1,18}$"
_WHOLE = r"^-?[0-9]+$"
_NUMBER = r"^-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
_JSON_OPTIONS = {"allowNonNumericNumbers": "false", "allowSingleQuotes": "false"}


def parse(records: DataFrame, source: Source) -> DataFrame:
    """Give each record its columns, or null columns and a reason.

    Args:
        records: rows as Spark's Kafka reader gives them, with headers.
        source: what the records should be.

    Returns:
        topic, partition, offset, arrival_time, event_time, the source's columns, reason (null: accepted),
        and of rejected records raw, raw_key and raw_headers.
    """
    read = _read_fields(_decode(records, source), source)
    judged = read.withColumn("reason", F.coalesce(F.col("_problem"), _out_of_bounds(source)))
    accepted = F.col("reason").isNull()
    kept = {
        "event_time": F.timestamp_millis(F.col("_event_ms")),
        **{field.name: F.col(_fields(field)) for field in source.columns if field.name != source.key},
        **({source.key: F.col("_key")} if source.key else {}),
    }
    rejected = {"raw": F.col("value"), "raw_key": F.col("_raw_key"), "raw_headers": F.col("headers")}
    ordered = ["event_time", *(field.name for field in source.columns)]
    return judged.select(
        "topic",
        "partition",
        "offset",
        F.col("timestamp").alias("arrival_time"),
        *(F.when(accepted, kept[name]).alias(name) for name in ordered),
        "reason",
        *(F.when(~accepted, column).alias(name) for name, column in rejected.items()),
    )


def _fields(field: Field) -> str:
    return f"_fields.`{field.name}`"


def _decode(records: DataFrame, source: Source) -> DataFrame:
    """The value and the key as text; `_undecodable` says why one of them is none."""
    text, key = F.col("value").cast("string"), F.col("key").cast("string")
    no_key = F.when(key.isNull(), "no key").when(~F.is_valid_utf8(key), "invalid UTF-8: key")
    problem = F.when(text.isNull(), "null value").when(~F.is_valid_utf8(text), "invalid UTF-8")
    return records.select(
        "topic",
        "partition",
        "offset",
        "timestamp",
        "value",
        "headers",
        F.col("key").alias("_raw_key"),
        key.alias("_key"),
        text.alias("_text"),
        (F.coalesce(problem, no_key) if source.key else problem).alias("_undecodable"),
    )


def _read_fields(decoded: DataFrame, source: Source) -> DataFrame:
    """Adds `_fields` (typed), `_event_ms` and `_problem`."""
    readers = {Format.JSON: _read_json, Format.CSV: _read_csv, Format.TEXT: _read_text}
    return readers[source.format](decoded, source)


def _read_text(decoded: DataFrame, source: Source) -> DataFrame:
    headers = F.filter("headers", lambda header: header["key"] == F.lit(source.event_time_header))
    # Most records have no header at all: looking into none must cost nothing.
    last = F.when(F.col("headers").isNotNull(), F.try_element_at(headers, F.lit(-1)))
    stamp = last["value"].cast("string")
    event_ms = F.when(last.isNull(), F.unix_millis("timestamp")).when(stamp.rlike(_MILLISECONDS), stamp.cast("bigint"))
    return decoded.select(
        "*",
        F.struct(F.col("_text").alias(source.fields[0].name)).alias("_fields"),
        event_ms.alias("_event_ms"),
    ).withColumn(
        "_problem",
        F.coalesce(
            F.col("_undecodable"),
            F.when(F.col("_event_ms").isNull(), f"wrong type: header {source.event_time_header}"),
        ),
    )


def _read_json(decoded: DataFrame, source: Source) -> DataFrame:
    types = ", ".join(f"`{field.name}` {field.type}" for field in source.fields)
    readable = F.col("_undecodable").isNull()
    plain = F.when(readable & _is_plain(source), F.from_json("_text", types, _JSON_OPTIONS))
    ok = plain.isNotNull()
    for field in source.fields:
        ok = ok & plain[field.name].isNotNull()
    # Inside a function of higher order, which Spark interprets: in the generated code of every record this much
    # costs more than the parsing, though hardly one comes here.
    strict = F.transform(F.array("_text"), lambda text: _read_strictly(text, source))[0]
    # All three at once, so that Spark finds that they share the parsing; one after the other each copies the record.
    read = decoded.select(
        "*",
        plain.alias("_plain"),
        ok.alias("_ok"),
        F.when(readable & ~ok, strict).alias("_strict"),
    )
    fields = (
        F.when(F.col("_ok"), F.col(f"_plain.`{f.name}`")).otherwise(F.col(f"_strict.`{f.name}`")).alias(f.name)
        for f in source.fields
    )
    return _finish(read, source, F.coalesce("_undecodable", "_strict._problem"), F.struct(*fields))


def _read_csv(decoded: DataFrame, source: Source) -> DataFrame:
    columns = ", ".join(f"`{field.name}` STRING" for field in source.fields)
    # A quote within quotes is doubled (RFC 4180); a backslash is a backslash.
    options = {"columnNameOfCorruptRecord": "_corrupt", "mode": "PERMISSIVE", "escape": '"'}
    line = F.regexp_replace("_text", r"\r?\n$", "")
    # Spark's reader fails, whatever its mode, on a line of more than 20,480 columns.
    one_line = ~line.rlike(r"[\r\n]") & (F.length(line) - F.length(F.replace(line, F.lit(","))) < 1000)
    read = decoded.withColumn("_texts", F.when(one_line, F.from_csv(line, f"{columns}, `_corrupt` STRING", options)))
    texts = F.col("_texts")
    problem = F.coalesce(
        F.col("_undecodable"),
        F.when(texts.isNull() | texts["_corrupt"].isNotNull(), "malformed CSV"),
        *(_csv_problem(field, texts[field.name]) for field in source.fields),
    )
    fields = (_convert_text(field, texts[field.name]).alias(field.name) for field in source.fields)
    return _finish(read, source, problem, F.struct(*fields))


def _finish(read: DataFrame, source: Source, problem: Column, fields: Column) -> DataFrame:
    return (
        read.withColumn("_problem", problem)
        .withColumn("_fields", fields)
        .withColumn("_event_ms", F.col(f"_fields.`{source.event_time_field}`"))
    )


def _is_plain(source: Source) -> Column:
    """Whether the text is an object without another inside, and every field is written as its type wants.

    What this misses is read by the strict path: it may be too strict, never too lenient.
    """
    shapes = [_plain_shape(field) for field in source.fields if field.type != "BIGINT"]
    plain = F.col("_text").rlike(shapes[0] if shapes else r"^\s*+\{[^{}]*+\}\s*+$")
    for shape in shapes[1:]:
        plain = plain & F.col("_text").rlike(shape)
    return plain


def _plain_shape(field: Field) -> str:
    """A flat object in which the field's name stands once and is followed by a value of its type.

    Spark's reader takes only whole numbers for a BIGINT, so that is no question here.
    """
    without_it = rf'[^{{}}"]*+(?:"(?!{field.name}")[^{{}}"]*+)*+'
    if field.type == "STRING":
        rest = rf'"{without_it}'
    else:
        whole, scale = _digits(field)
        rest = rf"-?[0-9]{{1,{whole}}}+(?:\.[0-9]{{1,{scale}}}+)?+\s*+(?:,{without_it})?+"
    return rf'^\s*+\{{{without_it}"{field.name}"\s*+:\s*+{rest}\}}\s*+$'


def _read_strictly(text: Column, source: Source) -> Column:
    """The fields of a JSON text and `_problem`, the reason why it is rejected."""
    types = ", ".join(f"`{f.name}` {_strict_type(f)}" for f in source.fields)
    # Spark would write out all the digits of 1e10000000 before it finds that they do not fit.
    endless = text.rlike(r':\s*+"?+-?[0-9.]++[eE][+-]?[0-9]{4}')
    texts = F.when(~endless, F.from_json(text, types, _JSON_OPTIONS))
    document = F.try_parse_json(F.concat(F.lit("["), text, F.lit(',"'), F.md5(text), F.lit('"]')))
    fields = {f.name: _convert_json(f, texts[f.name], text) for f in source.fields}
    problem = F.coalesce(
        F.when(~_is_one_object(document, text), "malformed JSON"),
        F.when(endless, "does not fit: exponent"),
        *(_json_problem(f, texts[f.name], document, fields[f.name]) for f in source.fields),
    )
    return F.struct(problem.alias("_problem"), *(column.alias(name) for name, column in fields.items()))


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


def _json_problem(field: Field, read: Column, document: Column, converted: Column) -> Column:
    kind = F.schema_of_variant(F.try_variant_get(document, f"$[0].{field.name}", "variant"))
    right = kind == "STRING" if field.type == "STRING" else kind.rlike("^(BIGINT|DECIMAL|DOUBLE)")
    if field.type == "BIGINT":
        right = right & read.rlike(_WHOLE)
    return (
        F.when(kind.isNull() | (kind == "VOID"), f"missing: {field.name}")
        .when(~right, f"wrong type: {field.name}")
        .when(converted.isNull(), f"does not fit: {field.name}")
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


def _csv_problem(field: Field, text: Column) -> Column:
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
