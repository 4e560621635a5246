"""Train a small language model on the source of Python's standard library, and lose nothing when it is killed.

Ctrl-C, ``kill`` or ``kill -9`` it, then run it again: it continues, to the bit. ``relight ls runs/first`` shows from
where.
"""

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import relight

STEPS, CONTEXT = 1000, 64


class Bytes(nn.Module):
    """Guesses each next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 128)
        self.rnn = nn.GRU(128, 256, 2, batch_first=True, dropout=0.1)
        self.out = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(self.embed(x))[0])


torch.manual_seed(0)
source = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))[:1_000_000]
text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
loader = DataLoader(
    text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT), batch_size=16, shuffle=True, drop_last=True
)

model = Bytes()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
ckpt = relight.Checkpointer(  # relight: all that has a state, when to save it, what to keep
    "runs/first",
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    data=loader,
    save=relight.every(steps=100) | relight.every(minutes=5),
    keep=relight.keep(last=3),
)
step = start = ckpt.restore()  # relight: the first step still to do
print(f"resumed from step {start}" if start else "a fresh run")
while step < STEPS:
    for batch in loader:  # relight: continues in the middle of the epoch
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        ckpt.step(step, loss=loss)  # relight: saves when it is time to, and before the process is ended by a signal
        step += 1
        if step % 50 == 0:
            print(f"step {step:>5}  loss {loss.item():.4f}", flush=True)
        if step == STEPS:
            break
ckpt.close()  # relight:
