"""Topics as code: bring Kafka's topics to their definitions. Plans first; refuses to lose data or to move keys."""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kafka import KafkaAdminClient
from kafka.admin import ConfigResource
from rich.table import Table
from rich.text import Text

from jobs.broker import kafka
from jobs.pipelines.layout import HOUR_MS
from jobs.pipelines.source import Topic
from jobs.refusal import Refusal

_MOST_REPLICAS = 3
_SEEN_WITHIN_SECONDS = 20
_FOREVER = "-1"
_POLICY = "cleanup.policy"


class Action(StrEnum):
    """The effect of a step on its topic."""

    CREATE = "create"
    GROW = "grow"
    ALIGN = "align"
    KEEP = "keep"
    REFUSE = "refuse"


@dataclass(frozen=True, kw_only=True)
class Actual:
    """A topic as Kafka has it; ``empty`` means that no partition holds a record."""

    partitions: int
    configs: Mapping[str, str]
    empty: bool


@dataclass(frozen=True, kw_only=True)
class Step:
    """One change of a topic, or none, with the reason; ``configs`` are those that the action ALIGN sets."""

    topic: Topic
    action: Action
    reason: str
    configs: tuple[tuple[str, str], ...] = ()

    def as_row(self) -> dict[str, str]:
        """The step in words."""
        return {"topic": self.topic.name, "action": self.action.value, "reason": self.reason}


def plan(desired: Iterable[Topic], actual: Mapping[str, Actual]) -> tuple[Step, ...]:
    """The steps from the actual topics to the desired ones: one or more for each desired topic."""
    return tuple(step for topic in desired for step in _steps(topic, actual.get(topic.name)))


def _steps(topic: Topic, actual: Actual | None) -> list[Step]:
    if actual is None:
        reason = f"is missing: {topic.partitions} partitions, {_listed(topic.configs)}"
        return [Step(topic=topic, action=Action.CREATE, reason=reason)]
    steps = [*_partition_steps(topic, actual), *_config_steps(topic, actual)]
    return steps or [Step(topic=topic, action=Action.KEEP, reason="matches its definition")]


def _partition_steps(topic: Topic, actual: Actual) -> Iterator[Step]:
    change = f"partitions {actual.partitions} → {topic.partitions}"
    accept = f"set partitions={actual.partitions} in its definition"
    if topic.partitions < actual.partitions:
        yield _refuse(topic, f"{change} would delete records: {accept}, or delete the topic by hand and run again")
    elif topic.partitions > actual.partitions and topic.moves_keys and not actual.empty:
        yield _refuse(
            topic,
            f"{change} would send keys to other partitions, away from their earlier records: {accept}, or run this "
            "again when the topic is empty",
        )
    elif topic.partitions > actual.partitions:
        yield Step(topic=topic, action=Action.GROW, reason=change)


def _config_steps(topic: Topic, actual: Actual) -> Iterator[Step]:
    changes = [
        (name, value) for name, value in topic.configs if _canonical(actual.configs.get(name, "")) != _canonical(value)
    ]
    losses = [_loss(name, actual.configs, value) for name, value in changes]
    if any(losses) and not actual.empty:
        yield from (_refuse(topic, loss) for loss in losses if loss)
    elif changes:
        reason = _listed((name, f"{actual.configs.get(name, 'unset')} → {value}") for name, value in changes)
        wanted = dict(topic.configs)
        if _begins_to_delete(actual.configs.get(_POLICY, ""), wanted.get(_POLICY, "")):
            days = int(wanted["retention.ms"]) / (24 * HOUR_MS)
            reason += f": messages that are older than {days:g} days will be deleted"
        yield Step(topic=topic, action=Action.ALIGN, reason=reason, configs=tuple(changes))


def _begins_to_delete(before: str, after: str) -> bool:
    """Whether a compacted topic gets a retention.

    Only output topics are compacted. The lake has their rows, so they lose nothing that cannot be read elsewhere.
    """
    return _canonical(before) == ["compact"] and _canonical(after) == ["compact", "delete"]


def _loss(name: str, configs: Mapping[str, str], after: str) -> str | None:
    """Why the change of a config would delete existing records; None if it would not, or if the loss is accepted."""
    before, policy = configs.get(name, ""), configs.get(_POLICY, "")
    change = f"{name} {before} → {after}"
    if name == _POLICY and not _begins_to_delete(before, after):
        gone = "all but the newest record of each key" if "compact" in after else "the newest records of idle keys"
        return f"{change} would delete {gone}: move the data to a new topic, or change the definition"
    # Kafka does not look at the retention of a topic that is only compacted.
    if name != "retention.ms" or "delete" not in policy or after == _FOREVER:
        return None
    if before == _FOREVER or int(after) < int(before):
        kept = "forever" if before == _FOREVER else f"{int(before) / HOUR_MS:g} h"
        return (
            f"{change} would delete records that are kept {kept} now: raise retention_hours of the source, or "
            "output_kept_days of the pipeline, in its definition, or lower the topic's retention.ms by hand first"
        )
    return None


def _refuse(topic: Topic, reason: str) -> Step:
    return Step(topic=topic, action=Action.REFUSE, reason=reason)


def _canonical(value: str) -> list[str]:
    """A list without its order, which has no meaning to Kafka."""
    return sorted(part.strip() for part in value.split(","))


def _listed(configs: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name}={value}" for name, value in configs)


def observe(client: KafkaAdminClient, desired: Iterable[Topic]) -> dict[str, Actual]:
    """The desired topics as Kafka has them; a missing topic is absent."""
    states = kafka.states(client, [topic.name for topic in desired])
    resources = [ConfigResource("topic", name) for name in states]
    configs = client.describe_configs(resources, config_filter="all").get("topic", {}) if resources else {}
    # The client hides a refusal of the broker, but every topic has configs, so a topic without any was refused.
    if hidden := sorted(name for name in states if not configs.get(name)):
        raise Refusal(
            f"Kafka does not show the configs of {', '.join(hidden)}: let its user DESCRIBE_CONFIGS, as "
            "docs/kafka-security.md says"
        )
    return {
        name: Actual(
            partitions=state.partitions,
            configs={key: config["value"] or "" for key, config in configs[name].items()},
            empty=state.earliest == state.latest,
        )
        for name, state in states.items()
    }


def survey(client: KafkaAdminClient, desired: Collection[Topic]) -> tuple[Step, ...]:
    """The plan for Kafka as it is now."""
    return plan(desired, observe(client, desired))


def apply(client: KafkaAdminClient, steps: Collection[Step]) -> None:
    """Do all steps, or none if one is refused. Returns when Kafka shows the topics as desired."""
    require_no_refusal(steps)
    _create(client, [step.topic for step in steps if step.action is Action.CREATE])
    growth = {step.topic.name: step.topic.partitions for step in steps if step.action is Action.GROW}
    if growth:
        client.create_partitions(growth)
    _align(client, [step for step in steps if step.action is Action.ALIGN])
    _wait_until_seen(client, [step.topic for step in steps])


def require_no_refusal(steps: Iterable[Step]) -> None:
    """Refuse the whole plan if one step is refused: half a plan leads to a state that no definition describes."""
    refused = [f"{step.topic.name}: {step.reason}" for step in steps if step.action is Action.REFUSE]
    if refused:
        raise Refusal("nothing was applied. " + "; ".join(refused))


def _create(client: KafkaAdminClient, topics: list[Topic]) -> None:
    if not topics:
        return
    replicas = min(_MOST_REPLICAS, len(client.describe_cluster()["brokers"]))
    client.create_topics(
        {
            topic.name: {
                "num_partitions": topic.partitions,
                "replication_factor": replicas,
                "configs": dict(topic.configs),
            }
            for topic in topics
        },
        wait_for_metadata=True,
    )


def _align(client: KafkaAdminClient, steps: list[Step]) -> None:
    if not steps:
        return
    resources = [ConfigResource("topic", step.topic.name, dict(step.configs)) for step in steps]
    answers = client.alter_configs(resources, incremental=True)["topic"]
    failed = {name: answer for name, answer in answers.items() if answer != "OK"}
    if failed:
        raise Refusal(f"Kafka refused these configs: {failed}; the other steps are done, run the command again")


def _wait_until_seen(client: KafkaAdminClient, topics: list[Topic]) -> None:
    """Wait until Kafka shows the changes: a broker answers before all brokers have them."""
    deadline = time.monotonic() + _SEEN_WITHIN_SECONDS
    while left := [step.as_row() for step in survey(client, topics) if step.action is not Action.KEEP]:
        if time.monotonic() > deadline:
            raise Refusal(
                f"the changes were made, but after {_SEEN_WITHIN_SECONDS} s Kafka does not show all of them: {left}; "
                "run the command again"
            )
        time.sleep(0.1)


def table(steps: Iterable[Step]) -> Table:
    """The plan as people read it."""
    colours = {Action.REFUSE: "red", Action.KEEP: "dim"}
    shown = Table("topic", "action", "reason")
    for step in steps:
        shown.add_row(*map(Text, step.as_row().values()), style=colours.get(step.action, "green"))
    return shown


def markdown(steps: Iterable[Step], longest: int) -> str:
    """The plan as a short text: refused steps first, unchanged topics last, then the count of lines left out."""
    todo = sorted(steps, key=lambda step: (step.action is Action.KEEP, step.action is not Action.REFUSE))
    text = f"Plan: {_counted(todo)}\n\n| topic | action | reason |\n|---|---|---|\n"
    for shown, step in enumerate(todo):
        line = "| " + " | ".join(step.as_row().values()) + " |\n"
        left = f"\n… and {len(todo) - shown} more in the log."
        if len(text) + len(line) + len(left) > longest:
            return text + left
        text += line
    return text


def _counted(steps: Iterable[Step]) -> str:
    return ", ".join(f"{count} {action}" for action, count in Counter(step.action for step in steps).items())
