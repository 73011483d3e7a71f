"""How the stack is shown to people and to programs."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from local.platform.stack import PartState, Stack


def addresses(stack: Stack) -> Table:
    """The addresses of the stack: Airflow, Kafka, the lake and the logs."""
    settings = stack.settings
    table = Table.grid(padding=(0, 2))
    table.add_row("Airflow", f"{settings.airflow_url}  login {settings.airflow_user} / {stack.airflow.password()}")
    table.add_row("Kafka", stack.broker.bootstrap)
    table.add_row("Lake", str(settings.jobs.lake_root))
    table.add_row("Logs", str(settings.home / "logs"))
    return table


def status_table(parts: Sequence[PartState]) -> Table:
    """One row per part, and the sum of the memory."""
    table = Table("part", "state", "pid", "up for")
    table.add_column("processes", justify="right")
    table.add_column("memory (PSS)", justify="right")
    for part in parts:
        age = str(datetime.now(UTC) - part.started).split(".")[0] if part.started else ""
        table.add_row(
            part.name, part.state, str(part.pid or ""), age, str(part.processes), _megabytes(part.memory_bytes)
        )
    table.add_section()
    processes = sum(part.processes for part in parts)
    table.add_row("all", "", "", "", str(processes), _megabytes(sum(part.memory_bytes for part in parts)))
    return table


def as_rows(parts: Sequence[PartState]) -> list[dict[str, Any]]:
    """The parts as rows, for programs."""
    return [vars(part) | {"started": part.started and part.started.isoformat()} for part in parts]


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
