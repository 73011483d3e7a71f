"""What all DAGs have in common."""

from datetime import timedelta
from typing import Any

OWNER = "tideline"
TAG = "tideline"
DEFAULT_ARGS: dict[str, Any] = {
    "owner": OWNER,
    "retries": 2,
    "retry_delay": timedelta(seconds=10),
    "retry_exponential_backoff": 2.0,
    "max_retry_delay": timedelta(minutes=5),
}
