"""Find a port that the kernel does not assign to connections."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

FIRST, LAST = 20_000, 29_399
"""Below what Linux gives to connections (32768 on), Kubernetes to services (30000 on) and torchrun to itself (29400, 29500)."""
TRIES = 100
_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a port without a listener that the kernel assigns to no connection, so that it stays free until a process
    listens there.

    If there is none, return a port that the kernel assigns.
    """
    last = min(LAST, _given_from() - 1)
    for _ in range(TRIES if last >= FIRST else 0):
        port = random.randint(FIRST, last)
        if _is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _given_from() -> int:
    """Return the lowest port that the kernel may assign to a connection; Linux' default if that is unknown."""
    try:
        return int(_GIVEN.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768


def _is_free(port: int) -> bool:
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104 as torch's store does
        try:
            with socket.socket(family) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError as error:
            if family == socket.AF_INET or error.errno == errno.EADDRINUSE:  # without IPv6 the error is another one
                return False
    return True
