"""Modules: what one holds itself, its hooks, and how its class saves and loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from copy import copy
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from relight.torch_private.names import TorchName, all_exist, report

_WRAPPED = tuple(
    TorchName(owner, name, "the module inside a wrapper", "the wrapper's only child is taken")
    for owner, name in (
        ("torch._dynamo.eval_frame:OptimizedModule", "_orig_mod"),
        ("torch.distributed.fsdp:FullyShardedDataParallel", "_fsdp_wrapped_module"),
        ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper:ActivationWrapper", "_checkpoint_wrapped_module"),
    )
)
WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
"""torch's wrappers that hold the user's module in a private attribute: by class name, its name."""
HARMLESS_HOOKS = ("torch.distributed.fsdp.", "torch.distributed.algorithms._checkpoint.")
"""Modules with hooks of torch that do not change a state. Hooks elsewhere cause calls of ``state_dict()``."""
DERIVING = ("torch.distributed.", "torch.nn.utils.", "torch._dynamo.")
"""Modules with classes that torch derives from the user's own at run time, as by ``fully_shard``."""

_PARAMETERS, _BUFFERS, _MODULES, _UNSAVED = (
    TorchName(
        "torch.nn:Module", name, use, "public methods are called in its place, and each capture walks the modules"
    )
    for name, use in (
        ("_parameters", "the parameters of one module, without a walk"),
        ("_buffers", "the buffers of one module, registered ones without a value too"),
        ("_modules", "the children of one module"),
        ("_non_persistent_buffers_set", "the buffers that a module does not save"),
    )
)
_HOOKS = tuple(
    TorchName(
        "torch.nn:Module",
        name,
        "whether hooks change what a module saves or loads",
        "a hook is registered and removed to find the others",
    )
    for name in (
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    )
)
_REGISTER_HOOKS = (
    "register_state_dict_post_hook",
    "register_state_dict_pre_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
)
SAVING, LOADING = "_save_to_state_dict", "_load_from_state_dict"
"""Methods by which a class of modules saves and loads its own part of a state."""
_SAVES = TorchName(
    "torch.nn:Module",
    SAVING,
    "whether a class saves its parameters and buffers as torch does",
    "every class counts as one that does not: state_dict() is called",
)
_LOADS = TorchName(
    "torch.nn:Module",
    LOADING,
    "whether a class takes tensors of another shape, found on a copy without memory",
    "load_state_dict() is called, and stored tensors of another shape are refused",
)
_STATE_VERSION = TorchName(
    "torch.nn:Module",
    "_version",
    "the version of a module's state, which its loading code gets",
    "the loading code gets None",
)
_COUNTERS = tuple(
    TorchName(
        owner,
        name,
        "bookkeeping of torch's own, which the report of unsaved state leaves out",
        "the report of unsaved state may list it",
    )
    for owner, name in (
        ("torch.optim.lr_scheduler:LRScheduler", "_opt_called"),
        ("torch.optim.lr_scheduler:LRScheduler", "_step_count"),
        ("torch.optim:Optimizer", "_zero_grad_profile_name"),
        ("torch.optim:Optimizer", "_warned_capturable_if_run_uncaptured"),
    )
)
_SET_BY_TORCH = frozenset(vars(nn.Module())) | {"training", *(each.name for each in _COUNTERS)}


def set_by_torch() -> Set[str]:
    """Return the attributes that torch itself sets on modules and optimizers."""
    report(*_COUNTERS)
    return _SET_BY_TORCH


def wrapped_attribute(module: nn.Module, name: str) -> str | None:
    """Return the attribute in which a wrapper holds the user's module: ``name``, unless this torch calls it otherwise.

    None if the class only has the name of a wrapper.
    """
    children = children_of(module)
    if name in children:
        return name
    if name not in WRAPPERS.values() or len(children) != 1 or not type(module).__module__.startswith("torch."):
        return None
    report(*(each for each in _WRAPPED if each.name == name))
    return next(iter(children))


def _children(module: nn.Module) -> dict[str, nn.Module]:
    report(_MODULES)
    modules = nn.Module.named_modules(module, remove_duplicate=False)
    return {name: child for name, child in modules if name and "." not in name}


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    report(_PARAMETERS)
    return dict(nn.Module.named_parameters(module, recurse=False, remove_duplicate=False))


def _own_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    report(_BUFFERS)
    return dict(nn.Module.named_buffers(module, recurse=False, remove_duplicate=False))


_has_unsaved = _UNSAVED.exists


def unsaved_buffers(module: nn.Module) -> Set[str]:
    """Return the names of a module's own buffers that it does not save."""
    if _has_unsaved:
        return getattr(module, "_non_persistent_buffers_set", frozenset())
    report(_UNSAVED)
    return buffers_of(module).keys() - nn.Module.state_dict(module, keep_vars=True).keys()


children_of: Callable[[nn.Module], Mapping[str, nn.Module | None]] = (
    attrgetter("_modules") if _MODULES.exists else _children
)
"""Returns a module's children by name."""
parameters_of: Callable[[nn.Module], Mapping[str, nn.Parameter | None]] = (
    attrgetter("_parameters") if _PARAMETERS.exists else _own_parameters
)
"""Returns a module's own parameters by name."""
buffers_of: Callable[[nn.Module], Mapping[str, torch.Tensor | None]] = (
    attrgetter("_buffers") if _BUFFERS.exists else _own_buffers
)
"""Returns a module's own buffers by name."""
_has_hooks = all_exist(_HOOKS)


def state_hooks(module: nn.Module) -> list[Mapping[Any, Any] | None]:
    """Return a module's hooks: after saving, before saving, before loading, after loading."""
    if _has_hooks:
        return [vars(module).get(each.name) for each in _HOOKS]
    report(*_HOOKS)
    return list(registered_hooks(module, _REGISTER_HOOKS))


def registered_hooks(owner: Any, ways: Sequence[str]) -> Iterator[dict[Any, Any]]:
    """Yield the hooks that were registered in each of these ways."""
    for way in ways:
        handle = getattr(owner, way)(lambda *ignored: None)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        yield hooks


Parts = tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any], Set[str], Any, Any]
_IN_PARTS = (_PARAMETERS, _BUFFERS, _MODULES, _UNSAVED, *_HOOKS[:2])


def _collected(module: nn.Module) -> Parts:
    parts = parameters_of(module), buffers_of(module), children_of(module), unsaved_buffers(module)
    after, before, *_ = state_hooks(module)
    return (*parts, after, before)


module_parts: Callable[[nn.Module], Parts] = (
    attrgetter(*(each.name for each in _IN_PARTS)) if all_exist(_IN_PARTS) else _collected
)
"""Returns a module's parameters, buffers, children, names of unsaved buffers, and hooks after and before saving.

One call in C for each module of each save. Without one of the names, it makes new dicts, which equal no former ones.
"""


def saves_as_torch(kind: type[nn.Module]) -> bool | None:
    """Return whether a class saves its own parameters and buffers as torch does; None: unknown."""
    if not hasattr(nn.Module, SAVING):
        report(_SAVES)
        return None
    return kind._save_to_state_dict is nn.Module._save_to_state_dict


def loads_as_torch(kind: type[nn.Module]) -> bool | None:
    """Return whether a class loads its own parameters and buffers by code of torch; None: unknown."""
    if not hasattr(nn.Module, LOADING):
        report(_LOADS)
        return None
    return kind._load_from_state_dict.__module__.startswith("torch.nn.")


def load_without_memory(module: nn.Module, state: Mapping[str, Any], prefix: str) -> tuple[list[str], list[str]]:
    """Load meta tensors into a copy of the module without memory. Return its errors and the keys that it did not expect.

    Raise whatever the class's own code raises.
    """
    if not all_exist(_IN_PARTS):
        report(*_IN_PARTS)
        return [f"torch {torch.__version__} has no way to copy a module without memory"], []
    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []
    if not hasattr(nn.Module, "_version"):
        report(_STATE_VERSION)
    metadata = {"version": getattr(module, "_version", None)}
    with torch.no_grad():
        twin = _twin(module)
        twin._load_from_state_dict(state, prefix, metadata, True, missing, unexpected, errors)  # type: ignore[arg-type]
    return errors, unexpected


def _twin(module: nn.Module) -> nn.Module:
    twin = copy(module)
    attributes = vars(twin)
    attributes["_parameters"] = {
        key: None
        if value is None
        else nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=value.requires_grad)
        for key, value in module._parameters.items()
    }
    attributes["_buffers"] = {
        key: None if value is None else torch.empty_like(value, device="meta") for key, value in module._buffers.items()
    }
    attributes["_modules"] = {key: None if value is None else _twin(value) for key, value in module._modules.items()}
    attributes["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
    return twin


NAMES = (
    *(*_WRAPPED, _PARAMETERS, _BUFFERS, _MODULES, _UNSAVED),
    *(*_HOOKS, _SAVES, _LOADS, _STATE_VERSION, *_COUNTERS),
)
