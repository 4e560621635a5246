"""Saves while an accelerator fails: the save fails with one line, its slot is free again, and training continues or ends by itself."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import relight
from relight.checkpointer import state_shape
from relight.checkpointer.slot_copy_plan import SlotCopyPlan

ADVICE = (
    "\nSearch for `cudaErrorAssert' in https://docs.nvidia.com/ for more information."
    "\nCUDA kernel errors might be asynchronously reported at some other API call."
)
QUEUE = relight.Limits(when_busy="queue", deadline_s=30.0)


class FailingDevice:
    """Device copies in which ``begin`` or ``finish`` raises the next entry of ``errors``, unless it is None."""

    def __init__(self, at: str, errors: list[Exception | None]) -> None:
        self.at, self.errors = at, errors

    def begin(self, slot: torch.Tensor) -> FailingDevice:
        self._fail("begin")
        return self

    def before_step(self) -> None:
        pass

    def finish(self) -> set[str]:
        self._fail("finish")
        return set()

    def _fail(self, at: str) -> None:
        if at == self.at and self.errors and (error := self.errors.pop(0)) is not None:
            raise error


def failing(monkeypatch: pytest.MonkeyPatch, at: str, errors: list[Exception | None]) -> None:
    """Give the state's copy plans a device that fails."""
    device = FailingDevice(at, errors)

    class Plan(SlotCopyPlan):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.devices = [device]  # type: ignore[list-item]

    monkeypatch.setattr(state_shape, "SlotCopyPlan", Plan)


def test_an_error_that_a_copy_reports_late_ends_that_save_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reports a kernel's error where the copies are waited for. The save has this error, without torch's advice, and its slot is free."""
    failing(monkeypatch, "finish", [None, None, RuntimeError("CUDA error: device-side assert triggered" + ADVICE)])
    with relight.Checkpointer(
        tmp_path / "s" / "r", save=None, background=True, limits=QUEUE, signals=False, x=torch.zeros(8)
    ) as ckpt:
        ckpt.restore()
        ckpt.save(0)
        with pytest.raises(relight.SaveFailed) as failed:
            ckpt.save(1, block=False).wait(60)
        assert failed.value.what == "RuntimeError: CUDA error: device-side assert triggered"
        for step in (2, 3, 4):
            assert ckpt.save(step).error is None, "a slot of the failed save is not free"
        began = time.monotonic()
    assert time.monotonic() - began < 15, "close() has waited for the failed save"


def test_no_device_memory_ends_that_save_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lack of device memory fails the save, and raises nothing in the training loop."""
    failing(monkeypatch, "begin", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 MiB")])
    with relight.Checkpointer(
        tmp_path / "s" / "r", save=None, background=True, limits=QUEUE, signals=False, x=torch.zeros(8)
    ) as ckpt:
        ckpt.restore()
        with pytest.raises(relight.SaveFailed, match="out of memory"):
            ckpt.save(0, block=False).wait(60)
        assert ckpt.save(1).error is None
