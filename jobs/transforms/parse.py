"""Kafka records -> columns, or the reason why not. `ingest` keeps the rejected ones, the live jobs ignore them.

Spark's own readers are lenient: they take `"3.5"` for a number, round what does not fit and ignore what
follows the first object. So a JSON record that is not of the plain shape (flat, each field of its type) takes a
second, strict path, which also finds the reason. The plain path costs one regular expression.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from jobs.pipelines.spec import Field, Format, Source

RECORD_COLUMNS = ("topic", "partition", "offset", "arrival_time", "event_time")
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
    plain_fields = F.from_json("_text", ", ".join(f"`{f.name}` {f.type}" for f in source.fields), _JSON_OPTIONS)
    texts = F.from_json("_text", ", ".join(f"`{f.name}` {_strict_type(f)}" for f in source.fields), _JSON_OPTIONS)
    plain = F.col("_undecodable").isNull() & F.col("_text").rlike(plain_shape(source))
    read = decoded.withColumn("_plain", F.when(plain, plain_fields))
    for field in source.fields:
        plain = plain & F.col(f"_plain.`{field.name}`").isNotNull()
    read = read.withColumn("_ok", plain).withColumn("_texts", F.when(~F.col("_ok"), texts))
    document = F.try_parse_json(F.concat(F.lit("["), F.col("_text"), F.lit(",1]")))
    read = read.withColumn("_document", F.when(~F.col("_ok"), document))
    strict = F.coalesce(
        F.col("_undecodable"),
        F.when(~_is_one_object(F.col("_document")), "malformed JSON"),
        *(_json_problem(field) for field in source.fields),
    )
    return _finish(read, source, F.when(~F.col("_ok"), strict), F.col("_ok"))


def _read_csv(decoded: DataFrame, source: Source) -> DataFrame:
    columns = ", ".join(f"`{field.name}` STRING" for field in source.fields)
    options = {"columnNameOfCorruptRecord": "_corrupt", "mode": "PERMISSIVE"}
    line = F.regexp_replace("_text", r"\r?\n$", "")
    read = decoded.withColumn("_texts", F.from_csv(line, f"{columns}, `_corrupt` STRING", options))
    several = line.rlike(r"[\r\n]")
    problem = F.coalesce(
        F.col("_undecodable"),
        F.when(several | F.col("_texts._corrupt").isNotNull(), "malformed CSV"),
        *(_csv_problem(field) for field in source.fields),
    )
    return _finish(read, source, problem, F.lit(False))


def _finish(read: DataFrame, source: Source, problem: Column, plain: Column) -> DataFrame:
    """Take the typed fields from the plain path, or convert what the strict one read."""
    convert = _convert_json if source.format is Format.JSON else _convert_csv
    fields = {field.name: convert(field) for field in source.fields}
    if source.format is Format.JSON:
        fields = {name: F.when(plain, F.col(f"_plain.`{name}`")).otherwise(strict) for name, strict in fields.items()}
    return (
        read.withColumn("_problem", problem)
        .withColumn("_fields", F.struct(*(column.alias(name) for name, column in fields.items())))
        .withColumn("_event_ms", F.col(f"_fields.`{source.event_time_field}`"))
    )


def plain_shape(source: Source) -> str:
    """A regular expression that only flat objects with every field of its own type match.

    What it misses is read by the strict path: it may be too strict, never too lenient.
    """
    return r"^\s*+\{(?=[^{}\[\]]*+\}\s*+$)" + "".join(_plain_field(field) for field in source.fields)


def _plain_field(field: Field) -> str:
    if field.type == "BIGINT":
        return ""  # Spark's reader takes whole numbers only.
    if field.type == "STRING":
        shape = '"'
    else:
        whole, scale = _digits(field)
        shape = rf"-?[0-9]{{1,{whole}}}+(?:\.[0-9]{{1,{scale}}}+)?+\s*+[,}}]"
    return rf'(?=.*?"{field.name}"\s*+:\s*+{shape})'


def _digits(field: Field) -> tuple[int, int]:
    """How many digits a DECIMAL has before and after the point."""
    precision, scale = field.type.removeprefix("DECIMAL(").rstrip(")").split(",")
    return int(precision) - int(scale), int(scale)


def _strict_type(field: Field) -> str:
    """A DECIMAL as fine as one can be, to see what would be rounded; all else as it is written."""
    return f"DECIMAL(38,{38 - _digits(field)[0]})" if field.type.startswith("DECIMAL") else "STRING"


def _is_one_object(document: Column) -> Column:
    """`[text,1]` holds exactly two things, the first an object: nothing stood before or after it."""
    end = F.try_variant_get(document, "$[1]", "int")
    kind = F.schema_of_variant(F.try_variant_get(document, "$[0]", "variant"))
    beyond = F.try_variant_get(document, "$[2]", "variant")
    return F.coalesce(kind.startswith("OBJECT") & (end == 1) & beyond.isNull(), F.lit(False))


def _json_problem(field: Field) -> Column:
    kind = F.schema_of_variant(F.try_variant_get(F.col("_document"), f"$[0].{field.name}", "variant"))
    right = kind == "STRING" if field.type == "STRING" else kind.rlike("^(BIGINT|DECIMAL|DOUBLE)")
    if field.type == "BIGINT":
        right = right & F.col(f"_texts.`{field.name}`").rlike(_WHOLE)
    return (
        F.when(kind.isNull() | (kind == "VOID"), f"missing: {field.name}")
        .when(~right, f"wrong type: {field.name}")
        .when(_convert_json(field).isNull(), f"does not fit: {field.name}")
    )


def _convert_json(field: Field) -> Column:
    """What the strict path read as the field's type; null if it is none or would have to be rounded."""
    read = F.col(f"_texts.`{field.name}`")
    if not field.type.startswith("DECIMAL"):
        return _convert_csv(field)
    # Numbers so long that even the finest DECIMAL rounds them, and those that it makes zero.
    named = rf'"{field.name}"\s*+:\s*+-?'
    rounded = F.col("_text").rlike(rf"{named}(?:[0-9.]{{28}}|[0-9.]{{19,}}+[eE])")
    vanished = (read == 0) & F.col("_text").rlike(rf"{named}[0.]*+[1-9]")
    fitting = read.try_cast(field.type)
    return F.when(~rounded & ~vanished & (fitting == read), fitting)


def _csv_problem(field: Field) -> Column:
    text, converted = F.col(f"_texts.`{field.name}`"), _convert_csv(field)
    number = text.rlike(_NUMBER if field.type.startswith("DECIMAL") else _WHOLE)
    return (
        F.when(text.isNull(), f"missing: {field.name}")
        .when(converted.isNull() & ~number, f"wrong type: {field.name}")
        .when(converted.isNull(), f"does not fit: {field.name}")
    )


def _convert_csv(field: Field) -> Column:
    """The text of a field as its type; null if it is none or would have to be rounded."""
    text = F.col(f"_texts.`{field.name}`")
    if field.type == "STRING":
        return text
    if field.type == "BIGINT":
        return F.when(text.rlike(_WHOLE), text.try_cast("bigint"))
    return F.when(text.rlike(_NUMBER) & (_decimals(text) <= _digits(field)[1]), text.try_cast(field.type))


def _decimals(text: Column) -> Column:
    """How many digits after the point the number needs, exponent included."""
    fraction = F.regexp_replace(F.regexp_extract(text, r"\.([0-9]+)", 1), "0+$", "")
    exponent = F.regexp_extract(text, r"[eE]([+-]?[0-9]+)$", 1).try_cast("int")
    return F.length(fraction) - F.when(text.rlike("[eE]"), F.coalesce(exponent, F.lit(-99))).otherwise(0)


def _out_of_bounds(source: Source) -> Column:
    """Bounds relative to arrival give the same answer whenever they are asked."""
    event_ms, arrival_ms = F.col("_event_ms"), F.unix_millis("timestamp")
    return F.when(event_ms > arrival_ms + source.max_ahead_seconds * 1000, "event time too far ahead").when(
        event_ms < arrival_ms - source.horizon_hours * 3_600_000, "event time too old"
    )
