"""The parts of `docs/` that follow from the definitions: `python -m local.pages` writes them, a test checks them."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from jobs.pipelines import INGEST, PIPELINES, SOURCES, topics
from jobs.pipelines.layout import dag_id_of
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.relations import relations
from jobs.pipelines.source import Field, Source
from jobs.pipelines.window import Window, WindowKind
from jobs.settings import PROJECT
from local.kafka_rights import rights

PAGES = PROJECT / "docs"
_PART = re.compile(r"(<!-- begin: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(text: str) -> str:
    """The text of a page, with every generated part made anew from the code."""
    return _PART.sub(lambda part: part[1] + _PARTS[part[2]]() + part[3], text)


def write(folder: Path = PAGES) -> None:
    """Bring all pages up to date."""
    for page in sorted(folder.glob("*.md")):
        page.write_text(rendered(page.read_text()))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _sources() -> str:
    head = ("source", "what", "value", "event time", "Kafka key", "identity")
    return _table(head, (_source(source) for source in SOURCES.values()))


def _source(source: Source) -> tuple[str, ...]:
    time = f"field `{source.event_time_field}`" if source.event_time_field else f"header `{source.event_time_header}`"
    return (
        f"`{source.name}`",
        source.description,
        f"{source.format.upper()}: {_typed(source.fields)}",
        time if source.event_time_field else f"{time}, else arrival",
        f"column `{source.key}`" if source.key else "not used",
        _listed(source.identity) or "none, so repeated records count",
    )


def _typed(fields: Iterable[Field]) -> str:
    return ", ".join(f"`{field.name}` {field.type}" for field in fields)


def _pipelines() -> str:
    head = ("pipeline", "what", "from → to", "window", "keys", "measures", "views")
    return _table(head, (_pipeline(pipeline) for pipeline in PIPELINES.values()))


def _pipeline(pipeline: Pipeline) -> tuple[str, ...]:
    return (
        f"`{pipeline.name}`",
        pipeline.description,
        f"`{pipeline.source.name}` → `{pipeline.output}`",
        _window(pipeline.window),
        _listed(pipeline.keys),
        ", ".join(f"`{measure.name}` = `{measure.sql}` ({measure.type})" for measure in pipeline.measures),
        _listed(view.name for view in pipeline.views) or "none",
    )


def _window(window: Window) -> str:
    if window.kind is WindowKind.SESSION:
        return f"session, gap {window.slide_ms:,} ms, at most {window.size_ms:,} ms"
    every = f" every {window.slide_ms:,} ms" if window.kind is WindowKind.SLIDING else ""
    return f"{window.kind}, {window.size_ms:,} ms{every}"


def _topics() -> str:
    rows = (
        (
            f"`{topic.name}`",
            str(topic.partitions),
            _listed(f"{name}={value}" for name, value in topic.configs),
        )
        for topic in topics()
    )
    return _table(("topic", "partitions", "configs"), rows)


def _relations() -> str:
    return _table(("relation", "what"), ((f"`{found.name}`", found.description) for found in relations().values()))


def _streams() -> str:
    jobs = {
        INGEST: "Lands every source topic in the lake.",
        **{one.name: one.description for one in PIPELINES.values()},
    }
    rows = ((f"`{dag_id_of(job)}`", f"`{_by_hand(job)}`", what) for job, what in jobs.items())
    return _table(("DAG", "by hand", "what"), rows)


def _by_hand(job: str) -> str:
    return "python -m jobs ingest" if job == INGEST else f"python -m jobs live {job}"


def _rights() -> str:
    rows = ((f"`{right.who}`", ", ".join(right.operations), _listed(right.topics)) for right in rights())
    return _table(("who", "needs", "on the topics"), rows)


_PARTS: dict[str, Callable[[], str]] = {
    "sources": _sources,
    "pipelines": _pipelines,
    "topics": _topics,
    "relations": _relations,
    "streams": _streams,
    "rights": _rights,
}

if __name__ == "__main__":
    write()
