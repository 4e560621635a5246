"""A loop with Accelerate, saving through Relight. Kill it at any moment and run it again: the last line is the same."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import relight
from relight.integrations.accelerate import checkpointer  # relight:

STEPS = 150
set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
x = torch.randn(400, 8)
loader = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
path = sys.argv[1] if len(sys.argv) > 1 else "runs/accelerate"
ckpt = checkpointer(  # relight: in place of save_state, load_state and skip_first_batches
    accelerator,
    path,
    save=relight.every(steps=5),
    keep=relight.keep(last=3),
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    data=loader,
)
step = ckpt.restore()  # relight:
while step < STEPS:
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            ckpt.step(step, loss=loss)  # relight:
            step += 1
            accelerator.print(f"step {step:>4}  loss {loss.item():.9f} rate {scheduler.get_last_lr()[0]!r}", flush=True)
            if step == STEPS:
                break
ckpt.close()  # relight:
