"""Processes that have done ahead what takes long, and wait to become a rank.

``relight.supervise.spare DESCRIPTOR MODULES DIRECTORY [ARGS…]``: MODULES are imported, those that are not torch's or Relight's with the
script's DIRECTORY on the path. With ARGS, those of ``relight.supervise.worker``, the script is run too, until it comes to
``relight.standby()``. One is told, once, by a socket: arguments, environment, where its output goes. From then on it is as if it had been
started so. If nobody is left who could tell it, it ends.
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
_SAID_MAX = 1 << 20
_MOST_EXPENDABLE = 1000
WORKER = "relight.supervise.worker"
_INSTALLED = ("torch", "relight")
USUAL = ("torch", "torch.distributed", "relight.checkpointer")


class _Spare(NamedTuple):
    process: subprocess.Popen[bytes]
    channel: socket.socket
    said: int
    """What it has written while it runs the script ahead: a descriptor; −1: it does not."""


class Spares:
    """Those of one node."""

    def __init__(self, count: int, modules: Sequence[str], directory: str = "") -> None:
        """``directory``: the one that Python puts first on the script's path; modules that the settings name may be in it."""
        self._count, self._modules, self._directory = count, tuple(modules), directory
        self._worker = child_command(WORKER, unbuffered=True)
        self._waiting: list[_Spare] = []
        self._told: list[_Spare] = []
        self._arguments: tuple[str, ...] = ()
        self._goes_ahead = True

    def fill(self, ahead_bytes: int = 0) -> None:
        """Start one that is missing, if any is: to be called again for the next, so that they do not all work at once.

        ``ahead_bytes``: what a process needs that runs the script to where it may wait; 0: it has no such place.
        """
        for one in [one for one in self._waiting if one.process.poll() is not None]:
            self._waiting.remove(one)
            self._lost(one)
        for one in [one for one in self._told if one.process.poll() is not None]:
            self._told.remove(one)
            one.channel.close()
        if len(self._waiting) >= self._count or any(not _is_ready(one.channel) for one in self._waiting):
            return
        needed = 2 * ahead_bytes * (self._count - len(self._waiting))
        ahead = self._goes_ahead and 0 < needed <= (available_bytes() or 0)
        self._waiting.append(self._start(self._arguments if ahead else ()))

    def take(
        self, arguments: Sequence[str], environment: Mapping[str, str], out: IO[Any] | None, errors: IO[Any] | None
    ) -> subprocess.Popen[bytes] | None:
        """One of them as a process with these; None if there is none, or they are not for a spare."""
        count = len(self._worker)
        if list(arguments[:count]) != self._worker:
            return None
        self._arguments = tuple(arguments[count:])
        message = json.dumps({"arguments": list(arguments[count:]), "environment": dict(environment), "directory": os.getcwd()}).encode()
        while self._waiting and len(message) <= _MESSAGE_MAX:
            one = self._waiting.pop(0)
            with contextlib.suppress(OSError):
                streams = [(out or sys.stdout).fileno(), (errors or sys.stderr).fileno()]
                one.channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(message))
                socket.send_fds(one.channel, [message], streams)
                _close(one.said)
                self._told.append(one._replace(said=-1))  # closed before all was read, it would take the message with it
                return one.process
            self._lost(one)
        return None

    def close(self) -> None:
        """None is left."""
        for one in self._told:
            one.channel.close()
        for one in self._waiting:
            one.channel.close()
            _close(one.said)
            _end(one.process)
        self._waiting = []

    def _start(self, arguments: tuple[str, ...]) -> _Spare:
        """One that runs the script ahead writes to memory: what it says there belongs to the rank that it may become."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        said = os.memfd_create("relight-spare") if arguments else -1
        told = (str(theirs.fileno()), ",".join(self._modules), self._directory, *arguments)
        command = child_command("relight.supervise.spare", *told, unbuffered=True)
        out = said if arguments else None
        with theirs:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, pass_fds=[theirs.fileno()], start_new_session=True
            )
        return _Spare(process, ours, said)

    def _lost(self, one: _Spare) -> None:
        """If it was the script that ended it, no other is let try: ranks that need not wait start as they always did."""
        one.channel.close()
        _end(one.process)
        if one.said >= 0:
            words = os.pread(one.said, _SAID_MAX, max(0, os.fstat(one.said).st_size - 2000)).decode(errors="replace").strip()
            _close(one.said)
            if one.process.returncode != -signal.SIGKILL:  # that is the kernel, for want of memory, or whoever else
                self._goes_ahead = False
            last = words.splitlines()[-1] if words else f"exit code {one.process.returncode}"
            emit("spare.failed", f"a spare did not come as far as relight.standby(): {last}", said=words, code=one.process.returncode)


def _is_ready(channel: socket.socket) -> bool:
    """Whether it has said that it has done all that it can."""
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
    """Import, run ahead if there is what to run, wait, become."""
    channel, modules, directory, arguments = socket.socket(fileno=int(sys.argv[1])), sys.argv[2].split(","), sys.argv[3], sys.argv[4:]
    for name in filter(None, modules):
        try:
            _preload(name, directory)
        except Exception as error:  # noqa: BLE001 (the script says so better, if it needs it)
            print(f"relight: a spare could not import {name}: {error}", file=sys.stderr)
    from relight.supervise import worker

    if arguments:
        was = _be_expendable()
        wait_with(lambda: _go_on(channel, was))
    else:
        arguments = _become(channel)
    sys.argv = [str(Path(worker.__file__)), *arguments]
    worker.main()


def _preload(name: str, directory: str) -> None:
    """Import a module. One that the settings name is looked up where the script's own imports are; the path is then as before."""
    if name.partition(".")[0] in _INSTALLED or not directory:
        import_module(name)
        return
    sys.path.insert(0, directory)
    try:
        import_module(name)
    finally:
        sys.path.remove(directory)


def _go_on(channel: socket.socket, expendable: str) -> None:
    """In ``relight.standby()``: what was said ahead goes where the rank's output goes."""
    from relight.supervise import stacks

    said = os.dup(1)
    _become(channel)
    text = os.pread(said, _SAID_MAX, 0)
    os.close(said)
    while text:
        text = text[os.write(1, text) :]
    stacks.offer()
    if expendable:
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(expendable)


def _be_expendable() -> str:
    """For as long as it is no rank yet: rather it than those who train. What it was before."""
    path = Path("/proc/self/oom_score_adj")
    try:
        before = path.read_text()
        path.write_text(str(_MOST_EXPENDABLE))
        return before
    except OSError:
        return ""


def _become(channel: socket.socket) -> list[str]:
    """Wait; then with environment, directory and output as told. The arguments of the worker."""
    with channel:
        with contextlib.suppress(OSError):  # told already: what was said can be read all the same
            channel.send(b"ready")
        data, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE_MAX + 1, 2)
    if not data or len(descriptors) != 2:
        os._exit(0)  # not the script's to clean up behind: it is nobody's rank
    told = json.loads(data)
    for target, descriptor in zip((1, 2), descriptors, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(told["directory"])
    os.environ.clear()
    os.environ.update(told["environment"])
    return list(told["arguments"])


if __name__ == "__main__":
    main()
