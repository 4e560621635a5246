"""A training script with a bug planted in its resume, chosen by its first argument. ``relight drill --prove`` has to name each."""

import random
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import relight

BUG = sys.argv[1]


class Noisy(Dataset):
    """Samples with randomness that is made in the worker."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return index, torch.full((8,), float(index)) / 32 + 0.1 * torch.rand(8) + random.random()


torch.set_num_threads(1)
torch.manual_seed(5)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
loader = DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=1)
ckpt = relight.Checkpointer(
    "unused/run", save=None, model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, data=loader
)
start = ckpt.restore()
resumed = start > 0
if resumed and BUG == "scheduler":
    scheduler.step()
if resumed and BUG == "scaler":
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=2)
if resumed and BUG == "moment":
    optimizer.state[model[0].weight]["exp_avg"].zero_()
if resumed and BUG == "worker":
    loader.worker_init_fn = lambda worker: random.seed(99)
batches = iter(loader)
if resumed and BUG == "rng":
    torch.manual_seed(5)
if resumed and BUG == "loader":
    next(batches)
for step in range(start, 20):
    try:
        ids, batch = next(batches)
    except StopIteration:
        batches = iter(loader)
        ids, batch = next(batches)
    loss = model(batch).pow(2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scheduler.step()
    ckpt.step(step, loss=loss, samples=ids)
