"""Megatron-Core's sharded checkpoints in Relight's format. Kill it at any moment and run it again: the last line is the same.

``torchrun --nproc-per-node=2 examples/megatron_sharded.py``. Megatron's own layers need CUDA; these two are split by hand, as its
column- and row-parallel ones are.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor, load, save

from relight.integrations.megatron import SaveStrategy  # relight: importing it makes load() find it, too

STEPS = 40
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
full = torch.Generator().manual_seed(0)
column = torch.randn(64, 8, generator=full)[rank * 64 // size : (rank + 1) * 64 // size].clone().requires_grad_()
row = torch.randn(1, 64, generator=full)[:, rank * 64 // size : (rank + 1) * 64 // size].clone().requires_grad_()
bias = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([column, row, bias], lr=1e-3, momentum=0.9)


def sharded(step):
    """Return each tensor with its momentum and its place in the whole; and the step, which is not sharded."""
    state = {"step": step}
    for name, weight, split in (
        ("column", column, (0, rank, size)),
        ("row", row, (1, rank, size)),
        ("bias", bias, None),
    ):
        momentum = optimizer.state[weight].get("momentum_buffer")
        momentum = torch.zeros_like(weight.data) if momentum is None else momentum
        for key, tensor in ((name, weight.data), (f"momentum.{name}", momentum)):
            offsets, replica = ((split,), 0) if split else ((), rank)
            state[key] = ShardedTensor.from_rank_offsets(key, tensor, *offsets, replica_id=replica)
    return state


folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/megatron")
latest, start = folder / "latest", 0
if latest.exists():
    loaded = load(sharded(0), latest.read_text())
    for name, weight in (("column", column), ("row", row), ("bias", bias)):
        weight.data.copy_(loaded[name])
        optimizer.state[weight]["momentum_buffer"] = loaded[f"momentum.{name}"]
    start = loaded["step"]
for step in range(start, STEPS):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
    part = torch.tanh(x @ column.T) @ row.T
    dist.all_reduce(whole := part.detach().clone())
    loss = (whole + part - part.detach() + bias - x.sin().sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step + 1:>4}  loss {loss.item():.9f}", flush=True)
    if (step + 1) % 4 == 0:
        target = folder / f"iter_{step + 1:07d}"
        target.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        save(sharded(step + 1), str(target), sharded_strategy=SaveStrategy())  # relight:
        if rank == 0:
            (folder / "new").write_text(str(target))
            os.replace(folder / "new", latest)
