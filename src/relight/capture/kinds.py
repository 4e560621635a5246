"""Classify components by what they are."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from relight.capture.plain_forms import plain_form
from relight.capture.rng import is_generator
from relight.capture.sharded import Flat, is_spread
from relight.capture.standard_values import Unstorable
from relight.torch_private.modules import HARMLESS_HOOKS, WRAPPERS, children_of, parameters_of, wrapped_attribute

MODULE, OPTIMIZER, SCHEDULER, SCALER = "module", "optimizer", "scheduler", "scaler"
LOADER, STATEFUL, RNG, VALUE = "loader", "stateful", "rng", "value"
_WRAPPERS = {
    **WRAPPERS,
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "_FabricModule": "_forward_module",
}
"""Modules that wrap the user's own: by class name, the attribute that holds it."""


class RankZeroComponent:
    """Base class of components with a state on rank 0 only, such as a tracker: other ranks need not agree on it."""


def kind_of(value: Any) -> str:
    """Return ``module``, ``optimizer``, ``scheduler``, ``scaler``, ``loader``, ``stateful``, ``rng`` or ``value``."""
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
    if isinstance(value, dict) and not hasattr(type(value), "state_dict"):
        return VALUE  # attributes of a class such as EasyDict are its entries
    if (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    ):
        if "GradScaler" in type(value).__name__:
            return SCALER
        return SCHEDULER if hasattr(value, "last_epoch") and hasattr(value, "get_last_lr") else STATEFUL
    return VALUE


def is_component(value: object) -> bool:
    """Return whether a value by itself is a state worth a name: an object with ``state_dict``, a generator, a tensor,
    an array, a container.

    A configuration object (DictConfig, Namespace, dataclass) counts. Plain values (numbers, texts, paths, dates) do not
    count: a misspelt option is one. Nor do values that no save can hold.
    """
    if kind_of(value) != VALUE or isinstance(
        value, (torch.Tensor, Flat, bytearray, Mapping, list, tuple, deque, set, frozenset)
    ):
        return True
    numpy = sys.modules.get("numpy")
    if is_spread(value) or (numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))):
        return True
    try:
        return plain_form(value) is not None
    except Unstorable:  # the first save names the path
        return True


def is_large(value: object) -> bool:
    """Return whether a component's state is live memory (parameters, moments, tensors, arrays): too large to copy at
    every step."""
    kind = kind_of(value)
    if kind in (LOADER, RNG):
        return False
    if kind in (SCHEDULER, SCALER, STATEFUL):
        return _holds_memory(value.state_dict())  # type: ignore[attr-defined]
    return kind != VALUE or _holds_memory(value)


def memory_in(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yield tensors and arrays in plain containers."""
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
    """Return the user's own module inside ``torch.compile`` and data-parallel wrappers, however they are nested."""
    while (name := wraps(module)) is not None:
        module = getattr(module, name)
    return module


def wrapped(module: nn.Module) -> list[tuple[str, str]]:
    """Return, for each wrapper below ``module``, innermost first: the prefix of its state's keys, and the prefix with
    the wrapper's element."""
    prefixes: list[tuple[str, str]] = []

    def visit(node: nn.Module, prefix: str) -> None:
        name = wraps(node)
        if name is not None:
            prefixes.append((prefix, f"{prefix}{name}."))
        for key, child in children_of(node).items():
            if child is not None:
                visit(child, f"{prefix}{key}.")

    visit(module, "")
    return sorted(prefixes, key=lambda pair: -len(pair[1]))


def own_name(key: str, wrappers: list[tuple[str, str]]) -> str:
    """Return a state's key or a parameter's name without the wrappers' elements."""
    for prefix, inside in wrappers:
        if key.startswith(inside):
            key = prefix + key.removeprefix(inside)
    return key


def named_parameters(module: nn.Module, *, repeats: bool = False) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of the unwrapped module under their own names."""
    inner, flattened = module, False
    while (name := wraps(inner)) is not None:
        flattened = flattened or type(inner).__name__ == "FullyShardedDataParallel"
        inner = getattr(inner, name)
    if flattened:
        inner = module  # it may keep parameters on a wrapper further in
    wrappers = wrapped(inner)
    if flattened or type(inner).named_parameters is nn.Module.named_parameters:
        pairs = _own_parameters(inner, repeats)
    else:
        pairs = list(inner.named_parameters(remove_duplicate=not repeats))
    return [(own_name(name, wrappers), parameter) for name, parameter in pairs] if wrappers else pairs


def _own_parameters(module: nn.Module, repeats: bool) -> list[tuple[str, nn.Parameter]]:
    """Return what ``nn.Module.named_parameters`` gives, in a third of the time."""
    pairs: list[tuple[str, nn.Parameter]] = []
    for path, owner in module.named_modules(remove_duplicate=not repeats):
        prefix = f"{path}." if path else ""
        pairs += [(prefix + key, value) for key, value in parameters_of(owner).items() if value is not None]
    ids = [] if repeats else list(map(id, map(itemgetter(1), pairs)))
    if len(set(ids)) < len(ids):  # keep the first of several names
        first = dict(zip(reversed(ids), reversed(range(len(ids))), strict=True))
        return [pair for number, pair in enumerate(pairs) if first[ids[number]] == number]
    return pairs


def wraps(module: nn.Module) -> str | None:
    """Return the attribute in which a wrapper holds the user's own module; None if ``module`` is not a wrapper."""
    name = _WRAPPERS.get(type(module).__name__)
    return None if name is None else wrapped_attribute(module, name)


def foreign_hooks(hooks: Mapping[Any, Any] | None) -> bool:
    """Return whether there are hooks that may change a module's state. torch's own wrappers' hooks keep it the same."""
    return hooks is not None and not all(
        str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith(HARMLESS_HOOKS)
        for hook in hooks.values()
    )


def is_swapped(value: object) -> bool | None:
    """Return whether an averaged copy reports that it is swapped into the model; None if it reports nothing."""
    if isinstance(value, dict):
        return None
    for name in ("swapped", "is_swapped", "swapped_in"):
        flag = getattr(value, name, None)
        if isinstance(flag, bool):
            return flag
    if hasattr(value, "collected_params") and hasattr(value, "shadow_params"):
        return value.collected_params is not None
    return None
