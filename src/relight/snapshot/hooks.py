"""The moment before parameters change: every ``optimizer.step`` of this process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class OptimizerHook:
    """Calls ``before(optimizer)`` at the start of any optimizer's step, until ``close`` or its object's end. ``before`` is a bound method,
    held weakly."""

    _gives_optimizer = True

    def __init__(self, before: Callable[..., None]) -> None:
        method = weakref.WeakMethod(before)  # type: ignore[arg-type]
        gives = self._gives_optimizer

        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            call = method()
            if call is not None:
                call(optimizer) if gives else call()

        self._handle = register_optimizer_step_pre_hook(hook)  # type: ignore[arg-type]
        weakref.finalize(before.__self__, self._handle.remove)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Twice is fine."""
        self._handle.remove()


class StepHook(OptimizerHook):
    """Calls ``before()``, as ``OptimizerHook`` does."""

    _gives_optimizer = False


def can_overlap(components: Iterable[object]) -> bool:
    """Whether all optimizers among ``components`` will call the hook: torch wraps ``step`` of those whose own ``__init__`` has run."""
    return all(getattr(type(one).step, "hooked", False) for one in components if isinstance(one, torch.optim.Optimizer))
