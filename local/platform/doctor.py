"""The checks before a start. Each check returns its finding, or refuses with a text that says what to do."""

import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import psutil

from jobs.pipelines.layout import control_of
from jobs.refusal import Refusal
from jobs.storage.documents import Documents
from jobs.storage.folders import Folder
from local.jars import fetch as jars
from local.jars.java import find_java
from local.platform.ports import holder, is_free
from local.platform.process import marked
from local.platform.settings import StackSettings

_LEAST_FREE_BYTES = 3_000_000_000
_PYTHONS = ((3, 11), (3, 13))


def checks(settings: StackSettings) -> dict[str, Callable[[], str]]:
    """Every check by name."""
    return {
        "Python": _python,
        "Spark": _spark,
        "Java": _java,
        "disk": lambda: _disk(settings.home),
        "ports": lambda: _ports(settings),
        "lake": lambda: _lake(settings.jobs.lake_root),
        "jars": lambda: _jars(settings),
    }


def preflight(settings: StackSettings) -> None:
    """Run the checks, so that a start does not fail later. Jars are not checked, since a start fetches them."""
    for name, check in checks(settings).items():
        if name != "jars":
            check()


def _python() -> str:
    found = sys.version_info[:2]
    if not _PYTHONS[0] <= found <= _PYTHONS[1]:
        raise Refusal(f"Python {found[0]}.{found[1]}: use 3.11, 3.12 or 3.13, then `make install`")
    return f"{found[0]}.{found[1]}"


def _spark() -> str:
    """Compare versions: both packages write the same folder, and the jars show which one was installed last."""
    cores = sorted(jars.pyspark_folder().glob("jars/spark-core_2.13-*.jar"))
    jar = cores[0].stem.removeprefix("spark-core_2.13-") if len(cores) == 1 else f"{len(cores)} spark-core jars"
    full, client = version("pyspark"), version("pyspark-client")
    if not full == client == jar:
        raise Refusal(
            f"pyspark={full}, pyspark-client={client}, its jars={jar} differ: delete .venv, then `make install`"
        )
    return full


def _java() -> str:
    java = find_java()
    return f"{java.major} ({java.home})"


def _disk(home: Path) -> str:
    place = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if free < _LEAST_FREE_BYTES:
        raise Refusal(
            f"{place} has {free / 1e9:.1f} GB left, {_LEAST_FREE_BYTES / 1e9:.0f} GB are needed: "
            "free some space, or set TIDELINE_HOME to a folder on a larger disk"
        )
    return f"{free / 1e9:.0f} GB free"


def _lake(root: Folder) -> str:
    """Check that a bucket exists. A missing folder is fine, since the first job makes it."""
    if isinstance(root, Path):
        if root.exists():
            Documents.at(root / control_of("_doctor")).require_exclusive_create()
        return str(root)
    from jobs.storage.bucket import cannot_be_used, reason_of

    try:
        Documents.at(root / control_of("_doctor")).require_exclusive_create()
    except Exception as error:
        if (reason := reason_of(error)) is None:
            raise
        raise Refusal(cannot_be_used(root, reason)) from error
    return str(root)


def _ports(settings: StackSettings) -> str:
    wanted = settings.ports()
    if len(set(wanted.values())) < len(wanted):
        raise Refusal(f"two of {wanted} are the same port: change one of them")
    own = _own_ports(settings.home)
    for name, port in wanted.items():
        if port not in own and not is_free(port):
            raise Refusal(f"port {port} is taken by {holder(port)}: end it, or set {name} to another port")
    held = [port for port in wanted.values() if port in own]
    return f"{', '.join(map(str, wanted.values()))} ({'used by this platform' if held else 'free'})"


def _own_ports(home: Path) -> set[int]:
    ports: set[int] = set()
    for process in marked(home):
        with suppress(psutil.Error):
            ports |= {at.laddr.port for at in process.net_connections("tcp") if at.status == psutil.CONN_LISTEN}
    return ports


def _jars(settings: StackSettings) -> str:
    jars.verify(settings.jobs.jars)
    return f"{len(jars.declared())} with the declared checksums ({settings.jobs.jars})"
