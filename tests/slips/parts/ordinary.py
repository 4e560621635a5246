"""Shared code of the slips' scripts: a small model. Its weight states how many steps it was trained, and from which
start."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time

import torch

import relight
from relight import Checkpointer, every, keep

__all__ = [
    "Checkpointer",
    "Net",
    "command",
    "every",
    "fresh",
    "keep",
    "made",
    "options",
    "os",
    "relight",
    "sys",
    "time",
    "torch",
    "train",
    "work",
]


class Net(torch.nn.Module):
    """A weight that begins at a thousand times its origin."""

    def __init__(self, origin: int = 2, size: int = 4) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((size,), 1000.0 * origin))

    def forward(self) -> torch.Tensor:
        """Return minus the sum, so that a step of SGD at rate 1 adds 1."""
        return -self.w.sum()


def made(origin: int = 2, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> tuple[Net, torch.optim.Optimizer]:
    """Return a model and its optimizer."""
    model = Net(origin)
    return model, kind(model.parameters(), lr=1.0)


def options(**more: object) -> dict[str, object]:
    """Return a model and an optimizer as keyword arguments, and ``more``."""
    model, optimizer = made()
    return {"model": model, "optimizer": optimizer, **more}


def work(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Make one step of training, in which the weight grows by 1. Return the loss."""
    optimizer.zero_grad()
    loss = model()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def train(
    ckpt: Checkpointer,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    start: int,
    end: int,
    **metrics: object,
) -> None:
    """Steps from ``start`` to before ``end``."""
    for step in range(start, end):
        work(model, optimizer)
        ckpt.step(step, **metrics)


def fresh(path: str, **more: object) -> Checkpointer:
    """A Checkpointer that begins a new branch; on code without that option, one that does not restore."""
    try:
        return Checkpointer(path, fresh=True, **more)
    except relight.ConfigError as error:
        raise SystemExit(f"no such option: {error}") from None


def command(*arguments: str) -> tuple[int, str]:
    """Run ``relight`` with arguments. Return its exit status and its output."""
    from relight.cli import main

    kept, sys.argv = sys.argv, ["relight", *arguments]
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            result = main()
            code = result if isinstance(result, int) else 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    sys.argv = kept
    print(f"$ relight {' '.join(arguments)}\n{out.getvalue()}{err.getvalue()}exit {code}", flush=True)
    return code, out.getvalue() + err.getvalue()
