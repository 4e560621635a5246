"""Optimizers of the killed job: for each name, what makes them for a model."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

LATER = 25
"""Step at which the job adds its last layer's parameters to the optimizer, for a name that ends with ``later``."""


def made_by(module: str, name: str, **settings: Any) -> Callable[[torch.nn.Module], list[Any]]:
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


KINDS: dict[str, Callable[[Any], list[Any]]] = {
    "muon-and-adamw": two,
    "adamw-later": without_last,
    "adamw-fused": made_by("torch.optim", "AdamW", lr=1e-3, fused=True),
    "adamw-foreach": made_by("torch.optim", "AdamW", lr=1e-3, foreach=True),
    "adafactor": made_by("torch.optim", "Adafactor", lr=1e-2),
    "bnb-adamw8bit": made_by("bitsandbytes.optim", "AdamW8bit", lr=1e-3),
    "bnb-lion8bit": made_by("bitsandbytes.optim", "Lion8bit", lr=1e-4),
    "bnb-paged-adamw8bit": made_by("bitsandbytes.optim", "PagedAdamW8bit", lr=1e-3),
    "ao-adamw8bit": made_by("torchao.optim", "AdamW8bit", lr=1e-3),
    "ao-adamw4bit": made_by("torchao.optim", "AdamW4bit", lr=1e-3),
    "ao-adamwfp8": made_by("torchao.optim", "AdamWFp8", lr=1e-3),
    "schedulefree-adamw": made_by("schedulefree", "AdamWScheduleFree", lr=1e-3, warmup_steps=20),
    "prodigy": made_by("prodigyopt", "Prodigy", lr=1.0),
    "shampoo": made_by("pytorch_optimizer", "Shampoo", lr=1e-3),
    "soap": made_by("pytorch_optimizer", "SOAP", lr=1e-3),
    "lion": made_by("pytorch_optimizer", "Lion", lr=1e-4),
}
