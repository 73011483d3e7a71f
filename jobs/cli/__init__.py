"""`tideline` and `python -m jobs`: one short function per command. The work is done in the modules that it calls."""

import logging
import sys

import typer

from jobs.cli import drivers, measure, platform, query, slices, streams, topics, traffic
from jobs.cli.shared import say
from jobs.pipelines.rules import RefusedDefinitionError
from jobs.refusal import Refusal
from jobs.settings import environment

_COMMANDS = {
    "Platform": (
        platform.up,
        platform.down,
        platform.status,
        platform.doctor,
        platform.demo,
        platform.jars,
        platform.clean,
    ),
    "Streams": (drivers.ingest, drivers.live, streams.reset, streams.advise, traffic.generate),
    "Slices and queries": (slices.plan, slices.restate, slices.rollback, query.query),
    "Measurements": (measure.bench, measure.soak),
}
# Airflow's tasks submit these commands for their runs, so `--help` does not list them.
_SUBMITTED = (drivers.recompute, drivers.audit, drivers.account)
_JOBS = [[name] for name in ("ingest", "live", "recompute", "audit", "account")]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for panel, commands in _COMMANDS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
app.add_typer(topics.app, name="topics", rich_help_panel="Platform")
app.add_typer(streams.app, name="streams", rich_help_panel="Streams")
for submitted in _SUBMITTED:
    app.command(hidden=True)(submitted)


@app.callback()
def _configure_logging() -> None:
    """Streaming numbers you can trust: every row says whether it is live or final."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)


def main() -> None:
    """Run the command; a refusal is a sentence on stderr and exit code 1, never a trace."""
    try:
        app()
    except (Refusal, RefusedDefinitionError) as refusal:
        _refuse(str(refusal))
    except Exception as error:
        root = environment().get("LAKE_ROOT") or ""
        # Airflow does not try a batch job again that has printed a refusal, but the bucket may answer later. So a job
        # raises the error, and its log has the whole trace.
        if not root.startswith(("s3://", "s3a://")) or sys.argv[1:2] in _JOBS:
            raise
        from jobs.storage.bucket import cannot_be_used, reason_of

        if (reason := reason_of(error)) is None:
            raise
        _refuse(cannot_be_used(root, reason))


def _refuse(sentence: str) -> None:
    say(sentence)
    sys.exit(1)
