"""A training with an optimizer of a library: ``optimizer_job.py NAME RUN``. It prints the loss of each step; tests kill it."""

import sys

import torch
from tests.works_with.optimizer_kinds import KINDS, LATER

import relight
from relight.errors import CheckpointNotFound

STEPS = 60
name, run = sys.argv[1], sys.argv[2]
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.GELU(), torch.nn.Linear(128, 64)
)
optimizers = KINDS[name](model)
last = {"params": list(model[-1].parameters()), "lr": 1e-4}
try:
    saved = relight.open(run).latest().body.step
except CheckpointNotFound:
    saved = -1
if name.endswith("later") and saved >= LATER:
    optimizers[0].add_param_group(last)  # as it was at the save that is restored
components = {f"optimizer{number}": optimizer for number, optimizer in enumerate(optimizers)}
with relight.Checkpointer(run, model=model, **components, save=relight.every(steps=5)) as ckpt:
    for step in range(ckpt.restore(), STEPS):
        if name.endswith("later") and step == LATER:
            optimizers[0].add_param_group(last)
        x = torch.randn(16, 64)
        loss = (model(x) - x.sin()).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        print(f"step {step + 1:>4}  loss {loss.item()!r}", flush=True)
        ckpt.step(step)
