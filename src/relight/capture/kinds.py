"""What a component is, by looking at it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from relight.capture.rng import is_generator

MODULE, OPTIMIZER, SCHEDULER, SCALER = "module", "optimizer", "scheduler", "scaler"
LOADER, STATEFUL, RNG, VALUE = "loader", "stateful", "rng", "value"
_WRAPPERS = ("DistributedDataParallel", "DataParallel")


def kind_of(value: Any) -> str:
    """``module``, ``optimizer``, ``scheduler``, ``scaler``, ``loader``, ``stateful``, ``rng`` or ``value``."""
    if isinstance(value, nn.Module):
        return MODULE
    if isinstance(value, torch.optim.Optimizer):
        return OPTIMIZER
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return SCHEDULER
    if isinstance(value, torch.utils.data.DataLoader):
        return LOADER
    if is_generator(value):
        return RNG
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        if "GradScaler" in type(value).__name__:
            return SCALER
        return SCHEDULER if hasattr(value, "last_epoch") and hasattr(value, "get_last_lr") else STATEFUL
    return VALUE


def is_large(value: object) -> bool:
    """Whether a component's state is parameters or what an optimizer holds: too large to remember at every step."""
    return kind_of(value) in (MODULE, OPTIMIZER)


def unwrap(module: nn.Module) -> nn.Module:
    """The user's own module inside ``torch.compile`` and data-parallel wrappers, in whatever order they are nested."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and type(module).__name__ in _WRAPPERS:
            inner = getattr(module, "module", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def swapped_in(value: object) -> bool | None:
    """Whether an averaged copy says that it is swapped into the model; None if it says nothing."""
    for name in ("swapped", "is_swapped", "swapped_in"):
        flag = getattr(value, name, None)
        if isinstance(flag, bool):
            return flag
    if hasattr(value, "collected_params") and hasattr(value, "shadow_params"):
        return value.collected_params is not None
    return None
