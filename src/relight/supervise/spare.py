"""Spares: processes that have already done the slow part of a rank's start, and wait to become a rank (warm standby).

``relight.supervise.spare DESCRIPTOR MODULES DIRECTORY [ARGS…]`` imports MODULES. The script's DIRECTORY is on the path
for those outside torch and Relight. ARGS are those of ``relight.supervise.worker``; with them it also runs the script
up to ``relight.standby()``. Then it waits for one message on the socket DESCRIPTOR: arguments, environment, and
descriptors for its output. With these it continues as the rank. If the supervisor is gone, it ends.
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
from typing import IO, Any, NamedTuple

from relight.arena.memory import available_bytes
from relight.comm.children import child_command
from relight.heartbeat.standby import wait_with
from relight.observe import emit

_MESSAGE_MAX = 4 << 20
_OUTPUT_MAX = 1 << 20
_MOST_EXPENDABLE = 1000
WORKER = "relight.supervise.worker"
_INSTALLED = ("torch", "relight")
USUAL = ("torch", "torch.distributed", "relight.checkpointer")


class _Spare(NamedTuple):
    process: subprocess.Popen[bytes]
    channel: socket.socket
    output: int
    """Descriptor of its output while it runs the script ahead; −1: it does not run the script."""


class Spares:
    """The spares of one node."""

    def __init__(self, count: int, modules: Sequence[str], directory: str = "") -> None:
        """``directory``: the first one on the script's ``sys.path``. Modules that the settings name may be in it."""
        self._count, self._modules, self._directory = count, tuple(modules), directory
        self._worker = child_command(WORKER, unbuffered=True)
        self._waiting: list[_Spare] = []
        self._taken: list[_Spare] = []
        self._arguments: tuple[str, ...] = ()
        self._goes_ahead = True

    def fill(self, ahead_bytes: int = 0) -> None:
        """Start one spare if one is missing. Call it again for the next one, so that spares do not all import at once.

        ``ahead_bytes``: memory that a process needs to run the script up to ``relight.standby()``; 0: the script does
        not call it.
        """
        for spare in [spare for spare in self._waiting if spare.process.poll() is not None]:
            self._waiting.remove(spare)
            self._lost(spare)
        for spare in [spare for spare in self._taken if spare.process.poll() is not None]:
            self._taken.remove(spare)
            spare.channel.close()
        if len(self._waiting) >= self._count or any(not _is_ready(spare.channel) for spare in self._waiting):
            return
        needed = 2 * ahead_bytes * (self._count - len(self._waiting))
        ahead = self._goes_ahead and 0 < needed <= (available_bytes() or 0)
        self._waiting.append(self._start(self._arguments if ahead else ()))

    def take(
        self, arguments: Sequence[str], environment: Mapping[str, str], out: IO[Any] | None, errors: IO[Any] | None
    ) -> subprocess.Popen[bytes] | None:
        """Turn a spare into a rank with this command line, environment and output. Return its process.

        Return None if no spare is ready, or if the command line is not that of a worker.
        """
        count = len(self._worker)
        if list(arguments[:count]) != self._worker:
            return None
        self._arguments = tuple(arguments[count:])
        message = json.dumps(
            {"arguments": list(arguments[count:]), "environment": dict(environment), "directory": os.getcwd()}
        ).encode()
        while self._waiting and len(message) <= _MESSAGE_MAX:
            spare = self._waiting.pop(0)
            with contextlib.suppress(OSError):
                streams = [(out or sys.stdout).fileno(), (errors or sys.stderr).fileno()]
                spare.channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(message))
                socket.send_fds(spare.channel, [message], streams)
                _close(spare.output)
                # keep the channel open: closing it before the spare reads loses the message
                self._taken.append(spare._replace(output=-1))
                return spare.process
            self._lost(spare)
        return None

    def close(self) -> None:
        """Kill all spares that wait."""
        for spare in self._taken:
            spare.channel.close()
        for spare in self._waiting:
            spare.channel.close()
            _close(spare.output)
            _end(spare.process)
        self._waiting = []

    def _start(self, arguments: tuple[str, ...]) -> _Spare:
        """Start a spare.

        If it runs the script ahead, its output goes to memory: it belongs to the rank that the spare may become.
        """
        own_end, spare_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output = os.memfd_create("relight-spare") if arguments else -1
        own_arguments = (str(spare_end.fileno()), ",".join(self._modules), self._directory, *arguments)
        command = child_command("relight.supervise.spare", *own_arguments, unbuffered=True)
        out = output if arguments else None
        with spare_end:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=[spare_end.fileno()],
                start_new_session=True,
            )
        return _Spare(process, own_end, output)

    def _lost(self, spare: _Spare) -> None:
        """Report a spare that ended.

        If the script ended it, later spares only import: ranks then start without running ahead.
        """
        spare.channel.close()
        _end(spare.process)
        if spare.output >= 0:
            words = (
                os.pread(spare.output, _OUTPUT_MAX, max(0, os.fstat(spare.output).st_size - 2000))
                .decode(errors="replace")
                .strip()
            )
            _close(spare.output)
            # SIGKILL comes from the kernel for lack of memory, or from another process
            if spare.process.returncode != -signal.SIGKILL:
                self._goes_ahead = False
            last = words.splitlines()[-1] if words else f"exit code {spare.process.returncode}"
            emit(
                "spare.failed",
                f"a spare ended before relight.standby(): {last}",
                said=words,
                code=spare.process.returncode,
            )


def _is_ready(channel: socket.socket) -> bool:
    """Return whether a spare has reported that it is ready to become a rank."""
    try:
        return bool(channel.recv(16, socket.MSG_DONTWAIT | socket.MSG_PEEK))
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


def main() -> None:
    """Import the modules, run the script ahead if there is one, wait for the message, and become the rank."""
    channel, modules, directory, arguments = (
        socket.socket(fileno=int(sys.argv[1])),
        sys.argv[2].split(","),
        sys.argv[3],
        sys.argv[4:],
    )
    for name in filter(None, modules):
        try:
            _preload(name, directory)
        except Exception as error:  # noqa: BLE001 (if the script needs the module, its own error is more precise)
            print(f"relight: a spare could not import {name}: {error}", file=sys.stderr)
    from relight.supervise import worker

    if arguments:
        old_score = _be_expendable()
        wait_with(lambda: _take_over(channel, old_score))
    else:
        arguments = _become(channel)
    sys.argv = [str(Path(worker.__file__)), *arguments]
    worker.main()


def _preload(name: str, directory: str) -> None:
    """Import a module. For one that the settings name, search ``directory`` first, and restore the path afterwards."""
    if name.partition(".")[0] in _INSTALLED or not directory:
        import_module(name)
        return
    sys.path.insert(0, directory)
    try:
        import_module(name)
    finally:
        sys.path.remove(directory)


def _take_over(channel: socket.socket, expendable: str) -> None:
    """Become the rank, within ``relight.standby()``. Copy the output that was written ahead to the rank's output."""
    from relight.supervise import stacks

    output = os.dup(1)
    _become(channel)
    text = os.pread(output, _OUTPUT_MAX, 0)
    os.close(output)
    while text:
        text = text[os.write(1, text) :]
    stacks.offer()
    if expendable:
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(expendable)


def _be_expendable() -> str:
    """Raise this process's OOM score until it is a rank, so that the kernel kills it before the trainers.

    Return the score before.
    """
    path = Path("/proc/self/oom_score_adj")
    try:
        before = path.read_text()
        path.write_text(str(_MOST_EXPENDABLE))
        return before
    except OSError:
        return ""


def _become(channel: socket.socket) -> list[str]:
    """Wait for the message, then set environment, directory and output from it. Return the arguments of the worker."""
    with channel:
        # the supervisor has sent the message and closed its end: the message can still be read
        with contextlib.suppress(OSError):
            channel.send(b"ready")
        data, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE_MAX + 1, 2)
    if not data or len(descriptors) != 2:
        os._exit(0)  # this spare becomes no rank, so the script's exit handlers must not run
    message = json.loads(data)
    for target, descriptor in zip((1, 2), descriptors, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(message["directory"])
    os.environ.clear()
    os.environ.update(message["environment"])
    return list(message["arguments"])


if __name__ == "__main__":
    main()
