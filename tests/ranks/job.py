"""Starting the ranks of a job, and hearing what they say."""

from __future__ import annotations

import functools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relight.world.ports import free_port

HERE = Path(__file__).parent


class Rank:
    """A process of a job, as ``subprocess.Popen`` has it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._changed = threading.Condition()

    def ended(self, code: int) -> None:
        """It has, so."""
        with self._changed:
            self.returncode = code
            self._changed.notify_all()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._changed:
            if not self._changed.wait_for(lambda: self.returncode is not None, timeout):
                raise subprocess.TimeoutExpired(f"rank, process {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Ready:
    """The process that forks ranks: see ``ready.py``. It ends with this one."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock, self._begun = threading.Lock(), queue.Queue[int]()
        self._ranks: dict[int, Rank] = {}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "ready.py"), str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, argv: list[str], environment: dict[str, str], output: int) -> Rank:
        """A rank that runs ``argv[0]``."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps({"argv": argv, "environment": environment}).encode()], [output])
            return self._ranks[self._begun.get(timeout=120)]

    def _listen(self) -> None:
        while message := self._socket.recv(4096):
            pid, *code = json.loads(message)
            if code:
                self._ranks.pop(pid).ended(code[0])
            else:
                self._ranks[pid] = Rank(pid)
                self._begun.put(pid)


@functools.cache
def ready() -> Ready:
    """The one of this process."""
    return Ready()


class Job:
    """``world`` processes of a script in this folder, which are given rank, world, port and ``arguments``."""

    def __init__(self, script: str, world: int, arguments: Sequence[str], **environment: str) -> None:
        port = free_port()
        self._outputs = [tempfile.TemporaryFile("w+") for _ in range(world)]
        given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self.ranks = [
            ready().start([str(HERE / script), str(rank), str(world), str(port), *arguments], given, output.fileno())
            for rank, output in enumerate(self._outputs)
        ]

    def wait(self, seconds: float) -> list[int]:
        """Exit codes, by rank. What has not ended by then is killed."""
        try:
            return [rank.wait(seconds) for rank in self.ranks]
        finally:
            for rank in self.ranks:
                if rank.poll() is None:
                    rank.send_signal(signal.SIGKILL)
                    rank.wait()

    def said(self, rank: int) -> str:
        """All that a rank has printed."""
        self._outputs[rank].flush()
        self._outputs[rank].seek(0)
        return self._outputs[rank].read()

    def told(self, rank: int) -> list[dict[str, Any]]:
        """The JSON objects that it printed, each on a line."""
        return [json.loads(line) for line in self.said(rank).splitlines() if line.startswith("{")]

    def close(self) -> None:
        for output in self._outputs:
            output.close()


def run(script: str, world: int, arguments: Sequence[str], seconds: float = 300.0, **environment: str) -> list[list[dict[str, Any]]]:
    """What each rank told; an ``AssertionError`` with all it said for one that did not end well."""
    job = Job(script, world, arguments, **environment)
    try:
        codes = job.wait(seconds)
        assert codes == [0] * world, "\n".join(f"rank {rank}: {code}\n{job.said(rank)}" for rank, code in enumerate(codes))
        return [job.told(rank) for rank in range(world)]
    finally:
        job.close()
