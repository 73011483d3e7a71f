"""Tables for people, in the logs of tasks."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def as_text(table: "Table", width: int) -> str:
    """A table as lines of text, without colours."""
    from rich.console import Console

    console = Console(width=width, color_system=None)
    with console.capture() as shown:
        console.print(table)
    return shown.get()
