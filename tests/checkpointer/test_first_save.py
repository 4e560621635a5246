"""The first background save: what it plans for each tensor is planned in another thread than the trainer's."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import relight
from relight.checkpointer import background, slot_copy_plan


def test_the_first_save_plans_nothing_large_in_the_trainers_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plan the slot and its copies while the agent starts, in the thread that warms up."""
    planned: list[tuple[str, str, int]] = []
    planner, copies = background.plan_layout, slot_copy_plan.SlotCopyPlan.__init__

    def watched_layout(layout: Any) -> Any:
        planned.append(("layout", threading.current_thread().name, len(layout.items)))
        return planner(layout)

    def watched_copies(self: Any, items: Any, *rest: Any) -> None:
        planned.append(("copies", threading.current_thread().name, len(items)))
        copies(self, items, *rest)

    monkeypatch.setattr(background, "plan_layout", watched_layout)
    monkeypatch.setattr(slot_copy_plan.SlotCopyPlan, "__init__", watched_copies)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(10)) for _ in range(500)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = relight.Checkpointer(
        tmp_path / "run", model=model, optimizer=optimizer, save=relight.every(steps=100), background=True
    )
    for step in range(ckpt.restore(), 300):
        optimizer.step()
        save = ckpt.step(step)
        if save is not None:
            save.wait()
            break
        time.sleep(0.01 if step < 100 else 0.1)
    ckpt.close()
    assert {what for what, _, count in planned if count >= 500} == {"layout", "copies"}
    assert {thread for _, thread, count in planned if count >= 500} == {"relight-warm-up"}, planned
