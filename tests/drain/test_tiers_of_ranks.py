"""Two ranks with tiers: one of them takes charge and drains, both restore from further out when the near tier is gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.scripts import run_ranks

from relight.agent import reach
from relight.catalog import Run
from relight.store import LocalStore

TRAIN = """
import os, sys, torch, torch.distributed as dist, relight
from torch.distributed.fsdp import fully_shard
folder, until, writer = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
if writer == "rank 0" and dist.get_rank():
    folder = "nowhere://at/all"
tiers = relight.Tiers(hot=f"{folder}/hot/run", cold=f"{folder}/cold/run")
with relight.Checkpointer(tiers, model=model, optimizer=optimizer, save=relight.every(steps=2), writer=writer) as ckpt:
    start = ckpt.restore()
    for step in range(start, until):
        torch.manual_seed(step)
        loss = model(torch.randn(8, 32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ckpt.step(step)
        os.write(1, f"LOSS {dist.get_rank()} {step} {loss.item().hex()}\\n".encode())  # one write, because both ranks write to this pipe
dist.barrier()
dist.destroy_process_group()
"""


def train(folder: Path, until: int, background: str, writer: str) -> dict[tuple[int, int], str]:
    """Losses by rank and step."""
    ranks = run_ranks(TRAIN, 2, str(folder), str(until), writer, RELIGHT_BACKGROUND=background)
    for done in ranks:
        assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split()[1:] for done in ranks for line in done.stdout.splitlines() if line.startswith("LOSS")]
    return {(int(rank), int(step)): loss for rank, step, loss in rows}


@pytest.mark.parametrize(("background", "writer"), [
    ("1", "rank 0"), *(pytest.param(*values, marks=pytest.mark.slow) for values in [("1", "every rank"), ("0", "rank 0")]),
])  # fmt: skip
def test_two_ranks_resume_from_the_further_tier(tmp_path: Path, background: str, writer: str) -> None:
    """If the near tier is wiped between two attempts, the losses equal those of an uninterrupted run."""
    whole = train(tmp_path / "whole", 6, background, writer)
    first = train(tmp_path / "cut", 4, background, writer)
    assert [checkpoint.step for checkpoint in Run(LocalStore(tmp_path / "cut" / "cold"), "run").history().live][-1] == 3
    agent = reach(str(tmp_path / "cut" / "hot"), "run")
    if agent is not None:
        agent.close()
    shutil.rmtree(tmp_path / "cut" / "hot")
    second = train(tmp_path / "cut", 6, background, writer)
    assert min(step for _, step in second) == 4
    assert {**first, **second} == whole
    assert [checkpoint.step for checkpoint in Run(LocalStore(tmp_path / "cut" / "hot"), "run").history().live][-1] == 5
