"""A small real training run with everything that can go wrong on resume: dropout, a schedule, accumulation, shuffling, workers, autocast.

Run in a process of its own by ``test_grid.py``, which kills it. What it did is appended to a ledger, one line a finished step.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import relight
from relight.format import hexdigest
from relight.store.disk import Disk

SAMPLES, BATCH = 48, 2
DEVICE = os.environ.get("TESTS_DEVICE", "cpu")
"""Device of the training. ``make device`` runs the grid on the simulated accelerator."""


@dataclass(frozen=True)
class Cell:
    """One configuration of the grid."""

    workers: int
    accumulation: int
    autocast: bool
    stateful: bool
    persistent: bool = False

    @property
    def steps_an_epoch(self) -> int:
        return SAMPLES // BATCH // self.accumulation

    @property
    def steps(self) -> int:
        return 2 * self.steps_an_epoch + max(2, self.steps_an_epoch // 3)


@dataclass(frozen=True)
class Kill:
    """Kill this process at the end of ``step``; or, with ``call``, at that disk call (counted from 0) of the save at
    ``step``."""

    step: int
    call: int | None = None


class Words(Dataset):
    """Real text, the licence in Python's own ``LICENSE``-like docs; samples carry their index. Plain loaders also get noise made in the worker."""

    def __init__(self, noisy: bool) -> None:
        text = (json.__doc__ or "").encode() * 4
        self.rows = [torch.tensor(list(text[7 * i : 7 * i + 17]), dtype=torch.long) for i in range(SAMPLES)]
        self.noisy = noisy

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        noise = torch.rand(()) if self.noisy else torch.zeros(())
        return index, self.rows[index], noise


class Model(nn.Module):
    """Embedding, a norm with running statistics, dropout, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 24)
        self.norm = nn.BatchNorm1d(24)
        self.mix = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Dropout(0.2), nn.Linear(48, 24))
        self.head = nn.Linear(24, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * (1 + 0.1 * noise[:, None, None])
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x + self.mix(x))


def make_loader(cell: Cell) -> DataLoader:
    """Shuffled; stateful or plain."""
    kind = DataLoader
    if cell.stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader

        kind = StatefulDataLoader
    return kind(
        # Noise made in a worker is not exact where workers outlive an epoch, and where the loader does not read again: docs/guarantees.md.
        Words(noisy=not cell.stateful and not cell.persistent),
        batch_size=BATCH,
        shuffle=True,
        num_workers=cell.workers,
        persistent_workers=cell.persistent and cell.workers > 0,
        multiprocessing_context="fork" if cell.workers else None,  # this process itself was started by a fork server
    )


class KillingDisk(Disk):
    """Kills its process at the nth storage call after it was armed."""

    armed: int | None = None

    def __getattribute__(self, name: str):
        value = object.__getattribute__(self, name)
        if name.startswith("_") or name == "armed" or KillingDisk.armed is None:
            return value
        if KillingDisk.armed == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        KillingDisk.armed -= 1
        return value


def train(folder: str, run: str, cell: Cell, kill: Kill | None, every: int) -> None:
    """Train to the end, or to the kill. A second call resumes from the last save."""
    torch.set_num_threads(1)
    torch.manual_seed(11)
    import relight.store.local as local

    if kill and kill.call is not None:
        local.Disk = KillingDisk
    model = Model().to(DEVICE)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=3e-3
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5) * 0.98**step)
    loader = make_loader(cell)
    ckpt = relight.Checkpointer(
        f"{folder}/{run}",
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=loader,
        save=relight.every(steps=every),
        keep=relight.keep(last=2),
        # A kill inside a save needs a save in the foreground. The other kills, directly after a step, interrupt the agent.
        background=False if kill and kill.call is not None else None,
    )
    start = ckpt.restore()
    ledger = os.open(f"{folder}/{run}.ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    batches = iter(loader)
    for step in range(start, cell.steps):
        ids: list[int] = []
        total = 0.0
        for _ in range(cell.accumulation):
            try:
                index, tokens, noise = next(batches)
            except StopIteration:
                batches = iter(loader)
                index, tokens, noise = next(batches)
            ids += index.tolist()
            tokens, noise = tokens.to(DEVICE), noise.to(DEVICE)
            cast = torch.autocast(DEVICE, dtype=torch.bfloat16) if cell.autocast else contextlib.nullcontext()
            with cast:
                logits = model(tokens[:, :-1], noise)
            loss = (
                nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()) / cell.accumulation
            )
            loss.backward()
            total += loss.item()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        line = json.dumps({"step": step, "loss": total.hex(), "ids": ids, "state": digest(model, optimizer)})
        os.write(ledger, line.encode() + b"\n")
        if kill and kill.step == step:
            KillingDisk.armed = kill.call
        ckpt.step(step, loss=total)
        if kill and kill.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
    ckpt.close()
    Path(f"{folder}/{run}.done").write_text("done")
    os._exit(0)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """One hash over parameters, buffers and moments."""
    parts = [
        t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for t in model.state_dict().values()
        if t.ndim
    ]
    for state in optimizer.state_dict()["state"].values():
        parts += [value.cpu().numpy().tobytes() for value in state.values()]
    return hexdigest(b"".join(parts))
