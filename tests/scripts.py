"""Scripts of tests as processes that import nothing again: see ``relight.testing.warm``."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
import weakref
from pathlib import Path
from typing import IO

from relight.testing.warm import IMPORTED, Warm


@functools.cache
def warm() -> Warm:
    """The process that forks this process's scripts. It ends with this one."""
    return Warm(IMPORTED, {**os.environ, "OMP_NUM_THREADS": "1"})


class Script:
    """A script that runs. ``stdout`` is a pipe of text, as of ``subprocess.Popen``; standard error goes to a file."""

    def __init__(self, source: str | Path, *arguments: str, cwd: Path | None = None, leads: bool = False, **environment: str) -> None:
        folder = Path(tempfile.mkdtemp(prefix="relight-script-"))
        weakref.finalize(self, shutil.rmtree, folder, True)
        self._errors, path = folder / "errors", source if isinstance(source, Path) else folder / "script.py"
        if isinstance(source, str):
            path.write_text(source)
        readable, writable = os.pipe()
        with self._errors.open("wb") as errors:
            self.process = warm().start(
                [str(path), *arguments], writable, errors.fileno(), {**os.environ, **environment}, leads=leads, directory=cwd and str(cwd)
            )
        os.close(writable)
        self.stdout: IO[str] = os.fdopen(readable, "r")
        weakref.finalize(self, self.stdout.close)

    def errors(self) -> str:
        """Return what it has written to standard error."""
        return self._errors.read_text(errors="replace")

    def ends(self, timeout_s: float = 90) -> tuple[int, str, str]:
        """Wait for the end. Return exit code, the rest of the output, errors."""
        code = self.process.wait(timeout_s)
        with self.stdout:
            output = self.stdout.read()
        return code, output, self.errors()

    def kill(self) -> None:
        """Send SIGKILL, and wait."""
        self.process.kill()
        self.process.wait()
        self.stdout.close()


def run_script(
    source: str | Path, *arguments: str, timeout_s: float = 90, cwd: Path | None = None, leads: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, as ``subprocess.run`` does."""
    script = Script(source, *arguments, cwd=cwd, leads=leads, **environment)
    output: list[str] = []
    with script.stdout:
        output += script.stdout  # until the last process that has the pipe ends
    try:
        code = script.process.wait(timeout_s)
    finally:
        script.process.kill()
    return subprocess.CompletedProcess(list(arguments), code, "".join(output), script.errors())
