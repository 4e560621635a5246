"""Saves with failed copies: each one is reported and counted, and leaves nothing that stops the next save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import relight
from relight.checkpointer import background
from relight.checkpointer.slot_copy_plan import SlotCopyPlan
from relight.snapshot import Copier


@pytest.mark.parametrize("error", [RuntimeError("the device is out of memory"), MemoryError("none left")])
@pytest.mark.parametrize(
    ("place", "name"),
    [(SlotCopyPlan, "copy_now"), (background, "Snapshot"), (Copier, "start")],
    ids=["now", "later", "thread"],
)
def test_a_copy_that_fails_costs_that_save_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, place: object, name: str
) -> None:
    """After more failed copies than slots, training continues, each handle has its error, the next save succeeds."""
    model = torch.nn.Linear(64, 64)
    with relight.Checkpointer(tmp_path / "store" / "run", model=model, signals=False, background=True) as ckpt:
        assert ckpt.save(0).wait(60).error is None
        usual = getattr(place, name)
        for step in range(1, 5):
            monkeypatch.setattr(place, name, lambda *_: (_ for _ in ()).throw(error))
            with torch.no_grad():
                model.weight.add_(1)
            failed = ckpt.save(step, block=False)
            assert failed.error is not None and str(error) in str(failed.error)
            monkeypatch.setattr(place, name, usual)
        assert ckpt.save(5).wait(60).error is None
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "store" / "run").checkpoints()] == [0, 5]
