"""Scripts of tests as processes that import nothing again: see ``relight.testing.warm``."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
import threading
from pathlib import Path

from relight.testing.warm import IMPORTED, Warm


@functools.cache
def warm() -> Warm:
    """The process that forks this process's scripts. It ends with this one."""
    return Warm(IMPORTED, {**os.environ, "OMP_NUM_THREADS": "1"})


def run_script(
    source: str | Path, *arguments: str, timeout_s: float = 90, cwd: Path | None = None, leads: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script, by its text or its path, to its end and that of all that have its output. It is killed after ``timeout_s``."""
    with tempfile.TemporaryDirectory(prefix="relight-script-") as folder:
        path, errors = source if isinstance(source, Path) else Path(folder) / "script.py", Path(folder) / "errors"
        if isinstance(source, str):
            path.write_text(source)
        readable, writable = os.pipe()
        with errors.open("wb") as file:
            script = warm().start(
                [str(path), *arguments], writable, file.fileno(), {**os.environ, **environment}, leads=leads, directory=cwd and str(cwd)
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
