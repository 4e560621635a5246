"""Check whether a captured state can be restored: the restore is planned against the live objects, without bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from relight.capture.capture import Captured
from relight.capture.flattened import is_flattened
from relight.capture.kinds import LOADER, RNG, kind_of
from relight.capture.rebuild import FreshTensors, torch_dtype
from relight.capture.restore import planned_mismatches
from relight.format import Tensor, decode_tree
from relight.format.collector import collector_paused
from relight.format.tree import encode_tree
from relight.layout import Sink


class _NoMemory(FreshTensors):
    """Meta tensors in place of memory: a plan needs shapes and dtypes only."""

    def get(self, index: int) -> torch.Tensor:
        tensor = self._made.get(index)
        if tensor is None:
            stored = self._tensors[index]
            tensor = self._made[index] = torch.empty(stored.shape, dtype=torch_dtype(stored), device="meta")
        return tensor

    def make(self, stored: Tensor, empty: Callable[[], Any]) -> Any:
        with torch.device("meta"):
            return empty()

    @property
    def sinks(self) -> dict[int, Sink]:
        return {}


def mismatches(components: Mapping[str, object], state: Captured) -> list[str]:
    """Return why ``state`` could not be restored into the components that it was captured from, by path; empty if it could.

    Nothing is read, copied or changed. Costs about a third of a first capture. Loaders and generators are left out: they have no structure.
    """
    if any(isinstance(value, torch.nn.Module) and is_flattened(value) for value in components.values()):
        return []  # other ranks have tensors without an element on this rank
    tensors = [Tensor(item.name, item.dtype, tuple(item.shape), item.role, 0, 0, 0) for item in state.items]
    names = [name for name, value in components.items() if name in state.tree and kind_of(value) not in (LOADER, RNG)]
    with collector_paused():
        tree = decode_tree(encode_tree({name: state.tree[name] for name in names}), len(tensors), "")
        return planned_mismatches({name: components[name] for name in names}, tensors, tree, _NoMemory(tensors))
