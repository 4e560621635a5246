"""``every(epochs=…)`` of several ranks, each with a loader of its own."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from relight.checkpointer import boundary, session
from relight.comm import SingleProcess, ThreadGroup


@pytest.mark.parametrize(("batches", "wanted"), [((5, 5), [4, 9, 14]), ((5, 6), [4, 5, 9, 11, 14])])
def test_ranks_save_at_the_end_of_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: Any, wanted: list[int]
) -> None:
    """All ranks save at an epoch's last step without waiting. If one epoch is longer, all save at the end of either."""
    local = threading.local()
    monkeypatch.setattr(session, "find_world", lambda timeout_s: getattr(local, "world", SingleProcess()))
    monkeypatch.setattr(boundary, "FREE_S", 1.0)

    def rank(world: ThreadGroup) -> list[int]:
        local.world = world
        data = TensorDataset(torch.arange(2.0 * batches[world.rank]).reshape(-1, 1))
        sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=world.rank, shuffle=False)
        loader = DataLoader(data, batch_size=1, sampler=sampler)
        model = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        saved_at, step = [], 0
        with relight.Checkpointer(
            tmp_path / "store" / "run",
            model=model,
            data=loader,
            save=relight.every(epochs=1),
            signals=False,
            background=False,
        ) as ckpt:
            assert ckpt.restore() == 0
            while step < 16:
                for _ in loader:
                    if ckpt.step(step) is not None:
                        saved_at.append(step)
                    step += 1
                    if step == 16:
                        break
        return saved_at

    saved_at = ThreadGroup.run(2, rank)
    assert saved_at[0] == saved_at[1]
    assert saved_at[0] == wanted
