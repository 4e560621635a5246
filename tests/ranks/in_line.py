"""A rank's program: bfloat16 weights, and one flat optimizer that keeps each rank's run of them in full precision. ``in_line.py RANK WORLD PORT RUN UNTIL``."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import relight

rank, world, port, run, until = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=world)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 70), nn.Tanh(), nn.Linear(70, 3), nn.LayerNorm(3)).bfloat16()
weights = list(model.parameters())
line = torch.cat([weight.detach().float().flatten() for weight in weights])
each = -(-len(line) // world)
flat = nn.Parameter(nn.functional.pad(line, (0, each * world - len(line)))[rank * each : (rank + 1) * each].clone())
relight.flattened(flat, weights)
optimizer = torch.optim.AdamW([flat], lr=0.01)
data = torch.randn(16, 12, 5, generator=torch.Generator().manual_seed(1)).bfloat16()
losses = []
with relight.Checkpointer(run, model=model, optimizer=optimizer, save=relight.every(steps=2)) as ckpt:
    for step in range(ckpt.restore(), until):
        loss = (model(data[step].chunk(world)[rank]).float() - 1).square().sum() / 36
        loss.backward()
        whole = nn.functional.pad(
            torch.cat([weight.grad.float().flatten() for weight in weights]), (0, each * world - len(line))
        )
        shared = torch.cat([whole, loss.detach().reshape(1)])
        dist.all_reduce(shared)
        flat.grad = shared[rank * each : (rank + 1) * each].clone()
        optimizer.step()
        runs = [torch.empty(each) for _ in range(world)]
        dist.all_gather(runs, flat.detach())
        for weight_, values in zip(weights, torch.cat(runs)[: len(line)].split([weight.numel() for weight in weights])):
            weight_.data.copy_(values.view_as(weight_))
            weight_.grad = None
        losses.append(float(shared[-1]))
        ckpt.step(step)
print(json.dumps({"losses": losses}), flush=True)
dist.destroy_process_group()
