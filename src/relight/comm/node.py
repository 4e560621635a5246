"""The identity of this machine, as its processes see it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from pathlib import Path

from relight.settings.environment import environment


def this_node() -> bytes:
    """Return eight bytes that processes share if they can reach each other's local sockets.

    They are a hash of host name, boot, network namespace, and ``RELIGHT_NODE``, which divides one machine into several
    nodes.
    """
    parts = [socket.gethostname(), environment().node]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return hashlib.sha256("\0".join(parts).encode()).digest()[:8]
