"""The relations that people query, each defined once, as SQL that DuckDB and Spark both read.

A base relation is a table of the lake under the name that `table_name` gives it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jobs.pipelines import PIPELINES, SOURCES
from jobs.pipelines.spec import BATCHES_SLICE, Pipeline, RefusedDefinitionError, Source

_RECORD = ("topic", "partition", "offset", "arrival_time", "event_time")


@dataclass(frozen=True, kw_only=True)
class Relation:
    """A name, its query, what it reads (tables of the lake or other relations) and what it is for."""

    name: str
    sql: str
    reads: tuple[str, ...]
    description: str


def table_name(table: str) -> str:
    """The base relation of a table: `live/rolling_sum` is `lake_live_rolling_sum`."""
    return "lake_" + table.replace("/", "_")


def tables() -> dict[str, str]:
    """Base relation -> its table below the lake's root."""
    paths = [source.events_table for source in SOURCES.values()]
    paths += [pipeline.live_table for pipeline in PIPELINES.values()]
    return {table_name(path): path for path in paths}


def relations(quote: str = '"') -> Mapping[str, Relation]:
    """Every relation by name; ``quote`` is the engine's sign around a name (Spark's is a backtick)."""
    found: dict[str, Relation] = {}
    for source in SOURCES.values():
        for relation in _of_source(source, quote):
            found[relation.name] = relation
    for pipeline in PIPELINES.values():
        for relation in _of_pipeline(pipeline, quote):
            if relation.name in found:
                raise RefusedDefinitionError(f"the relation {relation.name!r} is defined twice: rename one")
            found[relation.name] = relation
    return found


def _of_source(source: Source, quote: str) -> tuple[Relation, ...]:
    base = table_name(source.events_table)
    names = [*_RECORD, *(field.name for field in source.columns)]
    events, rejected = _list(names, quote), _list([*_RECORD[:4], "reason", "raw", "raw_key", "raw_headers"], quote)
    return (
        Relation(
            name=source.events_relation,
            sql=f"SELECT {events} FROM {base} WHERE reason IS NULL",
            reads=(base,),
            description=f"Accepted records of {source.name}.",
        ),
        Relation(
            name=source.quarantine_relation,
            sql=f"SELECT {rejected} FROM {base} WHERE reason IS NOT NULL",
            reads=(base,),
            description=f"Rejected records of {source.name}, with their reason and bytes.",
        ),
    )


def _of_pipeline(pipeline: Pipeline, quote: str) -> tuple[Relation, ...]:
    current = Relation(
        name=pipeline.name,
        sql=_current_windows(pipeline, quote),
        reads=(table_name(pipeline.live_table),),
        description=pipeline.description,
    )
    views = (
        Relation(name=view.name, sql=view.sql, reads=(pipeline.name,), description=f"View over {pipeline.name}.")
        for view in pipeline.views
    )
    return (current, *views)


def _current_windows(pipeline: Pipeline, quote: str) -> str:
    """The newest live row of each window and key: by epoch, then batch."""
    window = ("window_start", "window_end")
    columns = _list([*window, *pipeline.value_columns], quote)
    return f"""SELECT {columns}, 'live' AS finality, 0 AS version, as_of
FROM (
  SELECT *, row_number() OVER (
    PARTITION BY {_list([*window, *pipeline.keys], quote)} ORDER BY epoch DESC, batch DESC
  ) AS newest
  FROM {table_name(pipeline.live_table)}
  WHERE slice <> '{BATCHES_SLICE}'
) AS updates
WHERE newest = 1"""


def _list(names: list[str] | tuple[str, ...], quote: str) -> str:
    return ", ".join(f"{quote}{name}{quote}" for name in names)
