"""Optimizers of the killed job: for each group and name, what makes them for a model."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

LATER = 25
"""Step at which the job adds its last layer's parameters to the optimizer of the name ``later``."""
Make = Callable[[Any], list[Any]]


def made_by(module: str, name: str, **settings: Any) -> Make:
    """Return what makes one optimizer of all parameters."""

    def make(model: torch.nn.Module) -> list[Any]:
        optimizer = getattr(importlib.import_module(module), name)(model.parameters(), **settings)
        if module == "schedulefree":
            optimizer.train()
        return [optimizer]

    return make


def two(model: torch.nn.Module) -> list[Any]:
    """Return Muon for the matrices, and AdamW for the vectors: as Muon is used."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(vectors, lr=1e-3)]


def without_last(model: Any) -> list[Any]:
    """Return AdamW without the last layer, which the job adds later."""
    return [torch.optim.AdamW(model[:-1].parameters(), lr=1e-3)]


GROUPS: dict[str, dict[str, Make]] = {
    "torch": {
        "later": without_last,
        "AdamW_fused": made_by("torch.optim", "AdamW", lr=1e-3, fused=True),
        "AdamW_foreach": made_by("torch.optim", "AdamW", lr=1e-3, foreach=True),
        "Adafactor": made_by("torch.optim", "Adafactor", lr=1e-2),
    },
    "muon": {"Muon_and_AdamW": two},
    "bitsandbytes": {
        "AdamW8bit": made_by("bitsandbytes.optim", "AdamW8bit", lr=1e-3),
        "Lion8bit": made_by("bitsandbytes.optim", "Lion8bit", lr=1e-4),
        "PagedAdamW8bit": made_by("bitsandbytes.optim", "PagedAdamW8bit", lr=1e-3),
    },
    "torchao": {
        "AdamW8bit": made_by("torchao.optim", "AdamW8bit", lr=1e-3),
        "AdamW4bit": made_by("torchao.optim", "AdamW4bit", lr=1e-3),
        "AdamWFp8": made_by("torchao.optim", "AdamWFp8", lr=1e-3),
    },
    "schedulefree": {"AdamWScheduleFree": made_by("schedulefree", "AdamWScheduleFree", lr=1e-3, warmup_steps=20)},
    "prodigyopt": {"Prodigy": made_by("prodigyopt", "Prodigy", lr=1.0)},
    "pytorch_optimizer": {
        "Shampoo": made_by("pytorch_optimizer", "Shampoo", lr=1e-3),
        "SOAP": made_by("pytorch_optimizer", "SOAP", lr=1e-3),
        "Lion": made_by("pytorch_optimizer", "Lion", lr=1e-4),
    },
}
