"""Capture: read all components into one tree and a list of items."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from relight.capture import rng as generators
from relight.capture.capture_cache import CaptureCache, CapturedTemplate, basis_of
from relight.capture.flattened import OUTERMOST, flattened_state, is_flattened
from relight.capture.kinds import (
    LOADER,
    MODULE,
    OPTIMIZER,
    RNG,
    VALUE,
    is_swapped,
    kind_of,
    named_parameters,
    own_name,
    unwrap,
    wrapped,
)
from relight.capture.loaders import loader_doubts, loader_notes, loader_state
from relight.capture.node_loaders import drop_stale_state
from relight.capture.objects import inner_tensors
from relight.capture.optimizers import (
    Moments,
    capture_moments,
    capture_optimizer,
    holder_of,
    is_custom,
    steps_of,
    trained_by,
)
from relight.capture.own_loading import shared_pages
from relight.capture.sharded import Flat, ShardingOf, local_of
from relight.capture.swap import Swap
from relight.capture.tensors import USUAL
from relight.capture.walk import Walker
from relight.errors import ConfigError
from relight.format.collector import collector_paused
from relight.format.tree import Encoded, Leaf, join_path
from relight.layout import Item
from relight.torch_private.flat_parameters import is_flattened_elsewhere
from relight.torch_private.modules import unsaved_buffers
from relight.torch_private.tensors import read_version


class TemplateItems(Protocol):
    """The first items of a state. The object stays the same while the items are unchanged."""

    @property
    def items(self) -> tuple[Item, ...]:
        """The items."""


@dataclass(frozen=True)
class Captured:
    """A state, read but not copied: a ``tree`` with leaves that refer to ``items``. The items' sources are live memory.

    ``notes``: reasons why a resume from it is not bit-exact. ``found`` and ``missed``: sentences for users.
    """

    tree: dict[str, Any]
    items: list[Item]
    kinds: dict[str, str]
    notes: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    """Objects that are stored as plain values: sentences with their paths."""
    fixed: TemplateItems | None = None
    """The first of ``items``, with their encoded tree. The object stays the same while they are unchanged."""
    spreads: Mapping[int, ShardingOf] = field(default_factory=dict)
    """Sharding of the items that are only partly on this rank, by index: their shape is the global one."""
    frozen: frozenset[int] = frozenset()
    """Indices of ``fixed``'s items that are parameters without gradient and in no optimizer."""

    @property
    def logical_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(item.source.length for item in self.items)


def capture(
    components: Mapping[str, object],
    *,
    micro_step: int | None = None,
    rng: bool = True,
    recall: CaptureCache | None = None,
    preceding: Sequence[Item] = (),
) -> Captured:
    """Read the state of ``components``; with ``micro_step`` also their gradients, with ``rng`` also the generators.

    Costs 20 µs a tensor; contiguous host tensors are not copied. With the same ``recall`` each time, the second and
    later captures cost half a microsecond for each parameter, buffer and optimizer tensor. Raise ``IncompatibleState``
    with all values that cannot be saved. ``preceding``: items that precede the state's own in ``items``.
    """
    reserved = [name for name in ("rng", "grad", "rank") if name in components]
    if reserved:
        raise ConfigError(f"a component cannot be called {reserved[0]!r}: Relight's own state has that name")
    kinds = {name: kind_of(value) for name, value in components.items()}
    fixed = recall.valid_template(components) if recall is not None else None
    walker = Walker(fixed, preceding)
    walker.components = components
    walker.find_trained = lambda: _trained(walker, components) if fixed is None else fixed.trained
    if fixed is None:
        with collector_paused():
            nodes, sizes = _walk_large(walker, components, kinds)
            missed = {
                name: _missed(name, value, kinds[name]) for name, value in components.items() if kinds[name] == MODULE
            }
            if recall is not None and not walker.refused:
                fixed = recall.fixed = _keep(walker, components, nodes, sizes, missed)
    if fixed is not None:
        nodes, sizes, missed = fixed.nodes, fixed.sizes, fixed.missed
    tree: dict[str, Any] = {}
    notes: list[str] = []
    summaries: list[str] = []
    warnings: list[str] = []
    for name, value in components.items():
        kind = kinds[name]
        before = len(walker.items)
        tree[name] = nodes[name] if kind == MODULE else _component(walker, name, value, kind, nodes.get(name))
        count, size = sizes.get(name, (0, 0))
        count += len(walker.items) - before
        size += sum(item.source.length for item in walker.items[before:])
        notes += _notes(name, value, kind)
        flag = is_swapped(value)
        summaries.append(
            f"{name}: {kind} ({type(value).__qualname__}), {count} tensors, {size} bytes"
            + ("" if flag is None else f", swapped {'in' if flag else 'out'}")
        )
        warnings += missed[name] if kind == MODULE else _missed(name, value, kind)
    if micro_step is not None:
        tree["grad"] = _gradients(walker, components)
        kinds["grad"] = "grad"
    if rng:
        tree["rng"] = walker.value({**generators.host_states(), **generators.device_states()}, "rng", "rng")
        kinds["rng"] = RNG
        summaries.append(
            "rng: python, torch" + (", numpy" if tree["rng"]["numpy"] is not None else "") + ", accelerators in use"
        )
    walker.finish()
    frozen = fixed.frozen if fixed is not None else frozenset[int]()
    return Captured(tree, walker.items, kinds, notes, summaries, warnings, walker.plain, fixed, walker.spreads, frozen)


def _trained(walker: Walker, components: Mapping[str, object]) -> frozenset[tuple[object, ...]]:
    keys = (
        walker.key(parameter)
        for value in components.values()
        if isinstance(value, torch.optim.Optimizer)
        for parameter in trained_by(value)
        if parameter.requires_grad
    )
    return frozenset(key for key in keys if key is not None)


def _walk_large(
    walker: Walker, components: Mapping[str, object], kinds: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """Walk parameters, buffers and optimizer state.

    They are walked first: a tensor that other components share then gets its name from here.
    """
    nodes: dict[str, Any] = {}
    sizes: dict[str, tuple[int, int]] = {}
    trained = {
        id(p) for value in components.values() if isinstance(value, torch.optim.Optimizer) for p in trained_by(value)
    }
    for name, value in sorted(components.items(), key=lambda pair: kinds[pair[0]] != MODULE):
        before = len(walker.items)
        if isinstance(value, nn.Module):
            nodes[name] = _module(walker, value, join_path("", name), trained)
        elif isinstance(value, torch.optim.Optimizer):
            nodes[name] = capture_moments(walker, value, join_path("", name), components)
        sizes[name] = len(walker.items) - before, sum(item.source.length for item in walker.items[before:])
    return nodes, sizes


def _keep(
    walker: Walker,
    components: Mapping[str, object],
    nodes: dict[str, Any],
    sizes: dict[str, tuple[int, int]],
    missed: dict[str, list[str]],
) -> CapturedTemplate | None:
    """Keep what was just walked for the next capture."""
    basis = basis_of(components)
    if basis is None:
        return None
    encoded: dict[str, Any] = {}
    for name, node in nodes.items():
        if not isinstance(node, Moments):
            encoded[name] = Encoded.encode(node)
        elif is_custom(components[name]):  # type: ignore[arg-type]
            encoded[name] = node
        else:
            masters: Any = Encoded.encode(node.masters) if node.masters else {}
            encoded[name] = Moments(
                Encoded.encode(node.state), [Encoded.encode(names) for names in node.params], masters
            )
    frozen = (i for i in walker.frozen if walker.items[i].role == "param" and not walker.items[i].trainable)
    return CapturedTemplate(
        tuple(walker.items), dict(walker.known), frozenset(walker.names), dict(walker.spreads), frozenset(frozen),
        basis, encoded, walker.trained, sizes, missed,
    )  # fmt: skip


def capture_generators(states: Mapping[str, Any]) -> Captured:
    """Return the state of this process's generators alone, from ``rng.frozen``."""
    walker = Walker()
    tree = {"rng": walker.value(dict(states), "rng", "rng")}
    walker.finish()
    return Captured(tree, walker.items, {"rng": RNG})


def _component(walker: Walker, name: str, value: Any, kind: str, moments: Moments | None) -> Any:
    path = join_path("", name)
    if kind == OPTIMIZER:
        return capture_optimizer(walker, value, path, moments) if moments is not None else None
    if kind == LOADER:
        return walker.value(loader_state(value), path)
    if kind == RNG:
        return walker.value(generators.generator_state(value), path, "rng")
    if kind == VALUE:
        walker.in_value = True
        try:
            return walker.value(value, path)
        finally:
            walker.in_value = False
    drop_stale_state(value)
    state = value.state_dict()
    return walker.value(dict(state) if isinstance(state, Mapping) else state, path)


def _module(walker: Walker, module: nn.Module, path: str, trained: set[int]) -> dict[str, Any]:
    flattened = is_flattened(module)
    inner = module if flattened else unwrap(module)
    node: dict[str, Any] = {}
    wrappers = wrapped(inner)
    state = flattened_state(inner) if flattened else inner.state_dict(keep_vars=True)
    walker.gather(state.values())
    for live, value in state.items():
        key = own_name(live, wrappers) if wrappers else live
        below = join_path(path, key)
        if isinstance(value, Flat):
            if value.spread.local.numel():  # other ranks record a tensor that has no element here
                trainable = value.requires_grad and id(value.owner) in trained
                node[key] = walker.tensor(value, below, "param", trainable=trainable)
        elif isinstance(value, torch.Tensor):
            is_parameter = isinstance(value, nn.Parameter)
            if not flattened and is_flattened_elsewhere(value):
                walker.refuse(below, f"flattened by a wrapper around the module that was given: {OUTERMOST}")
                continue
            trainable = is_parameter and value.requires_grad and id(value) in trained
            own = shared_pages(inner, live, value) if type(value) not in USUAL else None
            leaf = node[key] = walker.tensor(
                value if own is None else own, below, "param" if is_parameter else "buffer", trainable=trainable
            )
            if is_parameter and not value.requires_grad and isinstance(leaf, Leaf) and leaf.kind == "tensor":
                walker.frozen.update(leaf.tensors)
        else:
            node[key] = walker.value(value, below)
    return node


def named_gradients(components: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return parameters of all modules, and tensors in plain components that require gradients, once each.

    Keys: ``component/name``.
    """
    seen: set[int] = set()
    tensors_by_path: dict[str, torch.Tensor] = {}
    for name, value in components.items():
        kind = kind_of(value)
        pairs: Iterable[tuple[str, torch.Tensor]] = ()
        if kind == MODULE:
            pairs = ((f"{name}/{key}", parameter) for key, parameter in named_parameters(value))  # type: ignore[arg-type]
        elif kind == VALUE:
            pairs = loose_tensors(value, name)
        for path, tensor in pairs:
            if tensor.requires_grad and tensor.is_leaf and id(tensor) not in seen:
                seen.add(id(tensor))
                tensors_by_path[path] = tensor
    return tensors_by_path


def loose_tensors(value: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors in plain containers, with their paths."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from loose_tensors(item, join_path(path, key))
    elif isinstance(value, (list, tuple, deque)):
        for index, item in enumerate(value):
            yield from loose_tensors(item, join_path(path, index, sequence=True))


def _gradients(walker: Walker, components: Mapping[str, object]) -> dict[str, Any]:
    return {
        name: walker.tensor(parameter.grad, join_path("grad", name), "grad")
        for name, parameter in named_gradients(components).items()
        if parameter.grad is not None
    }


def _missed(name: str, value: Any, kind: str) -> list[str]:
    if kind == MODULE:
        missed = []
        inner = unwrap(value)
        for prefix, module in inner.named_modules():
            for buffer in sorted(unsaved_buffers(module)):
                full = f"{prefix}.{buffer}" if prefix else buffer
                missed.append(f"{name}: buffer {full} is not persistent, so not part of the module's state")
        return missed
    if kind == LOADER:
        return loader_notes(name, value)
    return []


def _notes(name: str, value: Any, kind: str) -> list[str]:
    """Return why a resume would not be exact because of this component."""
    if kind == LOADER:
        return loader_doubts(name, value)
    if is_swapped(value) and not isinstance(value, Swap) and kind != MODULE:
        state = value.state_dict() if hasattr(value, "state_dict") else {}
        if (
            not isinstance(state, Mapping)
            or not {"swapped", "is_swapped", "swapped_in", "collected_params"} & state.keys()
        ):
            return [f"{name}: averaged weights are swapped in, and its state does not record that"]
    return []


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    tensor = local_of(tensor)
    address = tensor.data_ptr() if tensor.layout == torch.strided else id(tensor)
    return address, 0 if tensor.is_inference() else read_version(tensor)


def fingerprint(components: Mapping[str, object]) -> tuple[Any, ...]:
    """Return address and version of every parameter, buffer and optimizer tensor.

    The results are equal while no tensor is written or replaced.
    """
    marks: list[tuple[int, int]] = []
    for value in components.values():
        tensors: Iterable[torch.Tensor] = ()
        if isinstance(value, nn.Module):
            tensors = [*value.parameters(), *value.buffers()]
        elif isinstance(value, torch.optim.Optimizer):
            states = [state for state in holder_of(value).state.values() if isinstance(state, dict)]
            tensors = [tensor for state in states for tensor in state.values() if isinstance(tensor, torch.Tensor)]
            marks.append((-1, steps_of(value)))
        elif kind_of(value) == VALUE:
            tensors = [tensor for _, tensor in loose_tensors(value, "")]
        marks += [_mark(inner) for tensor in tensors for inner in inner_tensors(tensor)]
    return tuple(marks)
