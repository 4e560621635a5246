"""A training loop that survives ``kill -9``. Kill it at any moment and run it again: the last line is the same."""

import torch

import relight

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters())
# relight:
ckpt = relight.Checkpointer("runs/eight-lines", model=model, optimizer=optimizer, save=relight.every(steps=500))
start = ckpt.restore()  # relight: 0 on a fresh run, else the first step still to do
print(f"resumed from step {start}" if start else "a fresh run")
for step in range(start, 20_000):
    loss = (model(x := torch.randn(32, 8)) - x.sin().sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ckpt.step(step, loss=loss)  # relight: saves when it is time to
    if (step + 1) % 2000 == 0:
        print(f"step {step + 1:>6}  loss {loss.item():.6f}")
ckpt.close()  # relight:
