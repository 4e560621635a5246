"""A follower on a node of a job reads the other nodes' parts from their agents' memory."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import relight
from relight.format import hexdigest

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))
import protected_ranks

pytestmark = pytest.mark.distributed


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A run; its agents are ended after the test."""
    result = str(tmp_path / "store" / "run")
    yield result
    for pid in protected_ranks.agents(result, 4).values():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("tls", [False, True], ids=["clear", "tls"])
def test_other_nodes_parts_come_from_their_agents(url: str, tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if no store has the bytes. On a node without an agent of the run, they are missing."""
    protected_ranks.job(url, 2, relight.Peers(copies=1, tls=tls), 2)
    for pack in Path(url).glob("*/pack-*"):
        pack.unlink()
    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.zeros(4, protected_ranks.ELEMENTS // 4)) for name in "abc"}
    )
    monkeypatch.setenv("RELIGHT_NODE", "node0")
    with relight.follow(url, model) as follower:
        switched = follower.poll()
        assert switched is not None and switched.source == "peers", follower.error
    digest = hexdigest(b"".join(value.detach().numpy().tobytes() for value in model.values()))
    assert digest == protected_ranks.expected(1)
    monkeypatch.setenv("RELIGHT_NODE", "node7")
    with relight.follow(url, model) as follower:
        assert follower.poll() is None and isinstance(follower.error, relight.CorruptCheckpoint)
