"""Last step boundary: the small state at the end of a step, so that after an exception in the next step a consistent
state can be saved."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from relight.capture import (
    CaptureCache,
    Captured,
    RngSnapshot,
    capture,
    capture_generators,
    fingerprint,
    frozen_generators,
    is_large,
)
from relight.capture.capture import named_gradients
from relight.capture.kinds import VALUE, kind_of, memory_in
from relight.capture.sharded import local_of
from relight.checkpointer.parameter_samples import ParameterSamples
from relight.format import Leaf
from relight.observe import emit
from relight.torch_private.tensors import read_version

SHARE_MAX = 0.01
FREE_S = 500e-6
"""Upper limits of the cost of recording a boundary: a share of the step's time, and seconds (twice that if a handover
needs the boundary). A boundary that costs more than both is not recorded, and a save that would need it reports
that."""
ARRAY_MAX = 64 << 10
"""Largest array, in bytes, that is hashed to detect a change: arrays have no version counter."""
AGAIN = 64
"""Steps after which the cost is measured again: another load may have slowed the measurement."""


Leave = Callable[[int, Captured, RngSnapshot], None]


class Boundary:
    """The state at the end of the last step: the large part as a fingerprint, the small part by value."""

    def __init__(self, components: Mapping[str, object], recall: CaptureCache, leave: Leave | None = None) -> None:
        """``recall`` must be a cache of captures of all ``components``. (With several ranks, captures have only the
        replicated state, so their cache does not qualify.) ``leave`` is called at each boundary with the step, the
        small state and the generators."""
        self._components, self._recall, self._leave = components, recall, leave
        self._free_s = FREE_S if leave is None else 2 * FREE_S
        self._known: dict[str, object] = {}
        self._small: dict[str, object] = {}
        self._loose: dict[str, list[Any]] = {}
        """Tensors and arrays that belong to neither a module nor an optimizer, by component, at the last check."""
        self._find_small()
        self.step: int | None = None
        self._captured: Captured | None = None
        self._generators: RngSnapshot | None = None
        self._fingerprint: tuple[Any, ...] = ()
        self._marks: tuple[Any, ...] | None = ()
        self._samples: ParameterSamples | None = None
        self._sampled_of: Callable[[], object | None] = lambda: None
        """Returns the cache's template as of ``_samples``."""
        self._cost_s = 0.0
        self._measured = self._steps = 0
        self.step_s = 0.0
        """Seconds of the last step, from boundary to boundary; 0: unknown."""
        self._last_s = 0.0

    def remember(self, step: int, over: bool = True) -> None:
        """Record the boundary after ``step``. Call it at the end of every step. Skip it if recording is too expensive,
        or if the step is not ``over``: its update is still to come."""
        if not over:
            return
        now, used = time.perf_counter(), time.thread_time()
        if self._last_s:
            self.step_s = now - self._last_s
        self.step = step
        self._steps += 1
        if self._measured < 3 or self._cost_s <= max(self._free_s, SHARE_MAX * self.step_s) or self._steps % AGAIN == 0:
            self._find_small()
            self._captured = capture(self._small, rng=False)
            self._generators = frozen_generators()
            if self._measured < 2 and self._recall.valid_template(self._components) is None:
                # fills the cache, so that later checks are cheap
                capture(self._components, rng=False, recall=self._recall)
                self._cost_s = 0.0
            self._fingerprint, self._marks = self._glance(), _marks(self._held())
            if self._leave is not None:
                self._leave(step, self._captured, self._generators)
            cost = time.thread_time() - used  # other load on the machine is not our cost
            self._cost_s = min(cost, self._cost_s) if self._cost_s else cost
            self._measured += 1
        else:
            self._captured = None
        self._last_s = time.perf_counter()

    def forget(self) -> None:
        """Drop the boundary, because a newer state was saved."""
        self.step = self._captured = None

    def consistent(self) -> Captured | None:
        """Return the whole state at the boundary. Return None if parameters or optimizer have changed since, or nothing
        was recorded."""
        if self._captured is None or self._generators is None:
            return None
        self._recall.valid_template(self._components)  # drops the cached template if a component was replaced
        if self._glance() != self._fingerprint:
            return None
        for name in self._loose:
            self._loose[name] = _memory_of(self._components[name])
        if self._marks is None or _marks(self._held()) != self._marks:
            return None
        large = {name: value for name, value in self._components.items() if name not in self._small}
        small = merge(self._captured, capture_generators(self._generators.states()))
        return merge(capture(large, rng=False), small)

    def consistent_after(self, error: BaseException) -> Captured | None:
        """Return the state at the boundary, for a save before ``error`` ends the process. Report the reason if there is
        none."""
        state = self.consistent()
        if state is None:
            cause = "parameters or optimizer had changed since its end (or remembering every step's end would have cost too much)"
            emit(
                "save.inconsistent",
                f"{type(error).__name__} in the step after {self.step}: {cause}, so nothing was saved",
                step=self.step,
            )
        return state

    def _find_small(self) -> None:
        """Classify components as small or large. A component that the script has replaced since the last call is
        classified again."""
        for name, value in self._components.items():
            if name in self._known and value is self._known[name]:
                continue
            self._known[name] = value
            self._loose.pop(name, None)
            if is_large(value):
                self._small.pop(name, None)
                if not isinstance(value, (nn.Module, torch.optim.Optimizer)):
                    self._loose[name] = _memory_of(value)
            else:
                self._small[name] = value

    def _held(self) -> list[Any]:
        return [memory for memories in self._loose.values() for memory in memories]

    def _glance(self) -> tuple[Any, ...]:
        fixed = self._recall.fixed
        if self._samples is None or self._sampled_of() is not fixed:
            self._samples = ParameterSamples(list(named_gradients(self._components).values()))
            self._sampled_of = weakref.ref(fixed) if fixed is not None else lambda: None
        return self._recall.glance() or fingerprint(self._components), self._samples.read()


def _memory_of(value: object) -> list[Any]:
    """Return the tensors and arrays of a value, or of a component's ``state_dict``."""
    return list(memory_in(value if kind_of(value) == VALUE else value.state_dict()))  # type: ignore[attr-defined]


def _marks(held: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return marks that stay equal until a tensor or array is written or replaced; None if a change could not be
    detected."""
    marks: list[Any] = []
    for memory in held:
        if isinstance(memory, torch.Tensor):
            if memory.is_inference() or memory.layout != torch.strided:
                return None
            marks.append((local_of(memory).data_ptr(), read_version(memory)))
        elif memory.nbytes > ARRAY_MAX:
            return None
        else:
            marks.append((id(memory), hash(memory.tobytes()) if memory.dtype != object else None))
    return tuple(marks)


def merge(first: Captured, second: Captured) -> Captured:
    """Return one captured state from two that have no component in common."""
    return replace(
        first,
        tree={**first.tree, **shifted(second.tree, len(first.items))},
        items=[*first.items, *second.items],
        kinds={**first.kinds, **second.kinds},
        notes=[*first.notes, *second.notes],
    )


def selected(state: Captured, names: Collection[str]) -> Captured:
    """Return the components ``names`` of a captured state, with the tensors that they refer to. No tensor may be
    sharded over ranks."""
    tree = {name: node for name, node in state.tree.items() if name in names}
    places: dict[int, int] = {}
    numbered = _renumbered(tree, lambda index: places.setdefault(index, len(places)))
    kinds = {name: kind for name, kind in state.kinds.items() if name in names}
    return Captured(numbered, [state.items[index] for index in places], kinds, list(state.notes))


def shifted(tree: dict[str, Any], by: int) -> dict[str, Any]:
    """Return the tree with the item numbers of its leaves increased by ``by``."""
    moved: dict[str, Any] = _renumbered(tree, lambda index: index + by)
    return moved


def _renumbered(node: Any, number: Callable[[int], int]) -> Any:
    kind = type(node)
    if kind is Leaf:
        return Leaf(node.kind, tuple(map(number, node.tensors)), node.meta)
    if kind is dict:
        return {key: _renumbered(value, number) for key, value in node.items()}
    if kind in (list, tuple):
        return kind(_renumbered(value, number) for value in node)
    return node
