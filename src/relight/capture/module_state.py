"""Read a module's state in one walk, without ``state_dict``, for modules that do not customise it."""

from __future__ import annotations

import torch
from torch import nn

from relight.capture.kinds import foreign_hooks

_SAVING = ("state_dict", "_save_to_state_dict", "get_extra_state", "load_state_dict")
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_OWN_WAYS = frozenset((*_SAVING, "_load_from_state_dict"))


def plain_state(module: nn.Module) -> dict[str, torch.Tensor] | None:
    """Return the result of ``module.state_dict(keep_vars=True)`` if ``load_state_dict`` would only copy into it.

    None if a class, a hook or an instance customises saving or loading.
    """
    state: dict[str, torch.Tensor] = {}
    usual: dict[type[nn.Module], bool] = {}

    def visit(submodule: nn.Module, prefix: str) -> bool:
        kind = type(submodule)
        if kind not in usual:
            usual[kind] = _is_usual(kind)
        live = submodule.__dict__
        if not usual[kind] or not _OWN_WAYS.isdisjoint(live) or any(map(live.get, _HOOKS)):
            return False
        for key, parameter in submodule._parameters.items():
            if parameter is not None:
                state[prefix + key] = parameter
        for key, buffer in submodule._buffers.items():
            if buffer is not None and key not in submodule._non_persistent_buffers_set:
                state[prefix + key] = buffer
        return all(visit(child, f"{prefix}{key}.") for key, child in submodule._modules.items() if child is not None)

    return state if visit(module, "") else None


def is_plain(module: nn.Module, state: dict[str, object]) -> bool:
    """Return whether ``load_state_dict`` would only copy into parameters and buffers. ``state``: from ``state_dict``."""
    for submodule in module.modules():
        hooks = [
            getattr(submodule, name, None) for name in ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
        ]
        if (
            any(map(foreign_hooks, hooks))
            or type(submodule).load_state_dict is not nn.Module.load_state_dict
            or not _loads_as_torch(type(submodule))
        ):
            return False
    live = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return all(not isinstance(tensor, torch.Tensor) or tensor is live.get(key) for key, tensor in state.items())


def has_own_ways(module: nn.Module) -> bool:
    """Return whether a class, a hook or the instance customises saving or loading, other than by ``get_extra_state``."""
    kind = type(module)
    overridden = [
        name for name in _SAVING if name != "get_extra_state" and getattr(kind, name) is not getattr(nn.Module, name)
    ]
    return (
        bool(overridden)
        or not _loads_as_torch(kind)
        or not _OWN_WAYS.isdisjoint(module.__dict__)
        or any(map(module.__dict__.get, _HOOKS))
    )


def _is_usual(kind: type[nn.Module]) -> bool:
    return all(getattr(kind, name) is getattr(nn.Module, name) for name in _SAVING) and _loads_as_torch(kind)


def _loads_as_torch(kind: type[nn.Module]) -> bool:
    return kind._load_from_state_dict.__module__.startswith("torch.nn.")
