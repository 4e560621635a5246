"""The first process of a client machine: load the kernel's NFS client, set up the network, and run commands from TCP.

The machine is Linux itself, run as a program (Debian: user-mode-linux): a kernel with its own caches, that can be killed like a machine.
Its root is the host's, read only; only what it mounts itself can be written to. ``nfs_lab`` is its other end.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading

PORT = 7000
_LIBC = ctypes.CDLL(None, use_errno=True)
_FINIT_MODULE, _POWER_OFF = 313, 0x4321FEDC
_MODULES = ("nfsv4", "nfsv3")


def load_modules() -> None:
    """The NFS client and what it needs, in the order the kernel's own list has it."""
    base = f"/usr/lib/uml/modules/{os.uname().release}"
    needs = {}
    with open(f"{base}/modules.dep", encoding="utf-8") as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            needs[name] = rest.split()
    loaded = set()
    for wanted in _MODULES:
        path = next(name for name in needs if name.endswith(f"/{wanted}.ko"))
        for name in reversed([path, *needs[path]]):
            if name not in loaded:
                loaded.add(name)
                fd = os.open(f"{base}/{name}", os.O_RDONLY)
                if _LIBC.syscall(_FINIT_MODULE, fd, b"", 0):
                    raise OSError(ctypes.get_errno(), f"loading {name}")
                os.close(fd)


def _call(*command: str) -> None:
    subprocess.run(command, check=True)


def bring_up(address: str) -> None:
    """Mount file systems, load modules, and configure the network."""
    for kind, where in (("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/mnt")):
        _call("mount", "-t", kind, kind, where)
    for folder in ("/dev/shm", "/mnt/tmp"):
        os.makedirs(folder, exist_ok=True)
    _call("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    load_modules()
    # NFSv4 servers identify clients by it: two of one name undo each other
    socket.sethostname("client-" + address.replace(".", "-"))
    _call("ip", "addr", "add", f"{address}/24", "dev", "vec0")
    for name in ("lo", "vec0"):
        _call("ip", "link", "set", name, "up")


def serve(connection: socket.socket) -> None:
    """Serve one request: a command to run, with its output streamed back, or a signal for a running command."""
    with connection, connection.makefile("rb") as lines:
        asked = json.loads(lines.readline())
        if "signal" in asked:
            try:
                os.killpg(asked["pid"], asked["signal"])
            except ProcessLookupError:
                pass
            connection.sendall(b"done\n")
            return
        try:
            child = subprocess.Popen(
                asked["argv"],
                stdin=connection,
                stdout=connection,
                stderr=connection,
                env={**os.environ, **asked["env"]},
                cwd=asked["cwd"],
                start_new_session=True,
            )
        except OSError as error:
            connection.sendall(f"0\n{error}\n\0{127}".encode())
            return
        connection.sendall(f"{child.pid}\n".encode())
        result = child.wait()
        connection.sendall(f"\0{result}".encode())


def main() -> None:
    """Serve commands until the machine is switched off."""
    os.environ.update(
        PATH="/usr/sbin:/usr/bin:/sbin:/bin", TMPDIR="/mnt/tmp", HOME="/mnt/tmp", PYTHONDONTWRITEBYTECODE="1"
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    bring_up(sys.argv[1])
    with socket.create_server(("", PORT)) as listening:
        print("ready", flush=True)
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    try:
        main()
    finally:
        sys.stdout.flush()
        _LIBC.reboot(_POWER_OFF)
