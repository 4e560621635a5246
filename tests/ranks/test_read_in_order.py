"""A restore while another attempt of the run still commits: what the first rank sees, the others see as well."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import relight
from relight.comm import ThreadGroup
from relight.log import Log, truncated
from relight.ranks.several import SeveralRanks
from relight.restore.execute import restore_first_good
from relight.restore.request import RestoreRequest
from relight.store import LocalStore


def save(path: Path, step: int) -> None:
    with relight.Checkpointer(path, x=torch.full((4,), float(step)), signals=False, background=False) as ckpt:
        ckpt.restore()
        ckpt.save(step)


def test_a_commit_between_the_reads_of_two_ranks_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is started twice and its first start still saves; a commit between two ranks' reads must not fail the
    restore.

    Symptom: "checkpoint … is not in the log yet, as this rank sees it", and another incarnation. Rank 0 reads first
    now. Here it waits, and a checkpoint is committed right before its read.
    """
    save(tmp_path / "run", 1)
    stores, other_has_read, both = (
        [LocalStore(tmp_path) for _ in range(2)],
        threading.Event(),
        ThreadGroup.create(2, 30.0),
    )

    class Timed(Log):
        def read(self, *words: Any) -> Any:
            if self._store is stores[0]:
                other_has_read.wait(1.0)
                save(tmp_path / "run", 2)
            result = super().read(*words)
            if self._store is stores[1]:
                other_has_read.set()
            return result

    monkeypatch.setattr(truncated, "Log", Timed)
    components = [{"x": torch.zeros(4)} for _ in range(2)]

    def restore(rank: int) -> int:
        ranks = SeveralRanks(both[rank], (), 30.0)
        ranks.split(components[rank])
        result = restore_first_good(RestoreRequest(stores[rank], "run", components[rank], ranks=ranks))
        assert result.checkpoint is not None
        return result.checkpoint.step

    with ThreadPoolExecutor(2) as pool:
        steps = list(pool.map(restore, range(2)))
    assert steps == [2, 2]
