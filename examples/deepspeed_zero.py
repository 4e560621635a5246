"""DeepSpeed ZeRO, writing its checkpoints in Relight's format. Kill it at any moment and run it again: the last line is the same.

``torchrun --nproc-per-node=2 examples/deepspeed_zero.py``; ``ZERO=1``, ``2`` or ``3`` is the stage.
"""

import os
import sys

import deepspeed
import torch
from torch import nn

from relight.integrations.deepspeed_engine import CheckpointEngine  # relight:

STEPS = 40
torch.manual_seed(0)
deepspeed.init_distributed(dist_backend="gloo")
rank = torch.distributed.get_rank()
model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
config = {
    "train_batch_size": 16,
    "zero_optimization": {"stage": int(os.environ.get("ZERO", "2")), "stage3_param_persistence_threshold": 0},
    "bf16": {"enabled": True},
    "zero_force_ds_cpu_optimizer": False,
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, _, _, scheduler = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
engine.checkpoint_engine = CheckpointEngine()  # relight: before the first save or load
folder = sys.argv[1] if len(sys.argv) > 1 else "runs/deepspeed"
path, state = engine.load_checkpoint(folder)
start = state["step"] if path else 0
for step in range(start, STEPS):
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))[rank * 8 : rank * 8 + 8].bfloat16()
    loss = (engine(x) - x.sin().sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
    if rank == 0:
        print(f"step {step + 1:>4}  loss {loss.item():.9f}", flush=True)
    if (step + 1) % 4 == 0:
        engine.save_checkpoint(folder, tag=f"step-{step + 1}", client_state={"step": step + 1})
