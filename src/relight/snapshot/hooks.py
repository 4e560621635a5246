"""Hooks that run before parameters change: before every ``optimizer.step`` of this process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class OptimizerHook:
    """Call ``before(optimizer)`` at the start of any optimizer's step, until ``close`` or until the object of
    ``before`` is deleted.

    ``before`` is a bound method, held weakly.
    """

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
        """Remove the hook. Idempotent."""
        self._handle.remove()


class StepHook(OptimizerHook):
    """Call ``before()`` without the optimizer; otherwise like ``OptimizerHook``."""

    _gives_optimizer = False


def can_overlap(components: Iterable[object]) -> bool:
    """Return whether all optimizers among ``components`` call the hook. torch wraps ``step`` in an optimizer's
    ``__init__``."""
    return all(getattr(type(component).step, "hooked", False) for component in components if isinstance(component, torch.optim.Optimizer))
