"""Writes made-up records, which resemble real traffic, into source topics.

There are series of numbers, lines of text, clicks, orders and their payments, device readings. You set the shares of
late, duplicate and corrupt records, and see how the platform handles them.

**Params.** The form explains each one. The same seed gives the same records.

**Example.** `sources=["numbers"], rate=1000, seconds=60`: 60,000 numbers within a minute. By hand:
`tideline generate numbers --rate 1000 --count 60000 --seed 1`.

**Recovery.** Trigger it again: each run adds records and overwrites nothing. Airflow does not retry it, because a retry
would write its records twice.

**Triage.**
- *Kafka does not answer*: the broker is down or the connection `tideline_kafka` is wrong.
- *topic … does not exist*: run `provision_topics` first.
- To stop it, mark the task as failed.
"""

from airflow.sdk import DAG, Param

from jobs.pipelines import SOURCES
from tideline_airflow.operators.traffic import GenerateTrafficOperator
from tideline_airflow.scheduling.defaults import DAG_ARGS, TAG
from tideline_airflow.scheduling.params import several_of, share, values_of

PARAMS = {
    "sources": several_of(
        SOURCES,
        ["numbers", "lines"],
        title="Sources",
        description="The topics to write to. All are written at the same time.",
        minItems=1,
    ),
    "rate": Param(
        200, type="integer", title="Rate", description="Records per second for each source.", minimum=1, maximum=100_000
    ),
    "seconds": Param(
        300, type="integer", title="Seconds", description="How long to send records.", minimum=1, maximum=86_400
    ),
    "late": share(0.01, title="Late", description="The share of records that arrive late, such as 0.01."),
    "duplicate": share(0.01, title="Duplicate", description="The share of records that are sent twice."),
    "corrupt": share(0.001, title="Corrupt", description="The share of records that cannot be parsed."),
    "seed": Param(1, type="integer", title="Seed", description="The same seed gives the same records.", minimum=0),
}

with DAG(
    dag_id="generate_demo_traffic",
    description="Writes made-up records into source topics.",
    doc_md=__doc__,
    tags=[TAG, "demo"],
    schedule=None,
    params=PARAMS,
    **DAG_ARGS,
) as dag:
    GenerateTrafficOperator(task_id="generate", retries=0, **values_of(dag))
