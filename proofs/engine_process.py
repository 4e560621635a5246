"""Start a module of ``proofs`` as a process of its own, and make its scratch directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relight.comm.children import child_command, child_environment

ROOT_DIRECTORY = str(Path(__file__).resolve().parents[1])


def start_engine(module: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start the module ``proofs.<module>`` with this Relight. ``options``: of ``subprocess.Popen``.

    The child's path never has the working directory, so ``PYTHONPATH`` names the directory of ``proofs``.
    """
    path = os.pathsep.join([ROOT_DIRECTORY, os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        child_command(f"proofs.{module}", *arguments), env=child_environment(PYTHONPATH=path), **options
    )


@contextlib.contextmanager
def scratch_directory(prefix: str) -> Iterator[str]:
    """Make a scratch directory, in memory if possible: the engines test the order of calls, not the medium."""
    memory = "/dev/shm"
    base = memory if os.path.isdir(memory) and os.access(memory, os.W_OK) else None
    directory = tempfile.mkdtemp(prefix=prefix, dir=base)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
