"""Ports of this machine: find a free port, and the process that holds a taken one."""

import socket
from contextlib import suppress

import psutil

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A port on which no process listens."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def free_ports(count: int) -> list[int]:
    """Several different free ports."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)


def is_free(port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen()
        except OSError:
            return False
        return True


def answers(port: int) -> bool:
    """Whether a process listens there."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((LOOPBACK, port)) == 0


def holder(port: int) -> str:
    """The process that listens there, as far as this user may see it."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                return _told(connection.pid)
    return "another process"


def _told(pid: int | None) -> str:
    with suppress(psutil.Error):
        if pid:
            return f"process {pid} ({psutil.Process(pid).name()})"
    return "a process of another user"
