"""Scripts of tests as processes that import nothing again: see ``proofs.warm``."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

from proofs.warm import IMPORTED, Warm
from relight.comm.ports import free_port


@functools.cache
def warm() -> Warm:
    """The process that forks this process's scripts. It ends with this one."""
    return Warm(IMPORTED, {**os.environ, "OMP_NUM_THREADS": "1"})


def run_script(
    source: str | Path,
    *arguments: str,
    timeout_s: float = 90,
    cwd: Path | None = None,
    leads: bool = False,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a script, by its text or its path, to its end and that of all that have its output. It is killed after ``timeout_s``."""
    with tempfile.TemporaryDirectory(prefix="relight-script-") as folder:
        path, errors = source if isinstance(source, Path) else Path(folder) / "script.py", Path(folder) / "errors"
        if isinstance(source, str):
            path.write_text(source)
        readable, writable = os.pipe()
        with errors.open("wb") as file:
            script = warm().start(
                [str(path), *arguments],
                writable,
                file.fileno(),
                {**os.environ, **environment},
                leads=leads,
                directory=cwd and str(cwd),
            )
        os.close(writable)
        late = threading.Timer(timeout_s, script.kill)
        late.start()
        try:
            with os.fdopen(readable, "r") as stdout:
                output = stdout.read()
            code = script.wait(timeout_s)
        finally:
            late.cancel()
            script.kill()
        return subprocess.CompletedProcess(list(arguments), code, output, errors.read_text(errors="replace"))


class Script:
    """A running script, given by its text, with the methods of ``subprocess.Popen`` that tests use.

    The process that forked it reaps it at once, so a killed script is no zombie. ``/proc`` shows the environment of that
    process. A test that depends on either starts an interpreter.
    """

    def __init__(self, source: str, *arguments: str, leads: bool = False, **environment: str) -> None:
        file, path = tempfile.mkstemp(".py", "script-", _folder())
        with os.fdopen(file, "w") as opened:
            opened.write(source)
        self.stdout, output = _pipe()
        self.stderr, errors = _pipe()
        self._child = warm().start([path, *arguments], output, errors, {**os.environ, **environment}, leads=leads)
        self.pid, self.poll, self.wait = self._child.pid, self._child.poll, self._child.wait
        self.kill, self.send_signal = self._child.kill, self._child.send_signal
        for descriptor in (output, errors):
            os.close(descriptor)

    @property
    def returncode(self) -> int | None:
        """The exit code; None while the script runs."""
        return self._child.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both pipes to their ends, wait for the script, and return what it printed."""
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.append(self.stderr.read()))
        late = threading.Timer(timeout or threading.TIMEOUT_MAX, self.kill)
        reader.start()
        late.start()
        try:
            output = self.stdout.read()
            reader.join()
            self.wait(timeout)
        finally:
            late.cancel()
        self.stdout.close()
        self.stderr.close()
        return output, errors[0]


def run_ranks(
    source: str, count: int, *arguments: str, timeout_s: float = 200, **environment: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run a script as the ranks of one job on this node.

    It has the variables that torch.distributed reads, and no launcher.
    """
    sizes = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **sizes, **environment}
    ranks = [Script(source, *arguments, RANK=str(rank), LOCAL_RANK=str(rank), **job) for rank in range(count)]
    with ThreadPoolExecutor(count) as readers:
        outputs = list(readers.map(lambda rank: rank.communicate(timeout_s), ranks))
    return [subprocess.CompletedProcess(list(arguments), rank.wait(), *output) for rank, output in zip(ranks, outputs)]


def _pipe() -> tuple[TextIO, int]:
    readable, writable = os.pipe()
    return os.fdopen(readable, "r"), writable


@functools.cache
def _folder() -> str:
    folder = tempfile.mkdtemp(prefix="relight-scripts-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
