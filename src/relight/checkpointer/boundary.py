"""The last step boundary: the small state at the end of a step, so that an exception in the next one can still save a consistent whole."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from relight.capture import Captured, capture, fingerprint, is_large
from relight.format import Leaf

SHARE_MAX = 0.01
"""Remembering the boundary may cost this share of a step; beyond, it is given up, and said so where it matters."""


class Boundary:
    """What the state was when the last step ended: the large part by fingerprint, the small part by value."""

    def __init__(self, components: Mapping[str, object]) -> None:
        self._components = components
        self._small = {name: value for name, value in components.items() if not is_large(value)}
        self.step: int | None = None
        self._captured: Captured | None = None
        self._fingerprint: tuple[Any, ...] = ()
        self._cost_s = 0.0
        self._step_s = 0.0
        self._last_s = 0.0

    def remember(self, step: int) -> None:
        """Called at the end of every step. Cheap, or not done at all."""
        now = time.perf_counter()
        if self._last_s:
            self._step_s = now - self._last_s
        self.step = step
        if not self._step_s or self._cost_s <= SHARE_MAX * self._step_s:
            self._captured = capture(self._small)
            self._fingerprint = fingerprint(self._components)
            self._cost_s = time.perf_counter() - now
        else:
            self._captured = None
            self._cost_s *= 0.9  # try again once in a while
        self._last_s = time.perf_counter()

    def consistent(self) -> Captured | None:
        """The whole state as it was at the boundary, if parameters and optimizer have not changed since; else None."""
        if self._captured is None or fingerprint(self._components) != self._fingerprint:
            return None
        large = {name: value for name, value in self._components.items() if name not in self._small}
        return merge(capture(large, rng=False), self._captured)


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
