"""A definition that cannot work is refused when it is written, with the error and a way to correct it."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import pipelines
from jobs.pipelines import INGEST, PIPELINES, SOURCES, STREAMS
from jobs.pipelines.layout import checkpoint_of, control_of, dag_id_of
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.rules import RefusedDefinitionError
from jobs.pipelines.source import CLOCK, Field, Format, Source, Topic
from jobs.pipelines.window import Check, Measure, Severity, View, Window, WindowKind

TS = Field(name="ts", type="BIGINT")
VALUE = Field(name="value", type="DECIMAL(18,6)")
TEXT = Field(name="text", type="STRING")


def source(**changes: Any) -> Source:
    usual: dict[str, Any] = {
        "name": "readings",
        "description": "Readings.",
        "format": Format.JSON,
        "fields": (TS, VALUE),
        "event_time_field": "ts",
        "key": "device",
    }
    return Source(**{**usual, **changes})


def text_source(**changes: Any) -> Source:
    return source(**{"format": Format.TEXT, "fields": (TEXT,), "event_time_field": None, "key": None, **changes})


def measure(**changes: Any) -> Measure:
    return Measure(**{"name": "total", "sql": "sum(value)", "type": "DECIMAL(28,6)", **changes})


def pipeline(**changes: Any) -> Pipeline:
    usual: dict[str, Any] = {
        "name": "per_device",
        "description": "Per device.",
        "source": source(),
        "transform": "SELECT event_time, device, value FROM {readings}",
        "keys": ("device",),
        "window": Window.sliding(size_ms=1000, slide_ms=250),
        "measures": (measure(),),
        "output": "devices",
    }
    return Pipeline(**{**usual, **changes})


REFUSED: list[tuple[Callable[[], object], str]] = [
    # Names
    (lambda: source(name="Readings"), "source name='Readings' must match [a-z][a-z0-9_]{0,62}: it becomes a topic"),
    (lambda: source(name=""), "source name='' must match"),
    (lambda: source(name="../x"), "source name='../x' must match"),
    (lambda: source(name="a" * 64), "must match"),
    (lambda: Field(name="1st", type="BIGINT"), "field name='1st' must match"),
    (lambda: measure(name="Total"), "measure name='Total' must match"),
    (lambda: pipeline(name="per-device"), "pipeline name='per-device' must match"),
    (lambda: pipeline(output="dev ices"), "output name='dev ices' must match"),
    (lambda: View(name="x;y", sql="SELECT 1"), "view name='x;y' must match"),
    # Types
    (
        lambda: Field(name="v", type="DOUBLE"),
        "field 'v' type='DOUBLE' is not one of BIGINT, STRING, TIMESTAMP, DECIMAL",
    ),
    (
        lambda: Field(name="v", type="DOUBLE"),
        "the last digit of a DOUBLE depends on the order of the records: use DECIMAL(18,6)",
    ),
    (lambda: Field(name="v", type="bigint"), "type='bigint' is not one of"),
    (lambda: Field(name="v", type="DECIMAL"), "type='DECIMAL' is not one of"),
    (lambda: Field(name="v", type="DECIMAL(18, 6)"), "type='DECIMAL(18, 6)' is not one of"),
    (
        lambda: Field(name="v", type="DECIMAL(39,6)"),
        "type='DECIMAL(39,6)': precision must be from 1 to 38, scale from 0",
    ),
    (lambda: Field(name="v", type="DECIMAL(0,0)"), "type='DECIMAL(0,0)': precision must be from 1 to 38"),
    (
        lambda: Field(name="v", type="DECIMAL(6,7)"),
        "type='DECIMAL(6,7)': precision must be from 1 to 38, scale from 0 to",
    ),
    (lambda: Field(name="v", type="TIMESTAMP"), "field 'v' type='TIMESTAMP': records have their times as epoch milli"),
    (lambda: measure(type="FLOAT"), "measure 'total' type='FLOAT' is not one of"),
    # Sources
    (lambda: source(fields=()), "source 'readings' has no fields: name at least one"),
    (lambda: source(fields=(TS, VALUE, VALUE)), "source 'readings': column 'value' is defined twice: rename one"),
    (lambda: source(key="value"), "source 'readings': column 'value' is defined twice"),
    (lambda: source(event_time_field=None), "event_time_field=None must name a BIGINT field (milliseconds since"),
    (lambda: source(event_time_field="time"), "event_time_field='time' must name a BIGINT field"),
    (lambda: source(event_time_field="value"), "event_time_field='value' must name a BIGINT field"),
    (lambda: source(identity=("id", "ts")), "identity=['id'] names no field; fields=['ts', 'value']"),
    (lambda: source(partitions=0), "source 'readings': partitions=0 must be positive"),
    (lambda: source(horizon_hours=0), "source 'readings': horizon_hours=0 must be positive"),
    (lambda: source(longest_outage_hours=0), "source 'readings': longest_outage_hours=0 must be positive"),
    (lambda: source(max_ahead_seconds=-1), "source 'readings': max_ahead_seconds=-1 must not be negative"),
    (
        lambda: source(retention_hours=71),
        "retention_hours=71 is shorter than longest_outage_hours=72: records would be",
    ),
    (lambda: source(retention_hours=71), "keep the topic longer or accept a shorter outage"),
    (
        lambda: source(events_kept_days=16),
        "events_kept_days=16 is shorter than horizon_hours=168, longest_outage_hours=72 and retention_hours=168 "
        "together: a late event could belong",
    ),
    (lambda: source(events_kept_days=16), "set events_kept_days=17 or more"),
    *[
        (
            lambda name=name: source(fields=(TS, Field(name=name, type="BIGINT"))),
            f"source 'readings': every landed record has columns ['{name}'] already: rename them",
        )
        for name in ("topic", "partition", "offset", "arrival_time", "event_time", "reason", "raw", "raw_key", "hour")
    ],
    (lambda: source(key="hour"), "every landed record has columns ['hour'] already"),
    (
        lambda: text_source(fields=(TS,)),
        "plain text has one STRING field, and its event time is a header or the arrival",
    ),
    (lambda: text_source(fields=(TEXT, VALUE)), "plain text has one STRING field"),
    (lambda: text_source(event_time_field="text"), "plain text has one STRING field"),
    (lambda: text_source(event_time_header="it's"), 'event_time_header="it\'s" is no name of a header: use letters'),
    (lambda: source(event_time_header="ts"), "event_time_header is for plain text; here event_time_field names"),
    # Windows
    (lambda: Window.tumbling(size_ms=0), "window: slide_ms=0 must be more than 0, and not more than size_ms=0"),
    (lambda: Window.tumbling(size_ms=-1), "window: slide_ms=-1 must be more than 0, and not more than size_ms=-1"),
    (
        lambda: Window.sliding(size_ms=1000, slide_ms=2000),
        "window: slide_ms=2000 must be more than 0, and not more than size_ms=1000",
    ),
    (lambda: Window.sliding(size_ms=1000, slide_ms=300), "size_ms=1000 is no multiple of slide_ms=300: an event would"),
    (
        lambda: Window.session(gap_ms=10, longest_ms=5),
        "window: slide_ms=10 must be more than 0, and not more than size_ms=5",
    ),
    # SQL
    (lambda: measure(sql=""), "measure 'total' is empty: write a Spark SQL expression"),
    (lambda: measure(sql="   "), "measure 'total' is empty"),
    (lambda: measure(sql="sum(value"), "measure 'total' is not SQL, a '(' is not closed: 'sum(value'"),
    (lambda: measure(sql="sum(value))"), "measure 'total' is not SQL, a ')' has no '(': 'sum(value))'"),
    (lambda: measure(sql="max('a)"), "measure 'total' is not SQL, a ' is not closed"),
    (lambda: measure(sql="sum(value); DROP"), "measure 'total' holds a ';': write one expression, not a script"),
    (lambda: measure(sql="value"), "sql='value' aggregates nothing: write e.g. sum(value) or count(*)"),
    (
        lambda: measure(sql="sum(CAST(value AS Double))"),
        "computes with a DOUBLE, whose last digit depends on the order",
    ),
    (lambda: measure(sql="sum(float(value))"), "sum integers or DECIMALs"),
    (lambda: View(name="v", sql=""), "view 'v' is empty"),
    (lambda: View(name="v", sql="SELECT (1"), "view 'v' is not SQL, a '(' is not closed"),
    (lambda: pipeline(transform="SELECT event_time FROM {other}"), "transform must select event_time FROM {readings}"),
    (lambda: pipeline(transform="SELECT value FROM {readings}"), "transform must select event_time FROM {readings}"),
    (lambda: pipeline(transform="SELECT event_time FROM {readings};"), "holds a ';'"),
    # Pipelines
    (lambda: pipeline(measures=()), "pipeline 'per_device' has no measures: name at least one"),
    (lambda: pipeline(measures=(measure(), measure())), "pipeline 'per_device': column 'total' is defined twice"),
    (lambda: pipeline(keys=("total",)), "pipeline 'per_device': column 'total' is defined twice"),
    (lambda: pipeline(keys=("device", "device")), "pipeline 'per_device': column 'device' is defined twice"),
    *[
        (lambda name=name: pipeline(keys=(name,)), f"pipeline 'per_device': column '{name}' is defined twice")
        for name in ("window_start", "window_end", "slice", "finality", "version", "as_of", "epoch", "batch")
    ],
    *[
        (lambda name=name: pipeline(measures=(measure(name=name),)), f"column '{name}' is defined twice")
        for name in ("fingerprint", "offsets", "watermark")
    ],
    (
        lambda: pipeline(checks=(Check(column="mean"),)),
        "checks on ['mean'], which are no columns; columns=['device', 'total']",
    ),
    (lambda: Check(column="total", minimum=2, maximum=1), "check on 'total': minimum=2 is above maximum=1"),
    (
        lambda: pipeline(checks=(Check(column="device", minimum=1),)),
        "pipeline 'per_device': check on 'device' has bounds, but it is no number",
    ),
    (lambda: Check(column="total", maximum=2**63), "do not fit into a BIGINT: leave out what no value can exceed"),
    (lambda: pipeline(counts="total"), "counts='total' names no BIGINT measure"),
    (lambda: pipeline(counts="nothing"), "counts='nothing' names no BIGINT measure"),
    (lambda: pipeline(key_types=("STRING", "BIGINT")), "must give a type for each of ['device']"),
    (lambda: pipeline(key_types=("DOUBLE",)), "type='DOUBLE' is not one of BIGINT"),
    (lambda: pipeline(reopen_rows=-1), "reopen_rows=-1 must not be negative"),
    (lambda: pipeline(reopen_share=1.5), "reopen_share=1.5 must be from 0 to 1"),
    *[
        (lambda sql=sql: pipeline(transform=sql), "transform must be one SELECT that works row by row")
        for sql in (
            "WITH a AS (SELECT event_time FROM {readings}) SELECT * FROM a",
            "SELECT DISTINCT event_time FROM {readings}",
            "SELECT event_time FROM {readings} UNION ALL SELECT event_time FROM {readings}",
            "SELECT event_time, count(*) FROM {readings} GROUP  BY 1",
        )
    ],
    *[
        (lambda sql=sql: pipeline(transform=sql), "joins records, and there are no joins yet: write a pipeline for")
        for sql in (
            "SELECT event_time, a.device FROM {readings} a JOIN {readings} b ON a.device = b.device",
            "SELECT event_time, a.device FROM {readings} a\nleft outer\njoin {others} b ON a.device = b.device",
            "SELECT a.event_time, a.device FROM {readings} a, {others} b",
            "SELECT event_time, device FROM {readings} WHERE value > (SELECT max(value) FROM {readings})",
        )
    ],
    (
        lambda: pipeline(slice_seconds=0),
        "slice_seconds=0 is no multiple of the window's slide (250 ms): a window would",
    ),
    (lambda: pipeline(slice_seconds=-60), "slice_seconds=-60 is no multiple"),
    (
        lambda: pipeline(slice_seconds=3, window=Window.sliding(size_ms=4000, slide_ms=2000)),
        "slice_seconds=3 is no multiple of the window's slide (2000 ms): a window would belong to two slices; choose",
    ),
    (
        lambda: pipeline(source=source(retention_hours=72)),
        "source 'readings' keeps records 72 h, less than the longest outage (72 h) plus allowed_lateness_seconds=60: "
        "raise retention_hours",
    ),
    (lambda: pipeline(output_kept_days=0), "pipeline 'per_device': output_kept_days=0 must be positive"),
    (lambda: pipeline(watermark_delay_seconds=-1), "is less than watermark_delay_seconds=-1"),
    (
        lambda: pipeline(allowed_lateness_seconds=4),
        "allowed_lateness_seconds=4 is less than watermark_delay_seconds=5: a slice would close before the stream is",
    ),
]


@pytest.mark.parametrize(("write", "reason"), REFUSED, ids=[reason[:60] for _, reason in REFUSED])
def test_refused_with_the_value_and_the_way_out(write: Callable[[], object], reason: str) -> None:
    with pytest.raises(RefusedDefinitionError) as refused:
        write()
    assert reason in str(refused.value)
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize(
    "write",
    [
        lambda: source(retention_hours=72),
        lambda: source(name="a" * 63),
        lambda: source(key=None),
        lambda: source(fields=(Field(name="event_time", type="BIGINT"), VALUE), event_time_field="event_time"),
        lambda: source(max_ahead_seconds=0),
        lambda: text_source(key="device"),
        lambda: text_source(event_time_header="ts"),
        lambda: Field(name="v", type="DECIMAL(38,38)"),
        lambda: Field(name="v", type="DECIMAL(1,0)"),
        lambda: measure(type="TIMESTAMP", sql="max(event_time)"),
        lambda: measure(sql="count(DISTINCT concat(value, ')('))", type="BIGINT"),
        lambda: measure(sql="sum(`float_value`)"),
        lambda: Check(column="total", minimum=1, maximum=1, severity=Severity.WARNING),
        lambda: pipeline(keys=()),
        lambda: pipeline(transform="SELECT event_time, device FROM {readings} WHERE `join` <> 'join {others}'"),
        lambda: pipeline(slice_seconds=1, window=Window.tumbling(size_ms=1000)),
        lambda: pipeline(slice_seconds=7, window=Window.session(gap_ms=30_000, longest_ms=3_600_000)),
        lambda: pipeline(watermark_delay_seconds=0, allowed_lateness_seconds=0),
        lambda: pipeline(source=source(retention_hours=73)),
    ],
)
def test_the_edge_of_what_is_refused_is_accepted(write: Callable[[], object]) -> None:
    write()


def test_definitions_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        source().name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Field("positional", "BIGINT")  # type: ignore[misc]


# -- Derived names --


def test_names_are_derived_once() -> None:
    assert source().events_table == "events/readings"
    assert (source().events_relation, source().quarantine_relation) == ("events_readings", "quarantine_readings")
    assert pipeline().live_table == "live/per_device"
    assert checkpoint_of("per_device") == "checkpoints/per_device"
    assert checkpoint_of(INGEST, "readings") == "checkpoints/ingest/readings"
    assert control_of("per_device") == "control/per_device"
    assert dag_id_of("per_device") == "stream_per_device"


def test_columns_are_the_key_and_the_fields_without_the_event_time() -> None:
    assert [field.name for field in source().columns] == ["device", "value"]
    assert [field.name for field in source(key=None).columns] == ["value"]
    assert [field.name for field in text_source().columns] == ["text"]
    assert pipeline(measures=(measure(), measure(name="most", sql="max(value)"))).value_columns == (
        "device",
        "total",
        "most",
    )


def test_topics_as_they_should_be() -> None:
    configs = (
        ("cleanup.policy", "delete"),
        ("message.timestamp.type", "LogAppendTime"),
        ("retention.ms", "604800000"),
    )
    assert source().topic == Topic(name="readings", partitions=3, configs=configs, moves_keys=True)
    assert not source(keyed=False).topic.moves_keys, "nothing is keyed: partitions may be added"
    configs = (
        ("cleanup.policy", "compact,delete"),
        ("message.timestamp.type", "LogAppendTime"),
        ("retention.ms", "172800000"),
    )
    wanted = Topic(name="devices", partitions=5, configs=configs, moves_keys=True)
    assert pipeline(source=source(partitions=5), output_kept_days=2).topic == wanted
    assert pipeline(output_kept_days=2).final_topic.configs == configs


@pytest.mark.parametrize(
    ("window", "kind", "reach_ms"),
    [
        (Window.tumbling(size_ms=1000), WindowKind.TUMBLING, 0),
        (Window.sliding(size_ms=1000, slide_ms=250), WindowKind.SLIDING, 750),
        (Window.session(gap_ms=30_000, longest_ms=3_600_000), WindowKind.SESSION, 3_600_000),
    ],
)
def test_how_far_a_window_reaches(window: Window, kind: WindowKind, reach_ms: int) -> None:
    assert (window.kind, window.reach_ms) == (kind, reach_ms)


# -- Fingerprint --

BASE = pipeline()
SAME: dict[str, Pipeline] = {
    "description": replace(BASE, description="Other."),
    "checks": replace(BASE, checks=(Check(column="total", minimum=0),)),
    "views": replace(BASE, views=(View(name="all_time", sql="SELECT 1"),)),
    "output": replace(BASE, output="elsewhere"),
    "output kept": replace(BASE, output_kept_days=1),
    "white space in the transform": replace(
        BASE, transform="\n  SELECT event_time,\n\tdevice, value\n  FROM {readings}\n"
    ),
    "white space in a measure": replace(BASE, measures=(measure(sql=" sum(value)  "),)),
    "partitions": replace(BASE, source=source(partitions=7)),
    "retention": replace(BASE, source=source(retention_hours=1000)),
    "outage": replace(BASE, source=source(longest_outage_hours=1)),
    "events kept": replace(BASE, source=source(events_kept_days=200)),
    "source's description": replace(BASE, source=source(description="Other.")),
}
OTHER: dict[str, Pipeline] = {
    "source": replace(BASE, source=source(name="other"), transform="SELECT event_time, device, value FROM {other}"),
    "format": replace(BASE, source=source(format=Format.CSV)),
    "field's type": replace(BASE, source=source(fields=(TS, Field(name="value", type="DECIMAL(18,5)")))),
    "field more": replace(BASE, source=source(fields=(TS, VALUE, TEXT))),
    "order of fields": replace(BASE, source=source(format=Format.JSON, fields=(VALUE, TS))),
    "event time": replace(
        BASE, source=source(fields=(TS, VALUE, Field(name="ts2", type="BIGINT")), event_time_field="ts2")
    ),
    "key of the record": replace(BASE, source=source(key="machine")),
    "identity": replace(BASE, source=source(identity=("ts",))),
    "horizon": replace(BASE, source=source(horizon_hours=24)),
    "ahead": replace(BASE, source=source(max_ahead_seconds=61)),
    "transform": replace(BASE, transform="SELECT event_time, device, value + 1 AS value FROM {readings}"),
    "keys": replace(BASE, keys=()),
    "window's size": replace(BASE, window=Window.sliding(size_ms=2000, slide_ms=250)),
    "window's slide": replace(BASE, window=Window.sliding(size_ms=1000, slide_ms=500)),
    "window's kind": replace(BASE, window=Window.session(gap_ms=250, longest_ms=1000)),
    "measure's name": replace(BASE, measures=(measure(name="sum_total"),)),
    "measure's SQL": replace(BASE, measures=(measure(sql="max(value)"),)),
    "measure's type": replace(BASE, measures=(measure(type="DECIMAL(30,6)"),)),
    "measure more": replace(BASE, measures=(measure(), measure(name="n", sql="count(*)"))),
    "slice": replace(BASE, slice_seconds=60),
    "watermark": replace(BASE, watermark_delay_seconds=6),
    "lateness": replace(BASE, allowed_lateness_seconds=61),
}


@pytest.mark.parametrize("what", SAME)
def test_the_fingerprint_stays_while_the_meaning_does(what: str) -> None:
    assert SAME[what].fingerprint == BASE.fingerprint


@pytest.mark.parametrize("what", OTHER)
def test_the_fingerprint_changes_with_the_meaning(what: str) -> None:
    assert OTHER[what].fingerprint != BASE.fingerprint


def test_no_two_meanings_share_a_fingerprint() -> None:
    fingerprints = [each.fingerprint for each in (BASE, *OTHER.values(), *PIPELINES.values())]
    assert len(set(fingerprints)) == len(fingerprints)
    assert all(len(each) == 12 and int(each, 16) >= 0 for each in fingerprints)


SPACES = st.text(" \t\n", min_size=1, max_size=4)


@given(spaces=st.lists(SPACES, min_size=8, max_size=8), literal=st.text(" a", max_size=4))
def test_white_space_counts_between_quotes_only(spaces: list[str], literal: str) -> None:
    head = ["SELECT", "event_time", "FROM", "{readings}", "WHERE", f"'{literal}'", "<>", "device"]
    spaced = "".join(space + word for space, word in zip(spaces, head, strict=True))
    wanted = replace(BASE, transform=" ".join(head))
    assert replace(BASE, transform=spaced).fingerprint == wanted.fingerprint
    changed = " ".join([*head[:5], f"'{literal} '", *head[6:]])
    assert replace(BASE, transform=changed).fingerprint != wanted.fingerprint


# -- The registry --


def test_no_topic_grows_without_end() -> None:
    """A compacted topic keeps a row of each window, and each window has keys of its own."""
    for topic in pipelines.topics():
        configs = dict(topic.configs)
        assert "delete" in configs["cleanup.policy"].split(","), topic.name
        assert int(configs["retention.ms"]) > 0, topic.name


def test_what_ships() -> None:
    assert list(SOURCES) == ["numbers", "lines", "clicks", "orders", "payments", "raw_data"]
    assert {"rolling_sum", "rolling_sum_sliding", "word_count"} <= set(PIPELINES)
    assert (INGEST, *PIPELINES) == STREAMS
    assert all(name == found.name for name, found in {**SOURCES, **PIPELINES}.items())
    assert all(SOURCES[found.source.name] is found.source for found in PIPELINES.values())


@pytest.mark.parametrize(
    "definitions",
    [
        (source(), source(description="Another one.")),
        (pipeline(), pipeline(output="other")),
        (pipeline(name=INGEST),),
        (source(name=INGEST),),
    ],
)
def test_a_name_is_given_once(definitions: tuple[Any, ...]) -> None:
    with pytest.raises(RefusedDefinitionError, match=f"the name '{definitions[-1].name}' is taken: rename one of the"):
        pipelines._by_name(*definitions)


def test_what_no_live_job_can_show_gets_no_dag() -> None:
    sessions = pipeline(window=Window.session(gap_ms=30_000, longest_ms=3_600_000))
    with pytest.raises(RefusedDefinitionError, match=r"'per_device' has session windows.*use Window.tumbling or"):
        pipelines._that_can_run(sessions)
    assert pipelines._that_can_run(pipeline()) == {"per_device": pipeline()}


def test_every_topic_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [topic.name for topic in pipelines.topics()]
    assert len(set(names)) == len(names) == len(SOURCES) + 2 * len(PIPELINES) + len([CLOCK])
    for output in ("readings", "devices"):
        monkeypatch.setattr(pipelines, "SOURCES", {"readings": source()})
        monkeypatch.setattr(pipelines, "PIPELINES", {"a": pipeline(), "b": pipeline(name="b", output=output)})
        with pytest.raises(RefusedDefinitionError, match=r"a topic is named twice in .*: rename one"):
            pipelines.topics()
