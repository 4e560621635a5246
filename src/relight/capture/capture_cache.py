"""Keep the part of a capture that is equal in every save (parameters, buffers, optimizer state), to walk it only once.

Walking a model of a hundred thousand tensors takes seconds: names, shapes, roles, ties. Between two saves none of
these changes; only values change, and a walk does not read values. So the first walk is kept, with everything it
depended on. The next capture only compares: same modules, same dicts, same tensors, same memory. Any difference causes
a new walk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any, NamedTuple

import torch
from torch import nn

from relight.capture import flat_params
from relight.capture.kinds import MODULE, OPTIMIZER, foreign_hooks, kind_of, unwrap, wraps
from relight.capture.objects import flattens
from relight.capture.optimizers import holder_of, is_custom, own_parameters, steps_of, trained_by
from relight.capture.sharded import local_of
from relight.capture.tensors import USUAL
from relight.capture.walk import WalkedItems
from relight.torch_private.modules import SAVING, module_parts, saves_as_torch
from relight.torch_private.tensors import read_version, version_counter

_CONSTANT = (type(None), bool, int, float, complex, str, bytes)
_PUBLIC = ("state_dict", "get_extra_state", "named_parameters", "named_modules")
_OWN_WAYS = frozenset((*_PUBLIC, SAVING))
"""Module methods that may return a state other than the module's dicts, if a class or an instance overrides them."""


_shape, _dtype, _requires_grad = map(attrgetter, ("shape", "dtype", "requires_grad"))


class _Dict(NamedTuple):
    """A dict, and its former content."""

    live: Mapping[Any, Any]
    keys: tuple[Any, ...]
    values: tuple[Any, ...]

    def holds(self) -> bool:
        return (
            len(self.live) == len(self.values)
            and tuple(self.live) == self.keys
            and all(map(is_, self.live.values(), self.values))
        )


class _Module(NamedTuple):
    """A module, and the content from which its state was walked."""

    live: nn.Module
    parameters: _Dict
    buffers: _Dict
    modules: _Dict
    not_saved: frozenset[str]

    @classmethod
    def from_module(cls, module: nn.Module) -> _Module:
        parameters, buffers, modules, not_saved, *_ = module_parts(module)
        return cls(module, _dict(parameters), _dict(buffers), _dict(modules), frozenset(not_saved))

    def holds(self) -> bool:
        parameters, buffers, modules, not_saved, after, before = module_parts(self.live)
        return (
            parameters is self.parameters.live
            and buffers is self.buffers.live
            and modules is self.modules.live
            and self.parameters.holds()
            and (not (self.modules.values or modules) or self.modules.holds())
            and (not (self.buffers.values or buffers) or self.buffers.holds())
            and not_saved == self.not_saved
            and _OWN_WAYS.isdisjoint(self.live.__dict__)
            and not (after and foreign_hooks(after))
            and not (before and foreign_hooks(before))
        )


class _Optimizer(NamedTuple):
    """An optimizer, and the content from which its state was walked."""

    live: torch.optim.Optimizer
    groups: tuple[tuple[torch.Tensor, ...], ...]
    keys: tuple[Any, ...]
    states: tuple[_Dict, ...]

    @classmethod
    def from_optimizer(cls, optimizer: torch.optim.Optimizer) -> _Optimizer:
        return cls(
            optimizer,
            tuple(tuple(group["params"]) for group in optimizer.param_groups),
            tuple(holder_of(optimizer).state),
            tuple(map(_dict, holder_of(optimizer).state.values())),
        )

    def holds(self) -> bool:
        state, groups = holder_of(self.live).state, self.live.param_groups
        return (
            not is_custom(self.live)
            and len(state) == len(self.keys)
            and all(map(is_, state, self.keys))
            and len(groups) == len(self.groups)
            and all(
                len(group["params"]) == len(then) and all(map(is_, group["params"], then))
                for group, then in zip(groups, self.groups)
            )
            and all(map(is_, state.values(), [entry.live for entry in self.states]))
            and all(map(_Dict.holds, self.states))
        )


class _Tensors(NamedTuple):
    """Tensors, and their former memory and properties."""

    live: list[torch.Tensor]
    addresses: list[int]
    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    trained: list[bool]
    without: bool
    """Whether some are inference tensors, which have no version counter."""

    @classmethod
    def from_tensors(cls, tensors: Iterable[torch.Tensor]) -> _Tensors:
        unique = {id(tensor): tensor for tensor in tensors}.values()
        live = [tensor if type(tensor) in USUAL else local_of(tensor) for tensor in unique]
        return cls(
            live,
            [t.data_ptr() for t in live],
            [t.shape for t in live],
            [t.stride() for t in live],
            [t.dtype for t in live],
            [t.requires_grad for t in live],
            any(t.is_inference() for t in live),
        )

    def versions(self) -> list[int]:
        if self.without:
            return [version_counter(tensor) for tensor in self.live]
        return list(map(read_version, self.live))

    def holds(self) -> bool:
        live = self.live  # one pass in C for each; no list is kept, as the garbage collector would traverse it
        return (
            all(map(eq, map(torch.Tensor.data_ptr, live), self.addresses))
            and all(map(eq, map(_shape, live), self.shapes))
            and all(map(eq, map(torch.Tensor.stride, live), self.strides))
            and all(map(is_, map(_dtype, live), self.dtypes))
            and all(map(is_, map(_requires_grad, live), self.trained))
        )


class CacheKey(NamedTuple):
    """Everything on which a walk depended."""

    components: tuple[tuple[str, str, object], ...]
    modules: tuple[_Module, ...]
    optimizers: tuple[_Optimizer, ...]
    tensors: _Tensors
    declarations: int


@dataclass(frozen=True, eq=False)
class CapturedTemplate(WalkedItems):
    """The part of a state that the next capture may reuse: its items come first, its nodes are encoded."""

    basis: CacheKey
    nodes: dict[str, Any]
    """A module's whole node; an optimizer's ``Moments``."""
    trained: frozenset[tuple[object, ...]]
    sizes: dict[str, tuple[int, int]]
    """Tensors and bytes among ``items``, by component."""
    missed: dict[str, list[str]]

    def holds(self, components: Mapping[str, object]) -> bool:
        """Return whether a walk would give the same result. Half a microsecond a tensor."""
        basis = self.basis
        return (
            len(components) == len(basis.components)
            and flat_params.declarations == basis.declarations
            and all(
                components.get(name) is value if value is not None else kind_of(components.get(name)) == kind
                for name, kind, value in basis.components
            )
            and all(module.holds() for module in basis.modules)
            and all(optimizer.holds() for optimizer in basis.optimizers)
            and basis.tensors.holds()
        )


class CaptureCache:
    """Keeps the template from one capture to the next. It keeps the tensors alive, as the components do."""

    def __init__(self) -> None:
        self.fixed: CapturedTemplate | None = None

    def glance(self) -> tuple[Any, ...] | None:
        """Return a value that changes when a parameter, buffer or optimizer tensor is written, or the template changes.

        None if there is no template.
        """
        fixed = self.fixed
        if fixed is None:
            return None
        return (
            id(fixed),
            fixed.basis.tensors.versions(),
            [steps_of(optimizer.live) for optimizer in fixed.basis.optimizers],
        )

    def valid_template(self, components: Mapping[str, object]) -> CapturedTemplate | None:
        """Return the template if it still holds; otherwise drop it and return None."""
        if self.fixed is not None and not self.fixed.holds(components):
            self.fixed = None
        return self.fixed


def basis_of(components: Mapping[str, object]) -> CacheKey | None:
    """Return what ``CapturedTemplate.holds`` will compare; None if part of the state must be walked each time."""
    modules: dict[int, nn.Module] = {}
    optimizers: list[torch.optim.Optimizer] = []
    for value in components.values():
        if isinstance(value, nn.Module):
            for module in chain(value.modules(), unwrap(value).modules()):
                modules[id(module)] = module
        elif isinstance(value, torch.optim.Optimizer) and not is_custom(value):
            if not all(
                isinstance(key, torch.Tensor) and isinstance(entry, dict)
                for key, entry in holder_of(value).state.items()
            ):
                return None
            optimizers.append(value)
    if not all(map(_is_plain, modules.values())):
        return None
    noted = tuple(map(_Optimizer.from_optimizer, optimizers))
    trees = tuple(map(_Module.from_module, modules.values()))
    values = [value for optimizer in noted for entry in optimizer.states for value in entry.values]
    if not all(isinstance(value, (torch.Tensor, *_CONSTANT)) for value in values):
        return None
    owned = [value for tree in trees for value in (*tree.parameters.values, *tree.buffers.values) if value is not None]
    homes = set(map(id, owned))
    trained = [
        p for value in components.values() if isinstance(value, torch.optim.Optimizer) for p in trained_by(value)
    ]
    if not all(id(parameter) in homes for parameter in trained):
        return None  # its name does not come from a module
    flats = [p for optimizer in optimizers for p in own_parameters(optimizer) if id(p) not in homes]
    tensors = [*owned, *flats, *(value for value in values if isinstance(value, torch.Tensor))]
    if not all(map(_is_its_memory, tensors)):
        return None
    kinds = [(name, kind_of(value), value) for name, value in components.items()]
    named = tuple((name, kind, value if kind in (MODULE, OPTIMIZER) else None) for name, kind, value in kinds)
    return CacheKey(named, trees, noted, _Tensors.from_tensors(tensors), flat_params.declarations)


def _is_its_memory(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's memory itself is saved, not values computed from it."""
    if type(tensor) not in USUAL:
        tensor = local_of(tensor)
        if flattens(tensor):
            return False  # its inner tensors may be different objects at the next save
    return tensor.layout == torch.strided and not (
        tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_meta
    )


def _is_plain(module: nn.Module) -> bool:
    kind = type(module)
    own: Callable[[str], bool] = lambda name: getattr(kind, name) is not getattr(nn.Module, name)  # noqa: E731
    if wraps(module) is not None:
        return True
    after, before = module_parts(module)[-2:]
    return (
        not (foreign_hooks(after) or foreign_hooks(before) or any(map(own, _PUBLIC)))
        and saves_as_torch(kind) is True
        and _OWN_WAYS.isdisjoint(module.__dict__)
    )


def _dict(live: Mapping[Any, Any]) -> _Dict:
    return _Dict(live, tuple(live), tuple(live.values()))
