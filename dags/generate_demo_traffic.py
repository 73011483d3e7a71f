"""Writes records into source topics, shaped like real traffic.

There are series of numbers, lines of text, clicks, orders and their payments, device readings. You set the shares of
late, duplicate and corrupt records, and see how the platform handles them.

**Params.** The form explains each one. The same seed gives the same records.

**Example.** `sources=["numbers"], rate=1000, seconds=60`: 60,000 numbers within a minute. By hand:
`tideline generate numbers --rate 1000 --count 60000 --seed 1`.

**Recovery.** Trigger it again: each run adds records and overwrites nothing. Airflow does not retry it, because a retry
would write its records twice.

**Triage.**
- *Kafka does not answer*: the broker is down or the connection `tideline_kafka` is wrong.
- *unknown topic*: run `provision_topics` first.
- To stop it, mark the task as failed.
"""

from airflow.sdk import DAG, Param

from jobs.pipelines import SOURCES
from tideline_airflow.operators.traffic import GenerateTrafficOperator
from tideline_airflow.scheduling.defaults import ALERTS, DEFAULT_ARGS, TAG

PARAMS = {
    "sources": Param(
        ["numbers", "lines"],
        type="array",
        title="Sources",
        description="Which topics to write to, all at once.",
        items={"type": "string", "enum": list(SOURCES)},
        examples=list(SOURCES),
        minItems=1,
        uniqueItems=True,
    ),
    "rate": Param(
        200, type="integer", title="Rate", description="Records per second and source.", minimum=1, maximum=100_000
    ),
    "seconds": Param(
        300, type="integer", title="Seconds", description="How long to keep on.", minimum=1, maximum=86_400
    ),
    "late": Param(0.01, type="number", title="Late", description="Share that arrives late.", minimum=0, maximum=1),
    "duplicate": Param(
        0.01, type="number", title="Duplicate", description="Share that is sent twice.", minimum=0, maximum=1
    ),
    "corrupt": Param(
        0.001, type="number", title="Corrupt", description="Share that cannot be parsed.", minimum=0, maximum=1
    ),
    "seed": Param(1, type="integer", title="Seed", description="The same seed gives the same records.", minimum=0),
}

with DAG(
    dag_id="generate_demo_traffic",
    description="Write demo records into source topics.",
    doc_md=__doc__,
    default_args=DEFAULT_ARGS,
    tags=[TAG, "demo"],
    schedule=None,
    params=PARAMS,
    **ALERTS,
) as dag:
    GenerateTrafficOperator(task_id="generate", retries=0, **{name: dag.param(name) for name in PARAMS})
