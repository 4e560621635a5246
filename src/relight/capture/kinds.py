"""What a component is, by looking at it."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from relight.capture.rng import is_generator
from relight.capture.sharded import Flat, is_spread

MODULE, OPTIMIZER, SCHEDULER, SCALER = "module", "optimizer", "scheduler", "scaler"
LOADER, STATEFUL, RNG, VALUE = "loader", "stateful", "rng", "value"
_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "_FabricModule": "_forward_module",
}
"""Modules that stand around the user's own: by class, the name under which they have it."""

_KNOWN_HOOKS = ("torch.distributed.fsdp.", "torch.distributed.algorithms._checkpoint.")


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
    if not isinstance(value, type) and callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        if "GradScaler" in type(value).__name__:
            return SCALER
        return SCHEDULER if hasattr(value, "last_epoch") and hasattr(value, "get_last_lr") else STATEFUL
    return VALUE


def is_component(value: object) -> bool:
    """Whether a value alone has a state worth a name: an object with ``state_dict``, a generator, a tensor, an array, a container.

    Plain values (numbers, texts, paths, dates) do not count: a misspelt option is one. Nor does what no save can hold.
    """
    if kind_of(value) != VALUE or isinstance(value, (torch.Tensor, Flat, bytearray, Mapping, list, tuple, deque, set, frozenset)):
        return True
    numpy = sys.modules.get("numpy")
    return is_spread(value) or (numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)))


def is_large(value: object) -> bool:
    """Whether a component's state is live memory (parameters, moments, tensors, arrays): too large to remember at every step, and
    not a copy of what it was then."""
    kind = kind_of(value)
    if kind in (LOADER, RNG):
        return False
    if kind in (SCHEDULER, SCALER, STATEFUL):
        return _holds_memory(value.state_dict())  # type: ignore[attr-defined]
    return kind != VALUE or _holds_memory(value)


def memory_in(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Tensors and arrays in plain containers."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor) or type(value).__name__ == "ndarray":
        yield value
    elif isinstance(value, (Mapping, list, tuple, deque)) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from memory_in(item, seen)


def _holds_memory(value: Any) -> bool:
    return next(memory_in(value), None) is not None


def unwrap(module: nn.Module) -> nn.Module:
    """The user's own module inside ``torch.compile`` and data-parallel wrappers, in whatever order they are nested."""
    while (name := wraps(module)) is not None:
        module = getattr(module, name)
    return module


def wrapped(module: nn.Module) -> list[tuple[str, str]]:
    """For each wrapper below ``module``, innermost first: the prefix of its state's keys, and that with the wrapper's own element."""
    found: list[tuple[str, str]] = []

    def visit(node: nn.Module, prefix: str) -> None:
        name = wraps(node)
        if name is not None:
            found.append((prefix, f"{prefix}{name}."))
        for key, child in node._modules.items():
            if child is not None:
                visit(child, f"{prefix}{key}.")

    visit(module, "")
    return sorted(found, key=lambda pair: -len(pair[1]))


def own_name(key: str, wrappers: list[tuple[str, str]]) -> str:
    """A state's key or a parameter's name as the module without wrappers would have it."""
    for prefix, inside in wrappers:
        if key.startswith(inside):
            key = prefix + key.removeprefix(inside)
    return key


def named_parameters(module: nn.Module, *, repeats: bool = False) -> list[tuple[str, nn.Parameter]]:
    """The parameters of the unwrapped module under their own names."""
    inner, flattened = module, False
    while (name := wraps(inner)) is not None:
        flattened = flattened or name == "_fsdp_wrapped_module"
        inner = getattr(inner, name)
    if flattened:
        inner = module  # it may keep parameters on a wrapper further in
    wrappers = wrapped(inner)
    if flattened or type(inner).named_parameters is nn.Module.named_parameters:
        found = _own_parameters(inner, repeats)
    else:
        found = list(inner.named_parameters(remove_duplicate=not repeats))
    return [(own_name(name, wrappers), parameter) for name, parameter in found] if wrappers else found


def _own_parameters(module: nn.Module, repeats: bool) -> list[tuple[str, nn.Parameter]]:
    """What ``named_parameters`` of ``nn.Module`` gives, in a third of the time."""
    seen: set[int] = set()
    found: list[tuple[str, nn.Parameter]] = []
    for path, one in module.named_modules(remove_duplicate=not repeats):
        prefix = f"{path}." if path else ""
        for key, parameter in one._parameters.items():
            if parameter is not None and (repeats or id(parameter) not in seen):
                seen.add(id(parameter))
                found.append((prefix + key, parameter))
    return found


def wraps(module: nn.Module) -> str | None:
    """The name under which a wrapper has the user's own module; None if it is none."""
    name = _WRAPPERS.get(type(module).__name__)
    return name if name in module._modules else None


def foreign_hooks(hooks: Mapping[Any, Any] | None) -> bool:
    """Whether there are hooks that may change what a module's state is. Those of torch's own wrappers see to it that it does not."""
    return hooks is not None and not all(
        str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith(_KNOWN_HOOKS) for hook in hooks.values()
    )


def is_swapped(value: object) -> bool | None:
    """Whether an averaged copy says that it is swapped into the model; None if it says nothing."""
    for name in ("swapped", "is_swapped", "swapped_in"):
        flag = getattr(value, name, None)
        if isinstance(flag, bool):
            return flag
    if hasattr(value, "collected_params") and hasattr(value, "shadow_params"):
        return value.collected_params is not None
    return None
