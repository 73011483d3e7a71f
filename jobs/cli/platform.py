"""The embedded platform: up, down, status, doctor, demo, jars, clean."""

import json
from typing import Annotated

import typer
from rich.console import Console

from jobs.cli.shared import Format, Output, embedded_stack, errors
from jobs.refusal import Refusal


def up() -> None:
    """Start the platform: broker and Airflow. Parts that have ended or hang are started again."""
    from local.platform.report import addresses
    from local.steps import steps

    stack = embedded_stack()
    with steps(errors, "starting") as report:
        stack.up(report)
    Console().print(addresses(stack))


def down() -> None:
    """Stop the platform and everything it started; data stays."""
    from local.steps import steps

    with steps(errors, "stopping") as report:
        killed = embedded_stack().down(report)
    print(f"stopped; {killed} processes had to be killed" if killed else "stopped")


def status(output: Format = Output.TABLE) -> None:
    """Show the parts of the platform, their health and memory; exit code 1 if a part is not healthy."""
    from local.platform.report import as_rows, status_table

    parts = embedded_stack().status()
    if output is Output.JSON:
        print(json.dumps(as_rows(parts)))
    else:
        Console().print(status_table(parts))
    if not all(part.good for part in parts):
        raise typer.Exit(1)


def doctor() -> None:
    """Check the environment: Python, Spark, Java, disk, ports, lake, jars; exit code 1 if something is wrong."""
    from local.platform.doctor import checks
    from local.platform.settings import StackSettings

    wrong = 0
    for name, check in checks(StackSettings.from_env()).items():
        try:
            print(f"ok    {name}: {check()}")
        except Refusal as refusal:
            wrong += 1
            print(f"WRONG {name}: {refusal}")
    if wrong:
        raise typer.Exit(1)


def demo(
    broken: Annotated[
        bool, typer.Option("--break", help="Then send impossible readings, and show how they are blocked.")
    ] = False,
) -> None:
    """Start the platform, send made-up records, and show how live windows become final. The platform stays up."""
    from local.demo import mad_sensor as demo_break
    from local.demo import run as shows

    shows.run(embedded_stack(), Console())
    if broken:
        demo_break.run(embedded_stack(), Console())


def jars(
    verify: Annotated[bool, typer.Option("--verify", help="Only check what is there; fetch nothing.")] = False,
) -> None:
    """Fetch the jars that Spark and the broker need, once, and check their checksums."""
    from local.jars import classes
    from local.jars import fetch as declared
    from local.platform.settings import StackSettings
    from local.steps import steps

    settings = StackSettings.from_env()
    folder = settings.jobs.jars
    if verify:
        declared.verify(folder)
    else:
        with steps(errors, "preparing") as report:
            report("checks of the jars", "about a second")
            declared.fetch(folder, mirror=settings.maven_url, report=report)
            classes.prepare(folder, report=report)
    print(f"{len(declared.declared())} jars in {folder}, all with the right checksum")


def clean(
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
) -> None:
    """Delete the platform's data: lake, topics, Airflow's database, logs. Jars stay. Refused while it runs."""
    stack = embedded_stack()
    if not yes:
        typer.confirm(f"Delete lake, topics, Airflow's database and logs below {stack.settings.home}?", abort=True)
    for folder in stack.clean():
        print(f"deleted {folder}")
