"""Processes that have imported what takes long, and wait to become a rank: ``python -m relight.supervise.spare DESCRIPTOR [MODULE…]``.

One is told, once, by a socket: arguments, environment, where its output goes. From then on it is as if it had been started so.
If nobody is left who could tell it, it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any

_WORKER = ("-u", "-m", "relight.supervise.worker")
_MESSAGE_MAX = 4 << 20
USUAL = ("torch", "torch.distributed", "relight.checkpointer")


class Spares:
    """Those of one node."""

    def __init__(self, count: int, modules: Sequence[str]) -> None:
        self._count, self._modules = count, tuple(modules)
        self._waiting: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        self._told: list[tuple[subprocess.Popen[bytes], socket.socket]] = []

    def fill(self) -> None:
        """Start one that is missing, if any is: to be called again for the next, so that they do not all import at once."""
        self._waiting = [one for one in self._waiting if one[0].poll() is None]
        for process, channel in self._told:
            if process.poll() is not None:
                channel.close()
        if len(self._waiting) >= self._count or any(not _is_ready(channel) for _, channel in self._waiting):
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-u", "-m", "relight.supervise.spare", str(theirs.fileno()), *self._modules]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True)
        self._waiting.append((process, ours))

    def take(
        self, arguments: Sequence[str], environment: Mapping[str, str], out: IO[Any] | None, errors: IO[Any] | None
    ) -> subprocess.Popen[bytes] | None:
        """One of them as a process with these; None if there is none, or they are not for a spare."""
        if tuple(arguments[:4]) != (sys.executable, *_WORKER):
            return None
        message = json.dumps({"arguments": list(arguments[4:]), "environment": dict(environment), "directory": os.getcwd()}).encode()
        while self._waiting and len(message) <= _MESSAGE_MAX:
            process, channel = self._waiting.pop(0)
            with contextlib.suppress(OSError):
                streams = [(out or sys.stdout).fileno(), (errors or sys.stderr).fileno()]
                channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(message))
                socket.send_fds(channel, [message], streams)
                self._told.append((process, channel))  # closed before all was read, it would take the message with it
                return process
            channel.close()
            _end(process)
        return None

    def close(self) -> None:
        """None is left."""
        for _, channel in self._told:
            channel.close()
        for process, channel in self._waiting:
            channel.close()
            _end(process)
        self._waiting = []


def _is_ready(channel: socket.socket) -> bool:
    """Whether it has said that it has imported all."""
    try:
        return bool(channel.recv(16, socket.MSG_DONTWAIT | socket.MSG_PEEK))
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    """Import, wait, become."""
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        for name in sys.argv[2:]:
            try:
                import_module(name)
            except Exception as error:  # noqa: BLE001 (the script says so better, if it needs it)
                print(f"relight: a spare could not import {name}: {error}", file=sys.stderr)
        with contextlib.suppress(OSError):  # told already: what was said can be read all the same
            channel.send(b"ready")
        data, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE_MAX + 1, 2)
    if not data or len(descriptors) != 2:
        raise SystemExit(0)
    told = json.loads(data)
    for target, descriptor in zip((1, 2), descriptors, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(told["directory"])
    os.environ.clear()
    os.environ.update(told["environment"])
    from relight.supervise import worker

    sys.argv = [str(Path(worker.__file__)), *told["arguments"]]
    worker.main()


if __name__ == "__main__":
    main()
