"""Scripts that start without importing torch again: each is forked from one process that has imported it.

A fork is a process like any other: own session, descriptors and signals. It saves two seconds of a processor for each start.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

PREPARED = ("torch", "torch.utils.data", "relight", "relight.checkpointer", "relight.capture", "relight.agent")
"""What is imported before the forks."""
_MESSAGE_MAX = 1 << 16


class Warm:
    """A process that has imported torch and Relight, and forks scripts. Use it as a context manager, from one thread."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "relight.testing.warm", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()
        self._ended: dict[int, int] = {}

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._socket.close()
        self._process.wait()

    def start(self, arguments: Sequence[str], stdout: int, stderr: int) -> int:
        """Fork a leader of a new session that runs the script ``arguments[0]``. Return its process id."""
        self._socket.sendmsg(
            [json.dumps(list(arguments)).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [stdout, stderr]))]
        )
        while True:
            found: dict[str, int] = json.loads(self._socket.recv(_MESSAGE_MAX))
            if "started" in found:
                return found["started"]
            self._ended[found["pid"]] = found["code"]

    def wait(self, pid: int, timeout_s: float) -> int | None:
        """Return the exit code of a script, negative for a signal. None if it has not ended in time."""
        while pid not in self._ended:
            if not select.select([self._socket], [], [], timeout_s)[0]:
                return None
            found: dict[str, int] = json.loads(self._socket.recv(_MESSAGE_MAX))
            self._ended[found["pid"]] = found["code"]
        return self._ended.pop(pid)


def _serve(channel: socket.socket) -> list[str] | None:
    """Fork until the other side closes. Return the arguments in a fork; None in the first process, at its end."""
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([channel.fileno(), *running], [], [])
        for pidfd in [one for one in ready if one in running]:
            pid = running.pop(pidfd)
            os.close(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(OSError):
                channel.send(json.dumps({"pid": pid, "code": code}).encode())
        if channel.fileno() not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(channel, _MESSAGE_MAX, 2)
        if not data:
            return None
        pid = os.fork()
        if pid == 0:
            channel.close()
            for pidfd in running:
                os.close(pidfd)
            os.setsid()
            for target, fd in enumerate(fds, 1):
                os.dup2(fd, target)
                os.close(fd)
            arguments: list[str] = json.loads(data)
            return arguments
        for fd in fds:
            os.close(fd)
        running[os.pidfd_open(pid)] = pid
        channel.send(json.dumps({"started": pid}).encode())


def main() -> None:
    """Import, then fork what is asked for."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    for name in PREPARED:
        importlib.import_module(name)
    arguments = _serve(channel)
    if arguments is None:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
