"""Load a checkpoint as a plain tree, for ``relight.load``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from relight.capture.accelerator import finish_kernels
from relight.capture.rebuild import Check, FreshTensors, Mapped, Thunk, build
from relight.errors import IncompatibleState
from relight.format import Leaf, Tensor, decode_tree
from relight.format.tree import join_path
from relight.layout import Sink


def selected(path: str, only: Sequence[str] | None) -> bool:
    """Return whether a pattern selects ``path``: the path itself, or a parent of it."""
    return only is None or any(fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}/*") for pattern in only)


def nothing_fits(patterns: Sequence[str], where: str) -> IncompatibleState:
    """Return the error for patterns of ``only=`` that match nothing."""
    listed = ", ".join(repr(pattern[:80]) for pattern in patterns)
    hint = "a pattern begins with the component: only=['model/*']; relight show RUN lists components and tensors"
    return IncompatibleState(f"nothing in the checkpoint fits only=[{listed}]", where=where, hint=hint)


class LoadPlan:
    """Fill ``sinks``, then call ``result()``."""

    def __init__(self, sinks: dict[int, Sink], result: Thunk) -> None:
        self.sinks = sinks
        self.result = result


class _NotSelected:
    """Stands for a value that was not selected."""


_NOTHING = _NotSelected()
_MADE_OF = frozenset((Leaf, dict, list, tuple))


class Later(NamedTuple):
    """Stands for a value that can only be made once the bytes are read."""

    make: Thunk


def build_tree(
    tensors: Sequence[Tensor],
    tree: bytes | Mapping[Any, Any],
    *,
    only: Sequence[str] | None = None,
    where: str,
    check: Check | None = None,
    mapped: Mapped | None = None,
    device: torch.device | str = "cpu",
    on_host: Collection[int] = (),
    casts: Mapping[int, torch.dtype] | None = None,
) -> LoadPlan:
    """Plan the plain tree: dicts, lists, values, tensors, arrays. With ``only``, just the matches, in the dicts
    that lead to them.

    Raise ``IncompatibleState`` if nothing matches. ``tree``: encoded, or decoded. ``check``, ``mapped``, ``device``,
    ``on_host``, ``casts``: see ``FreshTensors``.
    """
    memory = FreshTensors(tensors, check, mapped, device, on_host, casts)
    plan = _plan(decode_tree(tree, len(tensors), where) if isinstance(tree, bytes) else tree, "", memory, only)
    if plan is _NOTHING and only:
        raise nothing_fits(only, where)
    finish_kernels(
        torch.device(device)
    )  # bytes are copied on other streams than the caller's, which may still use that memory

    def result() -> Any:
        finish_kernels(torch.device(device))
        return {} if plan is _NOTHING else plan.make() if type(plan) is Later else plan

    return LoadPlan(memory.sinks, result)


def thunks(node: Any, path: str, memory: FreshTensors) -> Thunk:
    """Return a function that returns a decoded node's value. Call it once: plain containers are already created."""
    value = whole(node, path, memory)
    return value.make if type(value) is Later else lambda: value


def whole(node: Any, path: str, memory: FreshTensors) -> Any:
    """Return the value of a decoded node, with tensors that are still to be filled, or ``Later``."""
    kind = type(node)
    if kind is Leaf:
        return memory.get(node.tensors[0]) if node.kind == "tensor" else Later(build(node, memory, path))
    if kind is dict:
        return _dict(
            {
                key: memory.get(value.tensors[0])
                if type(value) is Leaf and value.kind == "tensor"
                else whole(value, join_path(path, key), memory)
                if type(value) in _MADE_OF
                else value
                for key, value in node.items()
            }
        )
    if kind is list or kind is tuple:
        return _sequence(
            [
                whole(value, join_path(path, i, sequence=True), memory) if type(value) in _MADE_OF else value
                for i, value in enumerate(node)
            ],
            kind,
        )
    return node


def _plan(node: Any, path: str, memory: FreshTensors, only: Sequence[str] | None) -> Any:
    if only is None or (path and selected(path, only)):
        return whole(node, path, memory)
    if type(node) is dict:
        parts = {key: _plan(value, join_path(path, key), memory, only) for key, value in node.items()}
        kept = {key: part for key, part in parts.items() if part is not _NOTHING}
        return _dict(kept) if kept else _NOTHING
    if type(node) in (list, tuple):
        items = [_plan(value, join_path(path, i, sequence=True), memory, only) for i, value in enumerate(node)]
        return _NOTHING if any(item is _NOTHING for item in items) else _sequence(items, type(node))
    return _NOTHING


def _dict(parts: dict[Any, Any]) -> Any:
    late = {key: part.make for key, part in parts.items() if type(part) is Later}
    if not late:
        return parts

    def make() -> dict[Any, Any]:
        for key, make_part in late.items():
            parts[key] = make_part()
        return parts

    return Later(make)


def _sequence(items: list[Any], kind: Callable[[list[Any]], Any]) -> Any:
    if any(type(item) is Later for item in items):
        return Later(lambda: kind([item.make() if type(item) is Later else item for item in items]))
    return kind(items)
