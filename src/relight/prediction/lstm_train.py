"""Training of the recurrent network. The only file of this package that imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from relight.prediction.lstm import CLASSES, INPUTS, NAMES
from relight.prediction.sealed_file import Arrays

Array = np.ndarray[Any, Any]
_BATCH, _RATE, _DECAY = 256, 2e-3, 0.05
_NOISE, _LEFT_OUT = 0.3, 0.3
"""Regularisation against overfitting to few failures: noise on the inputs, and dropout."""


class Network(nn.Module):
    """Fewer than 50,000 parameters."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.recur = nn.LSTM(INPUTS, size, batch_first=True)
        self.attend = nn.Linear(size, size)
        self.attend_to = nn.Linear(size, 1, bias=False)
        self.leave_out = nn.Dropout(_LEFT_OUT)
        self.head = nn.Linear(2 * size, len(CLASSES))

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Logits of the classes."""
        states, _ = self.recur(windows)
        weights = torch.softmax(self.attend_to(torch.tanh(self.attend(states))), dim=1)
        return torch.as_tensor(
            self.head(self.leave_out(torch.cat([(weights * states).sum(dim=1), states[:, -1]], dim=1)))
        )

    def arrays(self) -> Arrays:
        """Return the weights for ``Lstm``."""
        weight_in, weight_on, bias_in, bias_on = self.recur.all_weights[0]
        parts = (
            weight_in, weight_on, bias_in + bias_on, self.attend.weight, self.attend.bias, self.attend_to.weight[0], self.head.weight,
            self.head.bias,
        )  # fmt: skip
        return {name: part.detach().numpy().copy() for name, part in zip(NAMES, parts)}


def train_network(
    windows: Array,
    labels: Array,
    checked: tuple[Array, Array],
    *,
    seed: int,
    epochs: int,
    size: int,
    report: Callable[[str], None],
) -> Arrays:
    """Return the weights of the epoch with the least loss on ``checked`` windows and labels.

    Reproducible by the seed on one machine.

    Uses one thread: more do not help a network this small, and sums would differ with the number of threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _train(windows, labels, checked, seed, epochs, size, report)
    finally:
        torch.set_num_threads(threads)


def _train(
    windows: Array,
    labels: Array,
    checked: tuple[Array, Array],
    seed: int,
    epochs: int,
    size: int,
    report: Callable[[str], None],
) -> Arrays:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Network(size)
        counts = np.bincount(labels, minlength=len(CLASSES))
        share = torch.tensor(
            np.where(counts > 0, np.sqrt(len(labels) / np.maximum(counts, 1)), 0.0), dtype=torch.float32, device="cpu"
        )
        loss_of = nn.CrossEntropyLoss(weight=share / share.sum())
        optimizer = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=_DECAY)
        steps = epochs * -(-len(labels) // _BATCH)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=_RATE, total_steps=max(steps, 1))
        x, y = torch.from_numpy(windows), torch.from_numpy(labels)
        best, best_arrays = float("inf"), network.arrays()
        for epoch in range(epochs):
            network.train()
            for rows in torch.split(torch.randperm(len(y), device="cpu"), _BATCH):
                optimizer.zero_grad()
                batch = x[rows]
                loss = loss_of(network(batch + _NOISE * torch.randn_like(batch)), y[rows])
                loss.backward()
                nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                schedule.step()
            network.eval()
            with torch.no_grad():
                validation_loss = float(loss_of(network(torch.from_numpy(checked[0])), torch.from_numpy(checked[1])))
            report(f"lstm: epoch {epoch + 1} of {epochs}, loss {validation_loss:.4f} on validation")
            if validation_loss < best:
                best, best_arrays = validation_loss, network.arrays()
    return best_arrays
