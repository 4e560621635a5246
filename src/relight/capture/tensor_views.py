"""Live tensors by the names under which a run stores them, wherever their memory is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from relight.capture.sharded import LiveSlice
from relight.format import Leaf
from relight.format.tree import join_path

if TYPE_CHECKING:
    from relight.capture.restore_plan import Planning


class TensorViews(Mapping[str, "torch.Tensor | LiveSlice"]):
    """A component of views of other memory, such as the parts of fused weights. For reading only.

    Every one of them must be stored. Stored tensors that have no view are ignored.
    """

    def __init__(self, views: Mapping[str, torch.Tensor | LiveSlice]) -> None:
        """``views``: by the stored name, without the component's."""
        self._views = dict(views)

    def __getitem__(self, name: str) -> torch.Tensor | LiveSlice:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def plan(self, planning: Planning, node: Any, path: str) -> None:
        """Add the reads into all views to a plan."""
        stored = node if isinstance(node, dict) else {}
        for name, live in self._views.items():
            below, leaf = join_path(path, name), stored.get(name)
            if not planning.takes(below):
                continue
            if type(leaf) is not Leaf or leaf.kind != "tensor":
                planning.wrong.append(f"{below}: missing in the checkpoint")
            elif planning.targets.fits(below, leaf, live) and not planning.targets.into(leaf, live, below):
                planning.wrong.append(f"{below}: the live tensor's layout takes no bytes")
