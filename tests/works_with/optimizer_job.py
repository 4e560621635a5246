"""A training with optimizers of a library: ``optimizer_job.py GROUP RUN``. Each optimizer has a model of its own.

It prints the losses of each step; tests kill it.
"""

import sys

import torch
from tests.works_with.optimizer_kinds import GROUPS, LATER

import relight
from relight.errors import CheckpointNotFound

STEPS = 50
group, run = sys.argv[1], sys.argv[2]
torch.set_num_threads(1)
torch.manual_seed(0)
models: dict[str, torch.nn.Module] = {}
optimizers: dict[str, list[torch.optim.Optimizer]] = {}
for name, make in GROUPS[group].items():
    models[name] = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.GELU(), torch.nn.Linear(128, 64)
    )
    optimizers[name] = make(models[name])


def add_last() -> None:
    """Add the last layer to the optimizer that lacks it."""
    if "later" in models:
        optimizers["later"][0].add_param_group({"params": list(models["later"][-1].parameters()), "lr": 1e-4})


try:
    saved = relight.open(run).latest().body.step
except CheckpointNotFound:
    saved = -1
if saved >= LATER:
    add_last()  # the restored save has this group
components = dict(models)
components |= {f"{name}_{number}": each for name, made in optimizers.items() for number, each in enumerate(made)}
with relight.Checkpointer(run, state=components, save=relight.every(steps=5)) as ckpt:
    for step in range(ckpt.restore(), STEPS):
        if step == LATER and saved < LATER:
            add_last()
        losses = []
        for name, model in models.items():
            x = torch.randn(16, 64)
            loss = (model(x) - x.sin()).square().mean()
            for optimizer in optimizers[name]:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers[name]:
                optimizer.step()
            losses.append(f"{name} {loss.item()!r}")
        print(f"step {step + 1:>4}  {' '.join(losses)}", flush=True)
        ckpt.step(step)
