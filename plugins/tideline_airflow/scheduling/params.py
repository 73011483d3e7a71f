"""Fields of forms that several DAGs have, and how the values of a form reach the task.

A function returns a new field each time, since Airflow writes the value of a run into it.
"""

from collections.abc import Iterable
from typing import Any

from airflow.sdk import DAG, Param

from jobs.pipelines import PIPELINES

# A template: the user who triggered the run.
TRIGGERED_BY = "{{ dag_run.triggering_user_name or 'an unknown user' }}"


def slice_of_pipeline() -> dict[str, Param]:
    """The fields `pipeline` and `slice`, which name one slice."""
    return {
        "pipeline": Param(
            next(iter(PIPELINES)),
            type="string",
            title="Pipeline",
            description="The pipeline of the slice.",
            enum=list(PIPELINES),
        ),
        "slice": Param(
            "20260131T120000Z",
            type="string",
            title="Slice",
            description="The name of the slice: the time in UTC at which it begins, such as 20260131T120000Z.",
            pattern=r"^\d{8}T\d{6}Z$",
        ),
    }


def reason() -> Param:
    """Why slices are changed. The task refuses a change without a reason."""
    text = "Why the slice is changed. The ledger records the reason. A dry run needs none."
    return Param(None, type=["null", "string"], title="Reason", description=text)


def apply() -> Param:
    """Whether the DAG changes something, or only shows what it would change."""
    text = "Make the change. If this is off, the run only shows what it would change."
    return Param(False, type="boolean", title="Apply", description=text)


def several_of(names: Iterable[str], default: Iterable[str] = (), **field: Any) -> Param:
    """A choice of one or more names."""
    known = list(names)
    items = {"type": "string", "enum": known}
    return Param(list(default), type="array", items=items, examples=known, uniqueItems=True, **field)


def share(default: float, **field: Any) -> Param:
    """A share of all records, from 0 to 1."""
    return Param(default, type="number", minimum=0, maximum=1, **field)


def values_of(dag: DAG) -> dict[str, Any]:
    """Every field of a DAG's form, as an argument for an operator. The values keep their types."""
    return {name: dag.param(name) for name in dag.params}
