"""Kafka records -> columns, or the reason of a rejection. `ingest` keeps rejected records, live jobs ignore them.

Spark's own JSON reader is lenient: it takes `"3.5"` for a number, rounds values that do not fit, and ignores text after
the first object. So only plain JSON goes through it directly: a flat object in which no name is repeated, and each
field is written as its type requires. Regular expressions recognise plain JSON. All other JSON takes a strict path,
which also finds the reason of a rejection.

All expressions are text of Spark SQL. To build them from Column objects would take Python a second for each source.
"""

from dataclasses import dataclass

from pyspark.sql import DataFrame

from jobs.pipelines.rules import digits_of
from jobs.pipelines.source import Field, Format, Source

_TEXT, _KEY = "CAST(_value AS STRING)", "CAST(_key AS STRING)"
_MILLISECONDS = "r'^-?[0-9]{1,18}$'"
_WHOLE = "r'^-?[0-9]+$'"
_NUMBER = r"r'^-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?$'"
_POSITION = ("topic", "partition", "offset", "arrival_time")
_JSON_OPTIONS = "map('allowNonNumericNumbers', 'false', 'allowSingleQuotes', 'false')"


def accepted(records: DataFrame, source: Source) -> DataFrame:
    """The events among the records.

    Args:
        records: rows as Spark's Kafka reader gives them, with headers.
        source: the definition of the records.

    Returns:
        topic, partition, offset, arrival_time, event_time and the source's columns.
    """
    read = _read(records, source)
    columns = (f"{sql} AS `{name}`" for name, sql in _columns(read, source).items())
    return read.records.where(_is_event(read, source)).selectExpr(*_POSITION, *columns)


def parse(records: DataFrame, source: Source) -> DataFrame:
    """Give each record its columns, or null columns and a reason.

    Args:
        records: rows as Spark's Kafka reader gives them, with headers.
        source: the definition of the records.

    Returns:
        topic, partition, offset, arrival_time, event_time, the source's columns, and reason, which is null for accepted
        records. Rejected records also have raw, raw_key and raw_headers.
    """
    read = _read(records, source)
    is_event = _is_event(read, source)
    reason = f"coalesce(_undecodable, {read.problem}, {_out_of_bounds(read, source)}, 'malformed')"
    rejected = {"reason": reason, "raw": "_value", "raw_key": "_key", "raw_headers": "_headers"}
    return read.records.selectExpr(
        *_POSITION,
        *(f"if({is_event}, {sql}, NULL) AS `{name}`" for name, sql in _columns(read, source).items()),
        *(f"if({is_event}, NULL, {sql}) AS `{name}`" for name, sql in rejected.items()),
    )


@dataclass(frozen=True, kw_only=True)
class _Read:
    """Records, and SQL over them: the fields (null if missing), the event time and the reason of a rejection.

    Costly values are columns of the records. Otherwise Spark would repeat the parsing in every expression.
    """

    records: DataFrame
    fields: dict[str, str]
    event_ms: str
    problem: str


def _read(records: DataFrame, source: Source) -> _Read:
    # A source may have columns named `key` and `value`, too. No name of a source begins with an underscore, so each
    # name in the SELECTs below means one column.
    renamed = (f"{name} AS _{name}" for name in ("key", "value", "headers"))
    position = ("topic", "partition", "offset", "timestamp AS arrival_time")
    decoded = records.selectExpr(*position, *renamed).selectExpr("*", f"{_undecodable(source)} AS _undecodable")
    return _READERS[source.format](decoded, source)


def _columns(read: _Read, source: Source) -> dict[str, str]:
    key = {source.key: _KEY} if source.key else {}
    columns = {field.name: (read.fields | key)[field.name] for field in source.columns}
    return {"event_time": f"timestamp_millis({read.event_ms})", **columns}


def _is_event(read: _Read, source: Source) -> str:
    whole = (f"{sql} IS NOT NULL" for sql in (*read.fields.values(), read.event_ms))
    return f"(_undecodable IS NULL AND {' AND '.join(whole)} AND {_out_of_bounds(read, source)} IS NULL)"


def _out_of_bounds(read: _Read, source: Source) -> str:
    """Why the event time is out of bounds, or null.

    The bounds are counted from the record's arrival, and not from now. So a record that is parsed again, a day later,
    gets the same answer.
    """
    ahead, past = source.max_ahead_seconds * 1000, source.horizon_hours * 3_600_000
    return f"""CASE WHEN {read.event_ms} > unix_millis(arrival_time) + {ahead}L THEN 'event time too far ahead'
                    WHEN {read.event_ms} < unix_millis(arrival_time) - {past}L THEN 'event time too old' END"""


def _undecodable(source: Source) -> str:
    """Why the value, or the key if the source uses it, is missing or not valid text; null if both are valid."""
    key = f"WHEN _key IS NULL THEN 'no key' WHEN NOT is_valid_utf8({_KEY}) THEN 'invalid UTF-8: key'"
    value = f"WHEN _value IS NULL THEN 'null value' WHEN NOT is_valid_utf8({_TEXT}) THEN 'invalid UTF-8'"
    return f"CASE {value} {key if source.key else ''} END"


def _read_text(records: DataFrame, source: Source) -> _Read:
    named = f"'{source.event_time_header}'" if source.event_time_header else "NULL"
    last = f"try_element_at(filter(_headers, header -> header.key = {named}), -1)"
    stamp = "CAST(_last.value AS STRING)"
    event_ms = f"""CASE WHEN _last IS NULL THEN unix_millis(arrival_time)
                        WHEN {stamp} RLIKE {_MILLISECONDS} THEN CAST({stamp} AS BIGINT) END"""
    return _Read(
        records=records.selectExpr("*", f"{last} AS _last").selectExpr("*", f"{event_ms} AS _event_ms"),
        fields={source.fields[0].name: _TEXT},
        event_ms="_event_ms",
        problem=f"if(_event_ms IS NULL, 'wrong type: header {source.event_time_header}', NULL)",
    )


def _read_json(records: DataFrame, source: Source) -> _Read:
    types = ", ".join(f"`{field.name}` {field.type}" for field in source.fields)
    plain = f"if({_is_plain(source)}, from_json({_TEXT}, '{types}', {_JSON_OPTIONS}), NULL)"
    strict = _given("strict", _read_strictly(source), "if(strict.problem IS NULL, strict.fields, NULL)")
    return _Read(
        records=records.selectExpr("*", f"coalesce({plain}, {strict}) AS _fields"),
        fields=_fields(source),
        event_ms=f"_fields.`{source.event_time_field}`",
        problem=f"{_read_strictly(source)}.problem",
    )


def _fields(source: Source) -> dict[str, str]:
    return {field.name: f"_fields.`{field.name}`" for field in source.fields}


def _given(name: str, value: str, use: str) -> str:
    """SQL that computes ``value`` once, and uses the result under ``name`` as often as needed.

    It is a lambda over an array with one value. Spark computes the argument of a lambda once. It would compute any
    other expression again at each place that uses it.

    Spark interprets lambdas, and does not compile them into its generated code. That is wanted: hardly any record takes
    the strict path, and as generated code it would slow down every record.
    """
    return f"transform(array({value}), {name} -> {use})[0]"


def _is_plain(source: Source) -> str:
    """Whether the text is an object without another one in it, and every field is written as its type requires.

    The strict path reads all other texts. So this test may be too strict, but never too lenient.
    """
    # A name with an escape, such as `v\u0061lue`, may be the name of any field. Most texts have no escape at all.
    no_escaped_name = rf"""(NOT contains({_TEXT}, r'\') OR NOT {_TEXT} RLIKE r'\\.[^"]*+"\s*+:')"""
    # The name of each field needs two quotes, and each STRING value two more. A text that has all fields, and no quotes
    # beyond these, cannot repeat a name. (A text that lacks a field is rejected in any case.) Another text of up
    # to 300 bytes is searched for a repeated name. A longer text takes the strict path, because that is faster than to
    # search it.
    quotes = f"octet_length({_TEXT}) - octet_length(replace({_TEXT}, '\"', ''))"
    needed = 2 * len(source.fields) + 2 * sum(field.type == "STRING" for field in source.fields)
    repeated = rf"""{_TEXT} RLIKE r'"([^"]*+)"\s*+:[^{{}}]*"\1"\s*+:'"""
    once = f"({quotes} = {needed} OR octet_length({_TEXT}) <= 300 AND NOT {repeated})"
    shapes = [_plain_shape(field) for field in source.fields if field.type != "BIGINT"] or [r"[^{}]*+\}\s*+$"]
    return " AND ".join([no_escaped_name, once, *(rf"{_TEXT} RLIKE r'^\s*+\{{{shape}'" for shape in shapes)])


def _plain_shape(field: Field) -> str:
    """The pattern of a flat object after its first brace, in which a value of the field's type follows its name."""
    if field.type == "STRING":
        value = '"'
    else:
        whole, scale = _digits(field)
        value = rf"-?[0-9]{{1,{whole}}}+(?:\.[0-9]{{1,{scale}}}+)?+(?=[\s,}}])"
    return rf'(?>[^{{}}]*"{field.name}")\s*+:\s*+{value}[^{{}}]*+\}}\s*+$'


def _read_strictly(source: Source) -> str:
    """SQL that reads a JSON text on the strict path.

    It gives a struct with `problem`, the reason of a rejection or null, and with `fields`, the values.
    """
    types = ", ".join(f"`{f.name}` {_strict_type(f)}" for f in source.fields)
    # Spark would write out all the digits of 1e10000000 before it finds that they do not fit.
    endless = rf"""{_TEXT} RLIKE r':\s*+"?+-?[0-9.]++[eE][+-]?[0-9]{{4}}'"""
    texts = f"if({endless}, NULL, from_json({_TEXT}, '{types}', {_JSON_OPTIONS}))"
    document = f"""try_parse_json(concat('[', {_TEXT}, ',"', md5({_TEXT}), '"]'))"""
    fields = ", ".join(f"'{f.name}', {_convert_json(f, f'read.texts.`{f.name}`')}" for f in source.fields)
    problem = f"""coalesce(
        if({_is_one_object("read.document")}, NULL, 'malformed JSON'),
        if(read.texts IS NULL, 'does not fit: exponent', NULL),
        {", ".join(_json_field_problem(f) for f in source.fields)}
    )"""
    return _given(
        "read",
        f"named_struct('texts', {texts}, 'document', {document})",
        _given("fields", f"named_struct({fields})", f"named_struct('problem', {problem}, 'fields', fields)"),
    )


def _digits(field: Field) -> tuple[int, int]:
    """How many digits a DECIMAL has before and after the point.

    >>> _digits(Field(name="value", type="DECIMAL(18,6)"))
    (12, 6)
    """
    precision, scale = digits_of(field.type)
    return precision - scale, scale


def _strict_type(field: Field) -> str:
    """The type for the strict path. A DECIMAL gets as many decimals as possible, to detect rounding; all else is text.

    >>> _strict_type(Field(name="value", type="DECIMAL(18,6)")), _strict_type(Field(name="ts", type="BIGINT"))
    ('DECIMAL(38,26)', 'STRING')
    """
    return f"DECIMAL(38,{38 - _digits(field)[0]})" if field.type.startswith("DECIMAL") else "STRING"


def _is_one_object(document: str) -> str:
    """Whether a text is exactly one JSON object, with nothing after it.

    Spark's reader ignores all text after the end of a value. So ``document`` is the text in an array, with the text's
    digest after it: `[TEXT,"DIGEST"]`. The digest stands in second place only if TEXT is one value. Examples:

    - `{"a":1}` is accepted: the array has the object, then the digest.
    - `{"a":1}]` is rejected: the reader stops at this `]`, and finds no digest.
    - `{"a":1},"b"` is rejected: `b` stands in second place. Only a text that contains its own digest would pass.
    """
    kind = f"schema_of_variant(try_variant_get({document}, '$[0]', 'variant'))"
    end = f"try_variant_get({document}, '$[1]', 'string') = md5({_TEXT})"
    beyond = f"try_variant_get({document}, '$[2]', 'variant')"
    return f"coalesce(startswith({kind}, 'OBJECT') AND {end} AND {beyond} IS NULL, false)"


def _json_field_problem(field: Field) -> str:
    """Why a field is rejected, or null, as SQL over the values that `_read_strictly` has read and converted."""
    right = "kind = 'STRING'" if field.type == "STRING" else "kind RLIKE '^(BIGINT|DECIMAL|DOUBLE)'"
    if field.type == "BIGINT":
        right = f"{right} AND read.texts.`{field.name}` RLIKE {_WHOLE}"
    return _given(
        "kind",
        f"schema_of_variant(try_variant_get(read.document, '$[0].{field.name}', 'variant'))",
        f"""CASE WHEN kind IS NULL OR kind = 'VOID' THEN 'missing: {field.name}'
                 WHEN NOT ({right}) THEN 'wrong type: {field.name}'
                 WHEN fields.`{field.name}` IS NULL THEN 'does not fit: {field.name}' END""",
    )


def _convert_json(field: Field, read: str) -> str:
    """A value of the strict path as the field's type; null if it is not of the type or would be rounded."""
    if not field.type.startswith("DECIMAL"):
        return _convert_text(field, read)
    # Even the finest DECIMAL rounds very long numbers, and turns very small ones into zero. Only the text of the number
    # shows whether this happened. In the text, the name of the field may be written with escapes.
    named = rf'(?:"{field.name}"|\\u[^"]*+")\s*+:\s*+-?'
    rounded = rf"{_TEXT} RLIKE r'{named}(?:[0-9.]{{28}}|[0-9.]{{19,}}+[eE])'"
    vanished = rf"({read} = 0 AND {_TEXT} RLIKE r'{named}(?=[0.]*+[1-9])[0-9.]++[eE]-')"
    fitting = f"try_cast({read} AS {field.type})"
    return f"if(NOT {rounded} AND NOT {vanished} AND {fitting} = {read}, {fitting}, NULL)"


def _read_csv(records: DataFrame, source: Source) -> _Read:
    columns = ", ".join(f"`{field.name}` STRING" for field in source.fields)
    # A quote within quotes is doubled (RFC 4180), and a backslash has no special meaning.
    options = "map('columnNameOfCorruptRecord', '_corrupt', 'mode', 'PERMISSIVE', 'escape', '\"')"
    line = rf"regexp_replace({_TEXT}, r'\r?\n$', '')"
    # Spark's reader fails, whatever its mode, on a line of more than 20,480 columns.
    one_line = rf"{line} NOT RLIKE r'[\r\n]' AND length({line}) - length(replace({line}, ',')) < 1000"
    texts = f"if({one_line}, from_csv({line}, '{columns}, `_corrupt` STRING', {options}), NULL)"
    given = {field: f"_texts.`{field.name}`" for field in source.fields}
    fields = ", ".join(f"'{field.name}', {_convert_text(field, text)}" for field, text in given.items())
    malformed = "(_texts IS NULL OR _texts._corrupt IS NOT NULL)"
    problems = ", ".join(_csv_field_problem(field, text) for field, text in given.items())
    return _Read(
        records=records.selectExpr("*", f"{texts} AS _texts").selectExpr(
            "*", f"if({malformed}, NULL, named_struct({fields})) AS _fields"
        ),
        fields=_fields(source),
        event_ms=f"_fields.`{source.event_time_field}`",
        problem=f"coalesce(if({malformed}, 'malformed CSV', NULL), {problems})",
    )


def _csv_field_problem(field: Field, text: str) -> str:
    number = _NUMBER if field.type.startswith("DECIMAL") else _WHOLE
    converted = _convert_text(field, text)
    return f"""CASE WHEN {text} IS NULL THEN 'missing: {field.name}'
                    WHEN {converted} IS NULL AND {text} NOT RLIKE {number} THEN 'wrong type: {field.name}'
                    WHEN {converted} IS NULL THEN 'does not fit: {field.name}' END"""


def _convert_text(field: Field, text: str) -> str:
    """A text as the field's type; null if it is not of the type or would be rounded."""
    if field.type == "STRING":
        return text
    if field.type == "BIGINT":
        return f"if({text} RLIKE {_WHOLE}, try_cast({text} AS BIGINT), NULL)"
    fits = f"{text} RLIKE {_NUMBER} AND {_decimals(text)} <= {_digits(field)[1]}"
    return f"if({fits}, try_cast({text} AS {field.type}), NULL)"


def _decimals(text: str) -> str:
    """How many digits after the point a number needs: `1.50` needs 1, and `1e-3` needs 3."""
    fraction = rf"regexp_replace(regexp_extract({text}, r'\.([0-9]+)', 1), r'(?<!0)0++$', '')"
    exponent = f"try_cast(regexp_extract({text}, '[eE]([+-]?[0-9]+)$', 1) AS INT)"
    return f"length({fraction}) - if({text} RLIKE '[eE]', coalesce({exponent}, -99), 0)"


_READERS = {Format.JSON: _read_json, Format.CSV: _read_csv, Format.TEXT: _read_text}
