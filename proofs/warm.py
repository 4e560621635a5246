"""Start scripts without importing torch again: each is forked from one process that has imported it.

A fork is a process like any other, with descriptors, environment and signals of its own. Each start takes two seconds of CPU time less.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import queue
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

IMPORTED = ("torch", "torch.utils.data", "relight", "relight.checkpointer", "relight.capture", "relight.agent")
"""Modules that are imported before the forks."""
_MESSAGE_MAX = 1 << 20
_STARTS_S = 120.0


class Child:
    """A forked script, as ``subprocess.Popen`` has a process: ``pid``, ``returncode``, and the methods below."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._changed = threading.Condition()

    def ended(self, code: int) -> None:
        """Record the exit code; negative for a signal."""
        with self._changed:
            self.returncode = code
            self._changed.notify_all()

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. ``subprocess.TimeoutExpired`` if the process runs longer."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.returncode is not None, timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process runs."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, if the process runs."""
        self.send_signal(signal.SIGKILL)


class Warm:
    """A process that has imported ``imported`` and forks scripts. Any thread may use it. Closing it kills its scripts.

    ``environment``: of that process, as here if None; its ``PYTHONPATH`` may lead to another Relight.
    """

    def __init__(self, imported: Sequence[str] = IMPORTED, environment: Mapping[str, str] | None = None) -> None:
        # not in the process that is started: it may have another Relight
        from relight.comm.children import script_command

        self._socket, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock, self._begun = threading.Lock(), queue.Queue[int]()
        self._children: dict[int, Child] = {}
        with child_end:
            self._process = subprocess.Popen(
                script_command(__file__, str(child_end.fileno()), *imported, safe=True),
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
            )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> Warm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process, and kill its scripts."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()
        self._listener.join()
        self._socket.close()

    def start(
        self, argv: Sequence[str], stdout: int, stderr: int, environment: Mapping[str, str] | None = None, *, leads: bool = False,
        directory: str | None = None, path: Sequence[str] = (), quick: bool = False,
    ) -> Child:  # fmt: skip
        """Run the script ``argv[0]``, which may import from ``path`` and its own directory, in ``directory``.

        ``environment``: as here if None. ``leads``: whether the script is the first process of a new session. ``quick``: whether it ends
        without freeing torch, which takes a second.
        """
        request = {
            "argv": list(argv), "environment": dict(os.environ if environment is None else environment), "leads": leads,
            "directory": directory, "path": list(path), "quick": quick,
        }  # fmt: skip
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [stdout, stderr])
            return self._children[self._begun.get(timeout=_STARTS_S)]

    def _listen(self) -> None:
        while message := self._socket.recv(4096):
            pid, *code = json.loads(message)
            if code:
                self._children.pop(pid).ended(code[0])
            else:
                self._children[pid] = Child(pid)
                self._begun.put(pid)


def _serve(asked: socket.socket) -> None:
    """Fork until the other side closes, then kill what runs. A fork runs its script and returns."""
    children: dict[int, int] = {}
    while True:
        for ready in select.select([asked.fileno(), *children], [], [])[0]:
            if ready in children:
                pid = children.pop(ready)
                os.close(ready)
                asked.send(json.dumps([pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]).encode())
                continue
            message, descriptors, _, _ = socket.recv_fds(asked, _MESSAGE_MAX, 2)
            if not message:
                for pid in children.values():
                    os.kill(pid, signal.SIGKILL)
                return
            pid = os.fork()
            if not pid:
                asked.close()
                for child in children:
                    os.close(child)
                _become(json.loads(message), descriptors)
                return
            for descriptor in descriptors:
                os.close(descriptor)
            children[os.pidfd_open(pid)] = pid
            asked.send(json.dumps([pid]).encode())


def _become(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Run the script of ``request`` as if an interpreter of its own had started it."""
    if request["leads"]:
        os.setsid()
    for target, descriptor in enumerate(descriptors, 1):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdout = sys.__stdout__ = _text(1, "strict", unbuffered)  # the old streams remember that they could seek
    sys.stderr = sys.__stderr__ = _text(2, "backslashreplace", unbuffered)
    sys.argv = request["argv"]
    sys.path[:0] = [*request["path"], os.path.dirname(os.path.abspath(sys.argv[0]))]
    if request["directory"]:
        os.chdir(request["directory"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if request["quick"]:
        _run_quickly()
    runpy.run_path(sys.argv[0], run_name="__main__")


def _text(descriptor: int, errors: str, unbuffered: bool) -> io.TextIOWrapper:
    """Return a text stream as Python opens it at its start."""
    binary = open(descriptor, "wb", 0 if unbuffered else -1, closefd=False)
    return io.TextIOWrapper(binary, errors=errors, write_through=unbuffered, line_buffering=descriptor == 2)  # type: ignore[arg-type]


def _run_quickly() -> NoReturn:
    """Run the script and end as Python does, but do not free the modules."""
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if code and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exc()
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def main() -> None:
    """Import the modules, then fork the requested scripts."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a thread does not survive a fork"
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all pages of the modules
    _serve(requests)


if __name__ == "__main__":
    main()
