"""Shared setup: the planted faults, the command line tests' stores, and a machine without traces of other tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.store.conftest import s3, s3_server

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "cli")]

__all__ = ["memory", "quiet", "s3", "s3_server"]


def supervised(memory: Path, pid: int) -> Path:
    """Create the directory of shared memory that a supervisor with this process id has, or has left."""
    folder = memory / f"relight-run-{pid}-abcdefgh"
    folder.mkdir(0o700)
    (folder / ".relight-supervisor").touch()
    return folder


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory in which ``relight run`` creates its pages, for this test only."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr("relight.doctor.facts_machine.memory_places", lambda: [folder])
    monkeypatch.setattr("relight.doctor.fix.memory_places", lambda: [folder])
    monkeypatch.setattr("relight.supervise.shared_pages.MEMORY", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture(autouse=True)
def quiet(memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide what other tests do to this machine meanwhile: failed loop devices in the kernel's log, running jobs."""
    monkeypatch.setattr("relight.doctor.facts_machine.kernel_lines", lambda since: [])
    for name in [variable for variable in os.environ if variable.startswith("RELIGHT_")]:
        monkeypatch.delenv(name)
    for name in ("LD_PRELOAD", "MASTER_ADDR", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
