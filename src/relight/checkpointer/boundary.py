"""The last step boundary: the small state at the end of a step, so that an exception in the next one can still save a consistent whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from relight.capture import Captured, Recall, capture, capture_generators, fingerprint, frozen_generators, is_large
from relight.format import Leaf

SHARE_MAX = 0.01
FREE_S = 500e-6
"""Remembering a boundary may cost this share of a step, or this many seconds; beyond both it is given up, and said where it matters."""


class Boundary:
    """What the state was when the last step ended: the large part by fingerprint, the small part by value."""

    def __init__(self, components: Mapping[str, object], recall: Recall) -> None:
        self._components, self._recall = components, recall
        self._small = {name: value for name, value in components.items() if not is_large(value)}
        self.step: int | None = None
        self._captured: Captured | None = None
        self._generators: Callable[[], dict[str, Any]] | None = None
        self._fingerprint: tuple[Any, ...] = ()
        self._cost_s = 0.0
        self._measured = 0
        self._step_s = 0.0
        self._last_s = 0.0

    def remember(self, step: int) -> None:
        """Called at the end of every step. Cheap, or not done at all."""
        now = time.perf_counter()
        if self._last_s:
            self._step_s = now - self._last_s
        self.step = step
        if self._measured < 3 or self._cost_s <= max(FREE_S, SHARE_MAX * self._step_s):
            self._captured = capture(self._small, rng=False)
            self._generators = frozen_generators()
            if self._measured < 2 and self._recall.of(self._components) is None:
                capture(self._components, rng=False, recall=self._recall)  # so that later glances are cheap
                self._cost_s = 0.0
            self._fingerprint = self._glance()
            cost = time.perf_counter() - now
            self._cost_s = min(cost, self._cost_s) if self._cost_s else cost  # other load on the machine is not our cost
            self._measured += 1
        else:
            self._captured = None
        self._last_s = time.perf_counter()

    def consistent(self) -> Captured | None:
        """The whole state as it was at the boundary, if parameters and optimizer have not changed since; else None."""
        if self._captured is None or self._generators is None:
            return None
        self._recall.of(self._components)  # forgotten, if anything was replaced
        if self._glance() != self._fingerprint:
            return None
        large = {name: value for name, value in self._components.items() if name not in self._small}
        small = merge(self._captured, capture_generators(self._generators()))
        return merge(capture(large, rng=False), small)


    def _glance(self) -> tuple[Any, ...]:
        return self._recall.glance() or fingerprint(self._components)


def merge(first: Captured, second: Captured) -> Captured:
    """One captured state of two that have no component in common."""
    offset = len(first.items)

    def shift(node: Any) -> Any:
        kind = type(node)
        if kind is Leaf:
            return Leaf(node.kind, tuple(index + offset for index in node.tensors), node.meta)
        if kind is dict:
            return {key: shift(value) for key, value in node.items()}
        if kind in (list, tuple):
            return kind(shift(value) for value in node)
        return node

    return replace(
        first,
        tree={**first.tree, **shift(second.tree)},
        items=[*first.items, *second.items],
        kinds={**first.kinds, **second.kinds},
        notes=[*first.notes, *second.notes],
    )
