"""A training epoch that its caller has left. The loader continues with the next epoch after a restore."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import relight
from relight.capture import leave_epoch


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("taken", [2, 5])
def test_the_next_epoch_begins(kind, taken, tmp_path) -> None:
    """Deliver the uninterrupted run's whole next epoch, after a loop that left the last one before its end."""
    torch.manual_seed(0)
    loader = kind(list(range(10)), batch_size=2, shuffle=True)
    with relight.Checkpointer(tmp_path / "run", data=loader, signals=False) as ckpt:
        batches = iter(loader)
        for _ in range(taken):
            next(batches)
        leave_epoch(loader)
        ckpt.save(0)
        expected = [batch.tolist() for batch in loader]
    torch.manual_seed(99)
    loader = kind(list(range(10)), batch_size=2, shuffle=True)
    with relight.Checkpointer(tmp_path / "run", data=loader, signals=False) as ckpt:
        assert ckpt.restore() == 1
        assert [batch.tolist() for batch in loader] == expected
