"""Hooks that run before parameters change: before every ``optimizer.step`` of this process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class _Callback(NamedTuple):
    before: weakref.WeakMethod[Callable[..., None]]
    gives_optimizer: bool


_callbacks: tuple[_Callback, ...] = ()
"""Replaced, never changed: an optimizer's step, here or in another thread, may be iterating over it."""
_lock = threading.RLock()
_registered = False
"""Whether torch has the hook, which it calls for all optimizers of the process."""


def _call_all(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    dead = False
    for callback in _callbacks:
        call = callback.before()
        if call is None:
            dead = True
        elif callback.gives_optimizer:
            call(optimizer)
        else:
            call()
    if dead:
        _replace(None, None)


def _replace(added: _Callback | None, removed: _Callback | None) -> None:
    """Add and remove a callback, and drop the callbacks of deleted objects."""
    global _callbacks, _registered
    with _lock:
        if not _registered:
            register_optimizer_step_pre_hook(_call_all)  # type: ignore[arg-type]
            _registered = True
        kept = [callback for callback in _callbacks if callback is not removed and callback.before() is not None]
        _callbacks = (*kept, added) if added is not None else tuple(kept)


class OptimizerHook:
    """Call ``before(optimizer)`` at the start of any optimizer's step, until ``close`` or until the object of
    ``before`` is deleted.

    ``before`` is a bound method, held weakly. torch gets one hook for the process, which stays: torch iterates over its
    dictionary of hooks, so a hook must not be removed while an optimizer steps. The garbage collector could run there.
    """

    _gives_optimizer = True

    def __init__(self, before: Callable[..., None]) -> None:
        self._callback = _Callback(weakref.WeakMethod(before), self._gives_optimizer)  # type: ignore[arg-type]
        _replace(self._callback, None)

    def close(self) -> None:
        """Remove the hook. Idempotent."""
        _replace(None, self._callback)


class StepHook(OptimizerHook):
    """Call ``before()`` without the optimizer; otherwise like ``OptimizerHook``."""

    _gives_optimizer = False


def can_overlap(components: Iterable[object]) -> bool:
    """Return whether all optimizers among ``components`` call the hook. torch wraps ``step`` in an optimizer's
    ``__init__``."""
    return all(
        getattr(type(component).step, "hooked", False)
        for component in components
        if isinstance(component, torch.optim.Optimizer)
    )
