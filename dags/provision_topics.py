"""Makes Kafka's topics match the definitions in `jobs/pipelines`.

It creates missing topics. It adds partitions if no key would move to another one. It aligns configs (arrival time,
retention, compaction). It is safe to run at any time; a second run changes nothing.

**Tasks.** `plan` shows the necessary steps, as a table in its log and as its XCom `plan`. `apply` plans again and takes
these steps. If one step is refused, no step is taken.

**Connection.** `tideline_kafka`, of the type *Kafka (Tideline)*.

**Example.** Trigger it after you changed a definition or pointed the connection at another cluster. By hand:
`tideline topics plan`, then `tideline topics apply`.

**Recovery.** Clear the failed task, or trigger a new run: it starts from the topics that Kafka has by then.

**Triage.**
- *would send keys to other partitions*: the topic holds keyed records. Keep the number of partitions, or move to a
  new topic.
- *would delete records*: the definition keeps less than the topic does. Change the definition, or the topic by hand.
- *Kafka does not answer*: the broker is down or the connection is wrong. The message names the address and the cause.
"""

from airflow.sdk import DAG

from tideline_airflow.operators.topics import ApplyTopicsOperator, PlanTopicsOperator
from tideline_airflow.scheduling.defaults import DAG_ARGS, TAG

with DAG(
    dag_id="provision_topics",
    description="Creates, grows and aligns the Kafka topics, after showing the plan.",
    doc_md=__doc__,
    tags=[TAG, "kafka"],
    schedule=None,
    max_active_runs=1,
    **DAG_ARGS,
):
    PlanTopicsOperator(task_id="plan") >> ApplyTopicsOperator(task_id="apply")
