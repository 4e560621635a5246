"""The training that is drilled if no script is given: ``python -m relight.drill.job STORE STEPS OUT WITHOUT``.

Each rank trains a small network, with gradients averaged over gloo. It makes a step every 0.05 s until ``OUT.go`` exists, then as fast as
possible. At the end it writes a hash of weights and optimizer state to ``OUT.end``, which does not depend on interruptions. It skips the
samples of step WITHOUT, as after a rollback; -1 skips none.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import relight

STEP_S = 0.05
EVERY = 10


def main() -> None:
    """Train, and write the hash of the final state."""
    store, steps, out, without = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    go = out.with_suffix(".go")
    with relight.Checkpointer(
        store / "run",
        model=model,
        optimizer=optimizer,
        save=relight.every(steps=EVERY),
        keep=relight.keep(last=4),
        background=True,
    ) as ckpt:
        for step in range(ckpt.restore(), steps):
            if ckpt.should_skip(step) or step == without:
                continue
            if not go.exists():
                time.sleep(STEP_S)
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
            loss = (model(x) - x.sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                assert parameter.grad is not None
                parameter.grad /= world
            dist.all_reduce(loss.detach())
            optimizer.step()
            ckpt.step(step, loss=loss)
    if rank == 0:
        out.with_suffix(".end").write_text(digest(model, optimizer), encoding="ascii")
    dist.destroy_process_group()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of every bit of the model's parameters and the optimizer's state."""
    hasher = hashlib.sha256()
    for value in model.parameters():
        hasher.update(value.detach().numpy().tobytes())
        for _, state in sorted(optimizer.state[value].items()):
            hasher.update(state.numpy().tobytes())
    return hasher.hexdigest()


if __name__ == "__main__":
    main()
