"""The plan as a table of cases: the wanted topics, the topics in Kafka, and the resulting steps."""

import dataclasses

import pytest
from rich.console import Console

from jobs import pipelines
from jobs.broker.topics import Action, Actual, Step, markdown, plan, require_no_refusal, table
from jobs.pipelines.source import Topic
from jobs.refusal import Refusal

KEYED = Topic(
    name="keyed",
    partitions=3,
    configs=(("cleanup.policy", "delete"), ("message.timestamp.type", "LogAppendTime"), ("retention.ms", "7200000")),
    moves_keys=True,
)
FREE = dataclasses.replace(KEYED, name="free", moves_keys=False)
# As an output topic: it keeps the newest record of each key, for two hours.
OUTPUT = dataclasses.replace(
    KEYED, name="output", configs=(("cleanup.policy", "compact,delete"), ("retention.ms", "7200000"))
)
COMPACTED = Topic(name="compacted", partitions=3, configs=(("cleanup.policy", "compact"),), moves_keys=True)


def has(topic: Topic, *, partitions: int = 3, empty: bool = False, **configs: str) -> Actual:
    """The topic as it should be, except for the given settings (`_` for `.`)."""
    named = {name.replace("_", "."): value for name, value in configs.items()}
    return Actual(partitions=partitions, configs={"unclean": "1", **dict(topic.configs), **named}, empty=empty)


CASES = [
    ("missing", KEYED, None, [(Action.CREATE, "3 partitions")]),
    ("as it should be", KEYED, has(KEYED), [(Action.KEEP, "matches its definition")]),
    ("more partitions, no keys", FREE, has(FREE, partitions=2), [(Action.GROW, "2 → 3")]),
    ("more partitions, keys", KEYED, has(KEYED, partitions=2), [(Action.REFUSE, "set partitions=2")]),
    ("more partitions, keys, no records", KEYED, has(KEYED, partitions=2, empty=True), [(Action.GROW, "2 → 3")]),
    ("fewer partitions", FREE, has(FREE, partitions=4), [(Action.REFUSE, "4 → 3 would delete")]),
    ("fewer partitions, no records", FREE, has(FREE, partitions=4, empty=True), [(Action.REFUSE, "4 → 3")]),
    (
        "arrival time",
        KEYED,
        has(KEYED, message_timestamp_type="CreateTime"),
        [(Action.ALIGN, "message.timestamp.type=CreateTime → LogAppendTime")],
    ),
    ("longer retention", KEYED, has(KEYED, retention_ms="3600000"), [(Action.ALIGN, "3600000 → 7200000")]),
    ("shorter retention", KEYED, has(KEYED, retention_ms="9000000"), [(Action.REFUSE, "kept 2.5 h now")]),
    ("shorter retention, no records", KEYED, has(KEYED, retention_ms="9000000", empty=True), [(Action.ALIGN, "→")]),
    ("kept forever", KEYED, has(KEYED, retention_ms="-1"), [(Action.REFUSE, "kept forever now")]),
    ("to compaction", COMPACTED, has(COMPACTED, cleanup_policy="delete"), [(Action.REFUSE, "newest record of each")]),
    ("to deletion", KEYED, has(KEYED, cleanup_policy="compact"), [(Action.REFUSE, "would delete")]),
    ("from both to deletion", KEYED, has(KEYED, cleanup_policy="compact,delete"), [(Action.REFUSE, "would delete")]),
    (
        "a retention for a compacted topic",
        OUTPUT,
        has(OUTPUT, cleanup_policy="compact", retention_ms="3600000"),
        [
            (
                Action.ALIGN,
                "cleanup.policy=compact → compact,delete, retention.ms=3600000 → 7200000: messages that are older than "
                "0.0833333 days will be deleted",
            )
        ],
    ),
    (
        "a shorter retention for a topic that is only compacted, where it means nothing yet",
        OUTPUT,
        has(OUTPUT, cleanup_policy="compact", retention_ms="-1"),
        [(Action.ALIGN, "retention.ms=-1 → 7200000: messages that are older")],
    ),
    (
        "a shorter retention, compacted and deleted",
        OUTPUT,
        has(OUTPUT, retention_ms="9000000"),
        [(Action.REFUSE, "raise retention_hours of the source, or output_kept_days of the pipeline")],
    ),
    (
        "retention and compaction",
        OUTPUT,
        has(OUTPUT, cleanup_policy="delete"),
        [(Action.REFUSE, "newest record of each")],
    ),
    (
        "compaction, no records",
        COMPACTED,
        has(COMPACTED, cleanup_policy="delete", empty=True),
        [(Action.ALIGN, "delete → compact")],
    ),
    (
        "grow and align",
        FREE,
        has(FREE, partitions=1, message_timestamp_type="CreateTime"),
        [(Action.GROW, "1 → 3"), (Action.ALIGN, "CreateTime")],
    ),
    (
        "a refused config takes the harmless ones with it",
        KEYED,
        has(KEYED, retention_ms="-1", message_timestamp_type="CreateTime"),
        [(Action.REFUSE, "forever")],
    ),
    (
        "two refusals",
        KEYED,
        has(KEYED, partitions=9, cleanup_policy="compact"),
        [(Action.REFUSE, "9 → 3"), (Action.REFUSE, "cleanup.policy")],
    ),
]


@pytest.mark.parametrize(("topic", "actual", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_plan(topic: Topic, actual: Actual | None, expected: list[tuple[Action, str]]) -> None:
    steps = plan([topic], {} if actual is None else {topic.name: actual})
    assert [step.action for step in steps] == [action for action, _ in expected]
    for step, (_, part) in zip(steps, expected, strict=True):
        assert part in step.reason
        assert step.topic == topic


def test_lists_have_no_order() -> None:
    both = dataclasses.replace(COMPACTED, configs=(("cleanup.policy", "compact,delete"),))
    assert [step.action for step in plan([both], {both.name: has(both, cleanup_policy="delete, compact")})] == [
        Action.KEEP
    ]


def test_an_align_sets_what_differs_and_nothing_else() -> None:
    (step,) = plan([KEYED], {"keyed": has(KEYED, retention_ms="3600000")})
    assert step.configs == (("retention.ms", "7200000"),)


def test_the_definitions_are_content_with_themselves() -> None:
    wanted = pipelines.topics()
    actual = {topic.name: has(topic, partitions=topic.partitions) for topic in wanted}
    assert {step.action for step in plan(wanted, actual)} == {Action.KEEP}


def test_output_topics_of_an_older_release_get_their_retention() -> None:
    """It made topics that are compacted only. The plan shows the change, and sets all of it at once."""
    wanted = [topic for each in pipelines.PIPELINES.values() for topic in (each.topic, each.final_topic)]
    older = {"cleanup_policy": "compact", "message_timestamp_type": "CreateTime", "retention_ms": "604800000"}
    steps = plan(wanted, {topic.name: has(topic, partitions=topic.partitions, **older) for topic in wanted})
    require_no_refusal(steps)
    assert [(step.topic, step.action, step.configs) for step in steps] == [
        (topic, Action.ALIGN, topic.configs) for topic in wanted
    ]
    assert {step.reason for step in steps} == {
        "cleanup.policy=compact → compact,delete, message.timestamp.type=CreateTime → LogAppendTime, "
        "retention.ms=604800000 → 7776000000: messages that are older than 90 days will be deleted"
    }


def test_topics_that_nobody_defines_are_left_alone() -> None:
    assert plan([], {"foreign": has(KEYED)}) == ()


def test_one_refusal_refuses_the_plan() -> None:
    steps = plan([FREE, KEYED], {"keyed": has(KEYED, partitions=1)})
    with pytest.raises(Refusal, match=r"nothing was applied\. keyed: partitions 1 → 3"):
        require_no_refusal(steps)
    require_no_refusal(steps[:1])


def step(name: str, action: Action) -> Step:
    return Step(topic=dataclasses.replace(KEYED, name=name), action=action, reason="[because]")


def test_the_table_shows_every_step_as_it_is_written() -> None:
    console = Console(width=80, color_system=None)
    with console.capture() as shown:
        console.print(table([step("one", Action.CREATE), step("two", Action.REFUSE)]))
    assert "│ one   │ create │ [because] │" in shown.get()
    assert "│ two   │ refuse │ [because] │" in shown.get()


def test_the_short_text_puts_refusals_first_and_says_what_it_leaves_out() -> None:
    steps = [step("kept", Action.KEEP), step("made", Action.CREATE), step("bad", Action.REFUSE)]
    whole = markdown(steps, 1000)
    assert whole.startswith("Plan: 1 refuse, 1 create, 1 keep\n")
    assert whole.index("bad") < whole.index("made") < whole.index("kept")
    short = markdown(steps, 140)
    assert len(short) <= 140
    assert short.endswith("… and 2 more in the log.")
