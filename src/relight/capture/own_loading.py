"""Modules that change shape for what they load: lazy parameters, and loading code that takes tensors of another shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from relight.capture.kinds import foreign_hooks
from relight.torch_private.modules import (
    buffers_of,
    children_of,
    load_without_memory,
    loads_as_torch,
    parameters_of,
    saves_as_torch,
    state_hooks,
    unsaved_buffers,
)
from relight.torch_private.tensors import without_subclass

Undo = Callable[[], None]


def is_lazy(value: object) -> bool:
    """Return whether a parameter or buffer has no shape until a forward pass or a load gives it one."""
    return isinstance(value, torch.Tensor) and torch.nn.parameter.is_lazy(value)


def materialise(tensor: Any, shape: tuple[int, ...]) -> Undo:
    """Give a lazy parameter or buffer memory of that shape. Return a function that makes it lazy again."""
    kind, device, dtype = type(tensor), tensor.device, tensor.dtype
    tensor.materialize(shape)

    def undo() -> None:
        tensor.data = torch.empty(0, device=device, dtype=dtype)
        tensor.__class__ = kind

    return undo


def owner_of(module: nn.Module, key: str) -> tuple[nn.Module, str]:
    """Return the module that loads what is stored at ``key``, and its prefix."""
    owner, prefix = module, ""
    for name in key.split(".")[:-1]:
        below = children_of(owner).get(name)
        if below is None:
            break
        owner, prefix = below, f"{prefix}{name}."
    return owner, prefix


def empty_buffer(module: nn.Module, key: str) -> tuple[nn.Module, str] | None:
    """Return the module that has registered a buffer as None, and the buffer's name there; None if there is none."""
    owner, prefix = owner_of(module, key)
    name = key.removeprefix(prefix)
    buffers = buffers_of(owner)
    is_empty = name in buffers and buffers[name] is None and name not in unsaved_buffers(owner)
    return (owner, name) if is_empty else None


def makes_room(module: nn.Module, key: str, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> bool:
    """Return whether a module's own loading code accepts the stored tensor at ``key`` despite another shape or name.

    ``shapes``: of all stored tensors. A class's loading code is tried on a copy without memory. Hooks cannot be tried,
    as they may refer to the live module. They are trusted: tensors that they do not accept are refused when the state
    is loaded.
    """
    owner, prefix = owner_of(module, key)
    if foreign_hooks(state_hooks(owner)[2]):
        return not _is_torchs_lazy(owner)
    if loads_as_torch(type(owner)) is not False:
        return False
    state = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, (shape, dtype) in shapes.items()
        if name.startswith(prefix)
    }
    try:
        errors, unexpected = load_without_memory(owner, state, prefix)
    except Exception:  # noqa: BLE001 - the class's own code
        return False
    return not errors and key not in unexpected


def shared_pages(module: nn.Module, key: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the memory of a parameter of a subclass that only adds attributes, else None.

    An example are bitsandbytes' packed weights. The module must have its own ``_save_to_state_dict``, which saves the
    other attributes.
    """
    kind = type(tensor)
    if kind in (torch.Tensor, nn.Parameter) or is_lazy(tensor) or tensor.layout != torch.strided or tensor.is_meta:
        return None
    if getattr(kind, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__ or hasattr(
        kind, "__tensor_flatten__"
    ):
        return None
    owner, _ = owner_of(module, key)
    return without_subclass(tensor) if saves_as_torch(type(owner)) is False else None


def is_parameter_attribute(module: nn.Module, key: str) -> bool:
    """Return whether ``key`` is an attribute of a parameter of a subclass, such as ``weight.absmax`` of ``weight``."""
    owner, prefix = owner_of(module, key)
    name, _, more = key.removeprefix(prefix).partition(".")
    parameter = parameters_of(owner).get(name)
    return bool(more) and parameter is not None and type(parameter) is not nn.Parameter


def not_taken(module: nn.Module, key: str, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> bool:
    """Return whether ``state_dict`` returns ``key``, but the module's ``load_state_dict`` would call it unexpected."""
    owner, prefix = owner_of(module, key)
    name = key.removeprefix(prefix)
    if name in parameters_of(owner) or name in buffers_of(owner) or key.endswith("_extra_state"):
        return False
    if type(module).load_state_dict is not nn.Module.load_state_dict or "load_state_dict" in module.__dict__:
        return False
    chain = [module]
    for part in prefix.split(".")[:-1]:
        chain.append(children_of(chain[-1])[part])  # type: ignore[arg-type]
    if any(foreign_hooks(state_hooks(link)[2]) for link in chain):
        return False  # the hooks may rename it
    are_torchs = [loads_as_torch(type(link)) for link in chain]
    if not all(are_torchs[:-1]):
        return False
    return are_torchs[-1] is True or not makes_room(module, key, shapes)


def _is_torchs_lazy(module: nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.lazy.LazyModuleMixin)
