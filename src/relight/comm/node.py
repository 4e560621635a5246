"""The identity of this machine, as its processes see it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
from pathlib import Path

from relight.comm.local_sockets import LocalDirectory
from relight.settings.environment import environment


def this_node() -> bytes:
    """Return eight bytes that processes share if they can reach each other's local sockets.

    They are a hash of host name, boot, network namespace, the directory of the sockets, and ``RELIGHT_NODE``, which
    divides one machine into several nodes. Containers that share host name and network may each have their own ``/tmp``,
    and thus another directory. A process without a directory shares the bytes with no other process.
    """
    parts = [socket.gethostname(), environment().node]
    try:
        with LocalDirectory() as directory:
            status = os.fstat(directory.fd)
        parts.append(f"{status.st_dev} {status.st_ino}")
    except OSError:
        parts.append(secrets.token_hex(16))
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return hashlib.sha256("\0".join(parts).encode()).digest()[:8]
