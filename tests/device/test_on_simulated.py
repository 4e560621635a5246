"""The tests for any accelerator, on the simulated one. Each file has a process of its own: torch has at most one accelerator in a process.

``make device`` runs them with the whole proof of the adversary; on a machine with CUDA, ``make gpu`` runs the same files there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.device import simulated

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
pytestmark = pytest.mark.skipif(simulated.why_not() is not None, reason=str(simulated.why_not()))


def on_simulated(*arguments: str, limit_s: float = 280) -> str:
    """Run Python with the simulated accelerator. Return what it printed; fail with its last lines if it failed."""
    environment = simulated.environment()
    environment.pop("PYTEST_XDIST_WORKER", None)
    ended = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s
    )
    assert ended.returncode == 0, f"{ended.stdout[-6000:]}\n{ended.stderr[-6000:]}"
    return ended.stdout


@pytest.mark.parametrize(
    "file", sorted(path.name for path in HERE.glob("test_*.py") if path.name != Path(__file__).name)
)
def test_every_case_for_accelerators(file: str) -> None:
    """A file's tests pass on the simulated accelerator, and none is skipped because there is no device."""
    printed = on_simulated("-m", "pytest", "-m", "device", "-n0", "-p", "no:cacheprovider", f"tests/device/{file}")
    assert " passed" in printed and "there is no sim here" not in printed


def test_the_adversary_finds_nothing() -> None:
    """Saves and restores under 80 seeded orders of the device's streams: every byte as at the call."""
    report = json.loads(on_simulated("-m", "tests.device.adversary", "--count", "80", "--json"))
    assert report["ok"] and report["counts"]["accepted saves"] > 40, report


def test_the_adversary_finds_every_planted_bug() -> None:
    """Each fault of the device's path, planted alone, is found within 200 trials."""
    report = json.loads(on_simulated("-m", "tests.device.adversary", "--planted", "--json"))
    assert report["ok"] and report["by_kind"]["found"] >= 12, report
