"""Lets these tests share the planted faults, and the states that the command line's tests look at; a machine that others leave alone."""

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
    """The directory that a supervisor with that process id has, or left."""
    folder = memory / f"relight-run-{pid}-abcdefgh"
    folder.mkdir(0o700)
    (folder / ".relight-supervisor").touch()
    return folder


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ``relight run`` makes its pages, as far as this test sees."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr("relight.doctor.facts_machine.memory_places", lambda: [folder])
    monkeypatch.setattr("relight.doctor.fix.memory_places", lambda: [folder])
    monkeypatch.setattr("relight.supervise.own_memory.MEMORY", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture(autouse=True)
def quiet(memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what other tests do to this machine at the same time: broken loop devices in the kernel's log, jobs that run."""
    monkeypatch.setattr("relight.doctor.facts_machine.kernel_lines", lambda since: [])
    for name in [one for one in os.environ if one.startswith("RELIGHT_")]:
        monkeypatch.delenv(name)
    for name in ("LD_PRELOAD", "MASTER_ADDR", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
