"""The demo's training script. It is an ordinary script; the lines marked ``relight:`` are all that it needs to survive ``kill -9``.

Run it with ``python -m relight.demo.train --store runs --run mine --steps 100``.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import relight
from relight.demo.gpt import GPT
from relight.demo.journal import DemoJournal
from relight.demo.shape import SHAPES, DemoSize
from relight.demo.text import read_text


def main() -> None:
    """Train, starting from the run's newest checkpoint."""
    args = parse_args()
    shape = SHAPES[args.shape]
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    model = GPT(context=shape.context, width=shape.width, layers=shape.layers, heads=shape.heads).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = warm_up_then_cosine(optimizer, args.steps)
    loader = make_loader(TextWindows(shape.context, shape.windows), shape)
    journal = DemoJournal(args.journal or args.store / f"{args.run}.jsonl")

    ckpt = relight.Checkpointer(  # relight: what the state is, when to save it, what to keep
        args.store / args.run,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=loader,
        save=relight.every(steps=args.save_every or shape.save_every),
        keep=relight.keep(last=3),
    )
    start = ckpt.restore()  # relight: 0 on a fresh run, else the first step still to do
    journal.started(start, **facts(model, loader))

    batches = forever(loader)
    for step in range(start, args.steps):
        loss, samples = 0.0, hashlib.sha256()
        for _ in range(shape.accumulate):
            ids, bytes_in, bytes_next = next(batches)
            micro_loss = model.loss(bytes_in.to(args.device), bytes_next.to(args.device)) / shape.accumulate
            micro_loss.backward()  # type: ignore[no-untyped-call]
            loss += micro_loss.item()
            samples.update(ids.numpy().tobytes())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        journal.finished(step, loss, samples.hexdigest()[:16])

        before = time.perf_counter()
        save = ckpt.step(step, loss=loss)  # relight: the step is done; saves if it is time to
        if save:
            journal.saved(step, time.perf_counter() - before, save.bytes)

    ckpt.close()  # relight
    journal.ended(digest(model, optimizer))


class TextWindows(torch.utils.data.Dataset[tuple[int, Tensor, Tensor]]):
    """``count`` windows, evenly spaced in the text. A sample is its number, its bytes, and the byte that follows each."""

    def __init__(self, context: int, count: int) -> None:
        self.text = torch.frombuffer(bytearray(read_text()), dtype=torch.uint8)
        self.context = context
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        offset = index * (len(self.text) - self.context - 1) // self.count
        piece = self.text[offset : offset + self.context + 1].long()
        return index, piece[:-1], piece[1:]


def make_loader(data: TextWindows, shape: DemoSize) -> Any:
    """Return a shuffling loader with worker processes: torchdata's if installed, which resumes without rereading data."""
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader as Loader
    except ImportError:
        from torch.utils.data import DataLoader as Loader
    return Loader(data, batch_size=shape.batch, shuffle=True, num_workers=shape.workers, drop_last=True)


def forever(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader


def warm_up_then_cosine(optimizer: torch.optim.Optimizer, steps: int) -> SequentialLR:
    """Return a learning-rate schedule: a linear warm-up in a tenth of the steps, then a cosine decay."""
    warm = max(1, steps // 10)
    up, down = (
        LinearLR(optimizer, 0.05, total_iters=warm),
        CosineAnnealingLR(optimizer, max(1, steps - warm), eta_min=1e-5),
    )
    return SequentialLR(optimizer, [up, down], [warm])


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of parameters and optimizer state, with every bit."""
    hasher = hashlib.sha256()
    for name, value in sorted(_flat(model.state_dict(), "model")) + sorted(_flat(optimizer.state_dict(), "optimizer")):
        hasher.update(f"{name}={value if not isinstance(value, Tensor) else (value.dtype, value.shape)}".encode())
        if isinstance(value, Tensor):
            hasher.update(value.detach().cpu().contiguous().numpy().tobytes())
    return hasher.hexdigest()


def _flat(value: Any, name: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in _flat(item, f"{name}.{key}")]
    if isinstance(value, (list, tuple)):
        return [leaf for key, item in enumerate(value) for leaf in _flat(item, f"{name}.{key}")]
    return [(name, value)]


def facts(model: nn.Module, loader: Any) -> dict[str, object]:
    """Return facts about the training for the report."""
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "text_bytes": len(loader.dataset.text),
        "loader": type(loader).__name__,
        "torch": torch.__version__,
    }


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, default=0, metavar="STEPS")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="device of the training, such as cuda (default: cpu)")
    parser.add_argument("--journal", type=Path, help="path of the journal (default: next to the run)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
