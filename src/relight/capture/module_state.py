"""Read a module's state in one walk, without ``state_dict``, for modules that do not customise it."""

from __future__ import annotations

import torch
from torch import nn

from relight.capture.kinds import foreign_hooks
from relight.torch_private.modules import (
    LOADING,
    SAVING,
    buffers_of,
    children_of,
    loads_as_torch,
    parameters_of,
    saves_as_torch,
    state_hooks,
    unsaved_buffers,
)

_PUBLIC = ("state_dict", "get_extra_state", "load_state_dict")
_OWN_WAYS = frozenset((*_PUBLIC, SAVING, LOADING))


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
        if not usual[kind] or not _OWN_WAYS.isdisjoint(submodule.__dict__) or any(state_hooks(submodule)):
            return False
        for key, parameter in parameters_of(submodule).items():
            if parameter is not None:
                state[prefix + key] = parameter
        unsaved = unsaved_buffers(submodule)
        for key, buffer in buffers_of(submodule).items():
            if buffer is not None and key not in unsaved:
                state[prefix + key] = buffer
        return all(
            visit(child, f"{prefix}{key}.") for key, child in children_of(submodule).items() if child is not None
        )

    return state if visit(module, "") else None


def is_plain(module: nn.Module, state: dict[str, object]) -> bool:
    """Return whether ``load_state_dict`` would only copy into parameters and buffers. ``state``: from ``state_dict``."""
    for submodule in module.modules():
        if (
            any(map(foreign_hooks, state_hooks(submodule)[2:]))
            or type(submodule).load_state_dict is not nn.Module.load_state_dict
            or not loads_as_torch(type(submodule))
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
    return (
        kind.state_dict is not nn.Module.state_dict
        or kind.load_state_dict is not nn.Module.load_state_dict
        or not (saves_as_torch(kind) and loads_as_torch(kind))
        or not _OWN_WAYS.isdisjoint(module.__dict__)
        or any(state_hooks(module))
    )


def _is_usual(kind: type[nn.Module]) -> bool:
    public = all(getattr(kind, name) is getattr(nn.Module, name) for name in _PUBLIC)
    return public and saves_as_torch(kind) is True and loads_as_torch(kind) is True
