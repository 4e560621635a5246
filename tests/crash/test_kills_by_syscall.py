"""Real kills at storage system calls: a slice of ``make kills``."""

from __future__ import annotations

import pytest

from proofs import kills
from proofs.report import EngineUnavailable

pytestmark = pytest.mark.crash


def test_killed_at_system_calls() -> None:
    """A process that the kernel kills at the entry of a storage system call breaks no invariant."""
    try:
        report = kills.run(40, seed=3)
    except EngineUnavailable as error:
        pytest.skip(f"no process was killed: {error}")
    assert not report.violations, report.show()
    assert report.total >= 32
    assert set(report.trials) >= {"fsync", "pwrite64", "openat", "close", "link", "unlink", "mkdir"}
