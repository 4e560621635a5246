"""Select a checkpoint's tensors for export: their names, and what is left out. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from relight.errors import CheckpointNotFound, ConfigError
from relight.export.convert import target_of
from relight.export.naming import check_rules, is_meant, renamed
from relight.format import DTYPES, Leaf, Tensor
from relight.format.strict import shown
from relight.format.tree import join_path

APART = frozenset({"rng", "dcp"})
"""Components that are exported only if they are named."""
ONE = ("tensor", "expanded", "numpy")
"""Kinds of leaves that are exported as one tensor."""


@dataclass(frozen=True, slots=True)
class Options:
    """``to``: ``safetensors``, ``pt`` or ``dcp``; ``only``: patterns; ``rename``: rules; ``dtype``: one of ``FLOATS``.

    ``tied``: write a tensor with several names under its ``first`` name, or under ``each`` of them.
    """

    to: str = "safetensors"
    shard_bytes: int | None = None
    component: str | None = None
    only: tuple[str, ...] = ()
    everything: bool = False
    rename: tuple[str, ...] = ()
    dtype: str | None = None
    tied: str = "first"
    overwrite: bool = False


class At(int):
    """Key that is an index in a list."""


class ExportEntry(NamedTuple):
    """An exported tensor: its name, and tensor number ``tensor``, in ``shape``, as ``dtype``.

    ``alias``: the name of an earlier entry with the very same values, if any.
    """

    name: str
    tensor: int
    dtype: str
    shape: tuple[int, ...]
    alias: str | None = None

    @property
    def length(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class TreeValue(NamedTuple):
    """A leaf or plain value in the tree: its keys, its path in the style of tensor names, and the value."""

    keys: tuple[Any, ...]
    path: str
    value: Any


class SelectedTensors(NamedTuple):
    """The exported tensors, in the order of the tree.

    ``keys``: of each entry in the tree. ``values``: the values that are not tensors. ``left_out``: everything else,
    each with the reason. ``component``: names are relative to it; None if all components are exported.
    """

    entries: list[ExportEntry]
    keys: list[tuple[Any, ...]]
    values: list[tuple[tuple[Any, ...], Any]]
    left_out: list[tuple[str, str]]
    component: str | None


def choose(
    tree: Mapping[Any, Any], tensors: Sequence[Tensor], kinds: Mapping[str, str], options: Options
) -> SelectedTensors:
    """Select what of ``tree`` is exported. ``kinds``: kind of each component, from the root.

    Raise ``ConfigError`` if names clash or a component does not exist, ``CheckpointNotFound`` if no tensor is left.
    """
    check_rules(options.rename)
    component = _component(tree, kinds, options)
    values = (
        list(_walk((), "", tree)) if component is None else list(_walk((), join_path("", component), tree[component]))
    )
    chosen = SelectedTensors([], [], [], [], component)
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    names_used: dict[str, str] = {}
    for candidate in values:
        plain = ".".join(str(key) for key in candidate.keys)
        if not is_meant((plain, candidate.path), options.only):
            continue
        shape = shape_of(candidate.value, tensors)
        if isinstance(shape, str):
            chosen.left_out.append((candidate.path, shape))
        elif shape is None:
            chosen.values.append((candidate.keys, candidate.value))
        else:
            name = renamed(plain, options.rename)
            if not name or name in names_used:
                raise ConfigError(
                    f"two tensors would be called {shown(name)!r}"
                    if name
                    else f"{shown(candidate.path)} would have no name",
                    where=f"{names_used.get(name, '')} {candidate.path}".strip(),
                    hint="change --rename, or leave one out: --only",
                )
            names_used[name] = candidate.path
            tensor = candidate.value.tensors[0]
            alias = first.setdefault((tensor, shape), name)
            dtype = target_of(tensors[tensor].dtype, options.dtype)
            chosen.entries.append(ExportEntry(name, tensor, dtype, shape, alias if alias != name else None))
            chosen.keys.append(candidate.keys)
    if not chosen.entries:
        message = f"no tensor matches {', '.join(options.only)}" if options.only else "no tensor here"
        raise CheckpointNotFound(message, where=component or "", hint="relight show lists what there is")
    return chosen


def _component(tree: Mapping[Any, Any], kinds: Mapping[str, str], options: Options) -> str | None:
    """Return the component to export; None for all of them."""
    if options.everything:
        if options.component is not None:
            raise ConfigError("--component and --all exclude each other")
        return None
    names = [key for key in tree if isinstance(key, str)]
    if options.component is not None:
        if options.component not in names:
            raise ConfigError(
                f"no component {options.component[:80]!r}", hint=f"there are {', '.join(map(shown, names[:12]))}"
            )
        return options.component
    if "model" in names:
        return "model"
    if tree and all(isinstance(value, Leaf) for key, value in tree.items() if key not in APART):
        return None  # a bare state dict
    modules = [key for key in names if kinds.get(key) == "module"]
    others = modules or [key for key in names if key not in APART and isinstance(tree[key], (dict, Leaf))]
    if len(others) == 1:
        return others[0]
    raise ConfigError(
        "the component to export is ambiguous", hint=f"--component one of {', '.join(map(shown, names[:12]))}, or --all"
    )


def _walk(keys: tuple[Any, ...], path: str, node: Any) -> Iterator[TreeValue]:
    """Yield all leaves, plain values and empty containers."""
    if type(node) is dict and node:
        for key, value in node.items():
            yield from _walk((*keys, key), join_path(path, key), value)
    elif type(node) in (list, tuple) and any(map(holds, node)):
        for index, value in enumerate(node):
            yield from _walk((*keys, At(index)), join_path(path, index, sequence=True), value)
    else:
        yield TreeValue(keys, path, node)


def holds(node: Any) -> bool:
    """Return whether a node contains a leaf."""
    if type(node) is dict:
        return any(map(holds, node.values()))
    return any(map(holds, node)) if type(node) in (list, tuple) else isinstance(node, Leaf)


def shape_of(value: Any, tensors: Sequence[Tensor]) -> tuple[int, ...] | str | None:
    """Return the shape of a leaf that is one tensor, the reason why a leaf is not one, or None for a plain value."""
    if not isinstance(value, Leaf) or not value.tensors:
        return None
    stored = tensors[value.tensors[0]]
    if value.kind == "expanded":
        try:
            shape = tuple(int(extent) for extent in value.meta)
        except (TypeError, ValueError):
            return "an expanded tensor of no shape"
        fits = len(shape) == len(stored.shape) and all(
            a in (1, b) and b >= 0 for a, b in zip(stored.shape, shape, strict=True)
        )
        return shape if fits else "an expanded tensor of another shape"
    if value.kind == "numpy":
        return stored.shape if tuple(value.meta[1]) == stored.shape else f"an array of {shown(str(value.meta[0]))}"
    return stored.shape if value.kind == "tensor" else f"a {value.kind.replace('_', ' ')}"
