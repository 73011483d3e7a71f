"""What a task's log says, as a person reads it."""

import pytest

from jobs.connectors.airflow_api import _line

MEMORY = {"exc_type": "MemoryError", "exc_value": "no memory", "frames": []}
LINES = {
    "text alone": ("Running command", "Running command"),
    "empty text": ("", ""),
    "an event": ({"event": "Task started", "level": "info", "timestamp": "2026-01-01T00:00:00Z"}, "Task started"),
    "an event without errors": ({"event": "Done", "error_detail": []}, "Done"),
    "an event whose errors are none": ({"event": "Done", "error_detail": None}, "Done"),
    "an error": ({"event": "Task failed", "error_detail": [MEMORY]}, "Task failed: MemoryError: no memory"),
    "an error and its cause": (
        {"event": "Task failed", "error_detail": [MEMORY, {"exc_type": "OSError", "exc_value": "[Errno 28] full"}]},
        "Task failed: MemoryError: no memory: OSError: [Errno 28] full",
    ),
}


@pytest.mark.parametrize(("line", "told"), LINES.values(), ids=LINES)
def test_a_line_tells_the_event_and_the_words_of_its_errors(line: object, told: str) -> None:
    assert _line(line) == told
