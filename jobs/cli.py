"""`tideline` and `python -m jobs`: thin commands, one function each. The work is done in the modules they call."""

import logging
import sys

import typer
from rich.console import Console

from jobs.pipelines.spec import RefusedDefinitionError
from jobs.refusal import Refusal

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
errors = Console(stderr=True)


@app.callback()
def _configure_logging() -> None:
    """Streaming numbers you can trust: every row says whether it is live or final."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("kafka").setLevel(logging.WARNING)
    logging.getLogger("py4j").setLevel(logging.WARNING)


def main() -> None:
    """Run the command; a refusal is a sentence on stderr and exit code 1, never a trace."""
    try:
        app()
    except (Refusal, RefusedDefinitionError) as refusal:
        errors.print(f"[red]tideline:[/red] {refusal}", highlight=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
