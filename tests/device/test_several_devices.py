"""Two devices: layers of one process on both, and ranks with a device each, by DDP and FSDP2."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.device import simulated
from tests.device.kind import KIND, marks
from tests.ranks import protected_ranks
from torch import nn

import relight

pytestmark = [*marks, pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="one device")]


class Halves(nn.Module):
    """A network with its second half on the second device."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(32, 600), nn.BatchNorm1d(600), nn.Dropout(0.1)).to(f"{KIND}:0")
        self.second = nn.Sequential(nn.GELU(), nn.Dropout(0.1), nn.Linear(600, 500)).to(f"{KIND}:1")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.to(f"{KIND}:0")).to(f"{KIND}:1"))


def test_a_model_on_two_devices_resumes_to_the_bit(tmp_path: Path) -> None:
    """Tensors, moments and generators of both devices: a save at every step, a restart, the same losses."""

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = Halves()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def run(
        steps: range, model: nn.Module, optimizer: torch.optim.Optimizer, ckpt: relight.Checkpointer | None = None
    ) -> list[float]:
        losses = []
        for step in steps:
            loss = model(torch.randn(8, 32, device=f"{KIND}:0")).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if ckpt is not None:
                ckpt.step(step)
        return losses

    straight = make(0)
    expected, losses = run(range(10), *straight), []
    for seed, end in ((0, 6), (9, 10)):
        live = make(seed)
        with relight.Checkpointer(
            tmp_path / "r", model=live[0], optimizer=live[1], save=relight.every(steps=1), signals=False,
            limits=relight.Limits(when_busy="queue"),
        ) as ckpt:  # fmt: skip
            begin = ckpt.restore()
            losses[begin:] = run(range(begin, end), *live, ckpt)
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(live[0].parameters(), straight[0].parameters(), strict=True))


@pytest.mark.skipif(KIND != simulated.NAME, reason="tests/gpu has this with NCCL")
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_ranks_with_a_device_each_resume_to_the_bit(tmp_path: Path, way: str) -> None:
    """Two ranks, each on its device, save and are restarted with other seeds: the same parameters as without."""
    script = Path(__file__).parent / "sim_ranks.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), way]
    ended = subprocess.run(
        [*command, str(tmp_path / "store" / "run")],
        capture_output=True,
        text=True,
        timeout=200,
        env=simulated.environment(),
    )
    assert ended.returncode == 0 and ended.stdout.count("equal") == 2, ended.stderr[-5000:]
    if way == "fsdp2":  # the shards of two devices become whole tensors on one
        model = nn.Sequential(nn.Linear(64, 700), nn.GELU(), nn.Dropout(0.1), nn.Linear(700, 64)).to(f"{KIND}:1")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with relight.Checkpointer(
            tmp_path / "store" / "run", model=model, optimizer=optimizer, save=None, signals=False, background=False
        ) as ckpt:
            assert ckpt.restore() == 8
        stored = relight.load(tmp_path / "store" / "run")
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.detach().cpu(), stored["model"][name]), name
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(optimizer.state[parameter][key].cpu(), stored["optimizer"]["state"][name][key]), (
                    name,
                    key,
                )


def test_a_lost_node_restores_to_its_device_from_a_peer(tmp_path: Path) -> None:
    """A node's agent, memory and packs are lost. Its next rank gets the parameters on its device from the other node's memory."""
    url, peers = str(tmp_path / "store" / "run"), relight.Peers(copies=1)
    try:
        protected_ranks.job(url, 2, peers, 1, kind=KIND)
        protected_ranks.lose(url, {1}, 2)
        restores = dict(protected_ranks.job(url, 2, peers, 0, kind=KIND))
        assert {report["digest"] for report in restores.values()} == {protected_ranks.expected(0)}
        assert restores[1]["source"] == "peers", restores
    finally:
        for pid in protected_ranks.agents(url, 2).values():
            os.kill(pid, signal.SIGKILL)
