"""Parses the DAG folder in a process of its own and prints the result as JSON."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import DAG  # noqa: F401 - what every DAG file may count on having been imported

DAGS = Path(__file__).parents[2] / "dags"


def events(callbacks: Any) -> list[str]:
    """The events of the notifiers among callbacks."""
    given = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    return [str(callback.event) for callback in given if type(callback).__name__ == "IncidentNotifier"]


def main() -> None:
    seconds, found, errors = {}, {}, {}
    for file in sorted(DAGS.glob("*.py")):
        # CPU time instead of wall time, so that other processes on the machine do not count.
        began = time.process_time()
        bag = DagBag(dag_folder=str(file))
        seconds[file.name] = time.process_time() - began
        errors.update({str(path): str(error) for path, error in bag.import_errors.items()})
        for dag in bag.dags.values():
            found[dag.dag_id] = {
                "file": file.name,
                "doc": dag.doc_md,
                "description": dag.description,
                "tags": sorted(dag.tags),
                "owners": sorted({task.owner for task in dag.tasks}),
                "retries": [task.retries for task in dag.tasks],
                "tasks": [task.task_id for task in dag.tasks],
                "pools": [[task.pool, type(task.weight_rule).__name__] for task in dag.tasks],
                "params": dag.params.dump(),
                "explained": {name: [each.schema.get("title"), each.description] for name, each in dag.params.items()},
                "renders_to_python": dag.render_template_as_native_obj,
                "max_active_runs": dag.max_active_runs,
                "deadlines": len(dag.deadline or ()),
                "has_start_date": dag.start_date is not None,
                "is_paused_upon_creation": dag.is_paused_upon_creation,
                "failed_tasks_tell": [events(task.on_failure_callback) for task in dag.tasks],
                "run_tells": [events(dag.on_failure_callback), events(dag.on_success_callback)],
            }
    unwanted = ("pyspark", "great_expectations", "kafka", "pandas", "apprise", "aiosmtplib")
    heavy = sorted(name for name in unwanted if name in sys.modules)
    Path(sys.argv[1]).write_text(json.dumps({"dags": found, "errors": errors, "seconds": seconds, "heavy": heavy}))


main()
