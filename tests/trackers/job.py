"""A training that logs each step: ``job.py KIND ROOT STEPS [fresh]``. Tests kill it."""

import importlib.util
import sys
import time

import torch

import relight
import relight.integrations.trackers.tracker as base
from relight.integrations import trackers

base.INTERVAL_S = 0.1  # so that kills find rows in every state
kind, root, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])


def lines() -> trackers.Tracker:
    """Return the tracker of the guide: its code is next to the run."""
    spec = importlib.util.spec_from_file_location("lines", f"{root}/lines.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Lines(f"{root}/lines")


tracker = {
    "lines": lines,
    "tensorboard": lambda: trackers.TensorBoard(f"{root}/tensorboard"),
    "wandb": lambda: trackers.WandB("demo", mode="offline", dir=root, settings={"console": "off", "silent": True}),
    "mlflow": lambda: trackers.MLflow("demo", uri=f"sqlite:///{root}/mlflow.db"),
}[kind]()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with (
    tracker,
    relight.Checkpointer(
        f"{root}/runs/demo",
        model=model,
        optimizer=optimizer,
        tracker=tracker,
        save=relight.every(steps=7),
        fresh="fresh" in sys.argv,
    ) as ckpt,
):
    for step in range(ckpt.restore(), steps):
        inputs = torch.randn(8, 4)
        loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tracker.log(step, loss=loss)
        if step % 5 == 0:
            tracker.log(step, rate=0.01)
        ckpt.step(step, loss=loss)
        print(step, loss.item(), flush=True)
        time.sleep(0.04)
