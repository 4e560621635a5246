"""A port that no connection is given."""

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
    """One that nobody listens at now, and that the kernel gives to no connection: it stays free for whoever means to listen there later.
    Where there is none such, one that the kernel gives."""
    below = min(LAST, _given_from() - 1)
    for _ in range(TRIES if below >= FIRST else 0):
        port = random.randint(FIRST, below)
        if _is_free(port):
            return port
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _given_from() -> int:
    """The least port that a connection may be given. Where that is not told, it is Linux' own."""
    try:
        return int(_GIVEN.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768


def _is_free(port: int) -> bool:
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104 as torch's store does
        try:
            with socket.socket(family) as one:
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                one.bind((address, port))
        except OSError as error:
            if family == socket.AF_INET or error.errno == errno.EADDRINUSE:  # a machine without IPv6 says something else
                return False
    return True
