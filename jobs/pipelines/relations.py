"""The relations that people query, each defined once, as SQL that DuckDB and Spark both read.

A base relation is a table of the lake under the name that `table_name` gives it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jobs.pipelines import PIPELINES, SOURCES
from jobs.pipelines.layout import BATCHES_SLICE, INCIDENTS
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.rules import RefusedDefinitionError
from jobs.pipelines.source import Source

_INCIDENTS = "lake_incidents"
_OF_A_SLICE = (
    "slice",
    "slice_start",
    "slice_end",
    "state",
    "version",
    "rows",
    "events",
    "late",
    "as_of",
    "run",
    "reason",
)
_OF_THE_LEDGER = (*_OF_A_SLICE, "fingerprint", "boundary", "offsets", "events_version", "checksum", "docs", "commit")
_RECORD = ("topic", "partition", "offset", "arrival_time", "event_time")


@dataclass(frozen=True, kw_only=True)
class Relation:
    """A query with a name, a description, and the tables of the lake or other relations that it reads."""

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
    for pipeline in PIPELINES.values():
        paths += [pipeline.live_table, pipeline.final_table, pipeline.ledger_table]
        paths += [pipeline.drift_table, pipeline.balance_table]
    return {table_name(path): path for path in paths} | {_INCIDENTS: INCIDENTS}


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
    found["incidents"] = Relation(
        name="incidents",
        sql=f"SELECT * FROM {_INCIDENTS}",
        reads=(_INCIDENTS,),
        description="Problems that operators must hear of: since when, until when, and whether a message was sent.",
    )
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
    name = pipeline.name
    current = Relation(
        name=name,
        sql=_current_windows(pipeline, quote),
        # A query opens these tables in this order, live first. The live job prunes a slice only after the slice is
        # final. So a slice that is no longer in the live table is in the final one.
        reads=(table_name(pipeline.live_table), table_name(pipeline.final_table)),
        description=pipeline.description,
    )
    ledger = Relation(
        name=f"ledger_{name}",
        sql=f"SELECT {_list(_OF_THE_LEDGER, quote)} FROM {table_name(pipeline.ledger_table)}",
        reads=(table_name(pipeline.ledger_table),),
        description=f"Every state of every slice of {name}, with run, boundary, versions, counts and reasons.",
    )
    slices = Relation(
        name=f"slices_{name}",
        sql=_slices(pipeline, quote),
        reads=(ledger.name,),
        description=f"The present state of each slice of {name}; `outdated`: final by another definition.",
    )
    drift = _relation(f"drift_{name}", pipeline.drift_table, f"Where live and final windows of {name} differ, and why.")
    balance = _relation(f"balance_{name}", pipeline.balance_table, f"Differences of {name} in totals, by slice.")
    views = (
        Relation(name=view.name, sql=view.sql, reads=(name,), description=f"View over {name}.")
        for view in pipeline.views
    )
    return (current, ledger, slices, drift, balance, *views)


def _relation(name: str, table: str, description: str) -> Relation:
    base = table_name(table)
    return Relation(name=name, sql=f"SELECT * FROM {base}", reads=(base,), description=description)


def _current_windows(pipeline: Pipeline, quote: str) -> str:
    """The final rows of every final slice; for all other slices, the newest live row of each window and key.

    In the final table only headers have a ``final_slice``, the name of their slice. Rows of windows have a null there.
    """
    window, final = ("window_start", "window_end"), table_name(pipeline.final_table)
    columns = _list([*window, *pipeline.value_columns], quote)
    return f"""SELECT {columns}, 'final' AS finality, version, as_of
FROM {final}
WHERE final_slice IS NULL
UNION ALL
SELECT {columns}, 'live' AS finality, CAST(0 AS BIGINT) AS version, as_of
FROM (
  SELECT *, row_number() OVER (
    PARTITION BY {_list([*window, *pipeline.keys], quote)} ORDER BY epoch DESC, batch DESC
  ) AS newest
  FROM {table_name(pipeline.live_table)} AS live
  WHERE slice <> '{BATCHES_SLICE}'
    AND NOT EXISTS (SELECT 1 FROM {final} AS final WHERE final.final_slice = live.slice)
) AS updates
WHERE newest = 1"""


def _slices(pipeline: Pipeline, quote: str) -> str:
    return f"""SELECT {_list(_OF_A_SLICE, quote)},
  state = 'final' AND fingerprint <> '{pipeline.fingerprint}' AS outdated
FROM (
  SELECT *, row_number() OVER (PARTITION BY slice ORDER BY {quote}commit{quote} DESC) AS newest
  FROM ledger_{pipeline.name}
) AS lines
WHERE newest = 1"""


def _list(names: list[str] | tuple[str, ...], quote: str) -> str:
    return ", ".join(f"{quote}{name}{quote}" for name in names)
