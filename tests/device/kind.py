"""The accelerator that these tests use: CUDA, or the simulated one with ``TESTS_DEVICE=sim``."""

from __future__ import annotations

import os
import time

import pytest
import torch
from tests.device import simulated

from relight.checkpointer.page_locks import RUNTIMES, Registration

KIND = os.environ.get("TESTS_DEVICE", "cuda")
"""Its device type."""


def prepare() -> None:
    """Build and register the simulated accelerator, if that was chosen."""
    if KIND == simulated.NAME:
        sim = simulated.load()
        RUNTIMES[KIND] = Registration(lambda a, n: sim.host_register(a, n, 0), sim.host_unregister)


def is_there() -> bool:
    """Return whether the accelerator can be used."""
    return torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == KIND  # type: ignore[union-attr]


def keep_busy() -> None:
    """Queue work on the current stream that is not done when the next calls return."""
    if KIND == simulated.NAME:
        simulated.load().sleep(torch.accelerator.current_device_index(), 0.3)
    else:
        torch.cuda._sleep(300_000_000)


class HostWaits:
    """Within the block, what this thread waited for the device: times on the simulated accelerator, seconds on others."""

    def __enter__(self) -> HostWaits:
        self._before = simulated.load().counters()["waits_here"] if KIND == simulated.NAME else time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        now = simulated.load().counters()["waits_here"] if KIND == simulated.NAME else time.perf_counter()
        self.waited = now - self._before > (0 if KIND == simulated.NAME else 0.02)


prepare()
marks = [pytest.mark.device, pytest.mark.skipif(not is_there(), reason=f"there is no {KIND} here")]
"""Marks of each file of tests for any accelerator."""
