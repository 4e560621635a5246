"""Optimizers and schedulers: their hooks, and schedulers inside others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from relight.torch_private.modules import registered_hooks
from relight.torch_private.names import TorchName, all_exist, report

_STEP_HOOKS, _STATE_HOOKS = (
    tuple(TorchName("torch.optim:Optimizer", name, use, "a hook is registered and removed to find the others") for name in names)
    for use, names in (
        (
            "hooks of the live optimizer, which a trial step of its copy must not call",
            ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
        ),
        (
            "whether hooks change what an optimizer saves or loads",
            (
                "_optimizer_state_dict_pre_hooks",
                "_optimizer_state_dict_post_hooks",
                "_optimizer_load_state_dict_pre_hooks",
                "_optimizer_load_state_dict_post_hooks",
            ),
        ),
    )
)  # fmt: skip
_REGISTER_STATE_HOOKS = (
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
)
OPTIMIZER_HOOKS = frozenset(each.name for each in (*_STEP_HOOKS, *_STATE_HOOKS))
"""Attributes of an optimizer that hold hooks."""
_has_step_hooks, _has_optimizer_hooks = all_exist(_STEP_HOOKS), all_exist(_STATE_HOOKS)
_RATES = TorchName(
    "torch.optim.lr_scheduler:LRScheduler",
    "_last_lr",
    "learning rates that are lowered after a rollback",
    "get_last_lr() returns the former rates until the scheduler's next step",
)
_INNER = TorchName(
    "torch.optim.lr_scheduler:SequentialLR",
    "_schedulers",
    "schedulers inside a scheduler, with their own base rates",
    "schedulers in any list of a scheduler count as inside it",
)
_has_inner = _INNER.exists


def has_state_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks may change what an optimizer saves or loads."""
    if _has_optimizer_hooks:
        return any(getattr(optimizer, each.name, None) for each in _STATE_HOOKS)
    report(*_STATE_HOOKS)
    return any(registered_hooks(optimizer, _REGISTER_STATE_HOOKS))


def clear_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Remove the hooks of an optimizer's step. The optimizer must not share its dicts with another."""
    if _has_step_hooks:
        vars(optimizer).update((each.name, OrderedDict()) for each in _STEP_HOOKS)
        return
    report(*_STEP_HOOKS)
    for hooks in registered_hooks(optimizer, ("register_step_pre_hook", "register_step_post_hook")):
        hooks.clear()


def rate_attributes() -> tuple[str, ...]:
    """Return the attributes in which a scheduler keeps learning rates, in lists."""
    report(_RATES)
    return "base_lrs", "max_lrs", "_last_lr"


def inner_schedulers(schedule: object) -> Sequence[Any]:
    """Return the schedulers inside a scheduler."""
    if _has_inner:
        return getattr(schedule, "_schedulers", ())
    report(_INNER)
    lists = [value for value in vars(schedule).values() if isinstance(value, (list, tuple))]
    return [each for value in lists for each in value if isinstance(each, LRScheduler)]


NAMES = (*_STEP_HOOKS, *_STATE_HOOKS, _RATES, _INNER)
