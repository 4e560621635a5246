"""One rank's part is late: training on no rank waits for it. The commit does, up to the deadline."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import relight
from relight.checkpointer import boundary, session
from relight.comm import SingleProcess, ThreadGroup

STEPS = 30


def test_training_continues_while_the_commit_waits_for_a_late_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has 6 MB of its own and writes them at 2 MB/s. Both ranks finish further steps before the checkpoint is there; then it is whole."""
    monkeypatch.setenv("RELIGHT_BACKGROUND", "1")
    local = threading.local()
    monkeypatch.setattr(session, "find_world", lambda timeout_s: getattr(local, "world", SingleProcess()))
    monkeypatch.setattr(boundary, "FREE_S", 1.0)
    own = [torch.arange(1000.0), torch.arange(1_500_000.0)]

    def rank(world: ThreadGroup) -> tuple[bool, bool]:
        local.world = world
        model = torch.nn.Linear(300, 300)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.ones_(model.bias)
        with relight.Checkpointer(
            tmp_path / "store" / "run",
            model=model,
            buffer=own[world.rank],
            per_rank=["buffer"],
            save=None,
            signals=False,
            limits=relight.Limits(bytes_per_second=2e6, deadline_s=60),
        ) as ckpt:
            ckpt.restore()
            save = ckpt.save(0, block=False)
            for step in range(1, STEPS):
                ckpt.step(step)
            before = save.done
            save.wait(60)
            return before, save.done

    assert ThreadGroup.run(2, rank, 120.0) == [(False, True), (False, True)]
    checkpoints = relight.open(tmp_path / "store" / "run").checkpoints()
    assert [checkpoint.step for checkpoint in checkpoints] == [0, STEPS - 1]
    assert not any(findings for _, findings in relight.open(tmp_path / "store" / "run").verify())
