"""How a task fails when its work is refused."""

from collections.abc import Iterator
from contextlib import contextmanager

from airflow.sdk.exceptions import AirflowFailException


@contextmanager
def fails_for_good_on(*errors: type[Exception]) -> Iterator[None]:
    """Fail the task with the sentence of such an error, and do not try it again: each try would be refused again."""
    try:
        yield
    except errors as refusal:
        raise AirflowFailException(str(refusal)) from refusal
