"""A training with FSDP2 for ``fsdp2_variants.py WAY RUN``. It prints each step's loss and is killed.

``WAY``: ``meta`` builds the model on the meta device, ``offload`` also keeps the shards on the CPU by FSDP2's own policy. Gradients of
two micro-batches are added up.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

import relight

way, run = sys.argv[1:]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
with torch.device("meta"):
    model = nn.Sequential(
        nn.Embedding(64, 32), nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True), nn.Linear(32, 64)
    )
mesh = dist.init_device_mesh("cpu", (world,))
policy = CPUOffloadPolicy(pin_memory=False) if way == "offload" else OffloadPolicy()
fully_shard(model[1], mesh=mesh, offload_policy=policy)
fully_shard(model, mesh=mesh, offload_policy=policy)
model.to_empty(device="cpu")
for module in model.modules():
    for name in ("reset_parameters", "_reset_parameters"):
        getattr(module, name, lambda: None)()
torch.manual_seed(1 + rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with relight.Checkpointer(run, model=model, optimizer=optimizer, save=relight.every(steps=5)) as ckpt:
    for step in range(ckpt.restore(), 40):
        optimizer.zero_grad()
        for micro_step in range(2):
            model.set_requires_gradient_sync(micro_step == 1)
            loss = model(torch.randint(0, 64, (4, 16))).square().mean() / 2
            loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step + 1:>3}  loss {loss.item()!r}", flush=True)
        ckpt.step(step, of_rank=rank, **({"of_rank_1": 1.0} if rank == 1 else {}))
dist.destroy_process_group()
