"""The shared state of planning a restore: stored tensors, their targets, mismatches, and actions after the read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from relight.capture.classes import class_path, is_of
from relight.capture.load_tree import selected
from relight.capture.rebuild import FreshTensors, Thunk
from relight.capture.targets import Targets
from relight.errors import IncompatibleState, RelightError
from relight.format import Tensor
from relight.format.class_names import name_in
from relight.layout import Sink

FIRST, STATE, LOADERS, LAST = range(4)
"""Order of actions: lower numbers run first."""
SHOWN_MAX = 5
"""Number of skipped values that a note lists."""


@dataclass
class RestorePlan:
    """Fill ``sinks``, then call ``finish``, which sets ``values``: of components that cannot be changed in place."""

    strict: bool = True
    where: str = ""
    sinks: dict[int, Sink] = field(default_factory=dict)
    fresh: frozenset[int] = frozenset()
    """The tensors that are read into new memory, for ``finish`` to use: every byte of them must be read."""
    values: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    """Sentences on stored values that have no place here, but may have one on other ranks."""
    notes: list[str] = field(default_factory=list)
    actions: list[tuple[int, Thunk]] = field(default_factory=list)

    def refuse(self, wrong: Sequence[str]) -> None:
        """Raise ``IncompatibleState`` if there are mismatches and the plan is strict; otherwise skip them."""
        if wrong and self.strict:
            raise IncompatibleState(
                f"the checkpoint does not fit: {len(wrong)} mismatches"
                if len(wrong) > 1
                else "the checkpoint does not fit",
                where=self.where,
                details=list(wrong),
                hint="strict=False restores what fits; only=[patterns] restores a part; map={'old/*': 'new/*'} renames",
            )
        self.skipped += wrong
        if wrong:
            listed = "; ".join(sorted(wrong)[:SHOWN_MAX]) + (
                f"; and {len(wrong) - SHOWN_MAX} more" if len(wrong) > SHOWN_MAX else ""
            )
            self.notes.append(f"strict=False left out what does not fit: {listed}")

    def finish(self) -> None:
        """Restore everything but tensors: loaders before generators, as creating an iterator draws random numbers."""
        with torch.no_grad():
            for _, action in sorted(self.actions, key=lambda pair: pair[0]):
                action()
        self.actions.clear()  # they refer to temporaries and to this plan: a cycle would keep all of it until a later collection


class Planning:
    """Planning of one restore. ``only``, ``strict``, ``rename``, ``casts``: see ``plan_restore``."""

    def __init__(
        self,
        components: Mapping[str, object],
        tensors: Sequence[Tensor],
        only: Sequence[str] | None,
        strict: bool,
        rename: Callable[[str], str] | None,
        memory: FreshTensors,
        where: str,
        casts: bool = False,
    ) -> None:
        self.components, self.tensors, self.only, self.rename, self.memory = components, tensors, only, rename, memory
        self.idle: list[str] = list(dict.fromkeys(only)) if only is not None else []
        """Patterns of ``only`` that nothing has matched yet."""
        self.result = RestorePlan(strict, where)
        self.wrong: list[str] = []
        self.unused: list[str] = []
        self.targets = Targets(tensors, self.wrong, strict=strict, casts=casts)
        self.mastered: set[tuple[int, str]] = set()
        """``(id of a declared flat tensor, parameter name)`` of the ranges that have their own stored values."""
        self.classes: Mapping[str, str] = {}
        """Recorded class of each stored component, by its live name."""
        self.imported = False
        """Whether the checkpoint was imported from another framework."""
        self._stored_shapes: dict[str, tuple[int, ...]] | None = None
        self.undo: list[Thunk] = []
        """Functions that undo changes which planning had to make."""
        self.resized: set[int] = set()
        """Parameters, by ``id``, that are stored in another shape: their optimizer state does not fit, either."""

    def back(self) -> None:
        """Undo changes of planning in live objects: a restore that is refused must not change them."""
        while self.undo:
            self.undo.pop()()

    def do(self, order: int, action: Thunk) -> None:
        """Add an action to run once the bytes are read."""
        self.result.actions.append((order, action))

    def takes(self, path: str) -> bool:
        """Return whether the value at ``path`` is selected."""
        is_selected = selected(path, self.only)
        if is_selected and self.idle:
            self.idle = [pattern for pattern in self.idle if not selected(path, [pattern])]
        return is_selected

    def has_shape(self, name: str, live: torch.Tensor) -> bool:
        """Return whether a parameter of that name is stored in the live shape: its optimizer state then fits as well."""
        if self._stored_shapes is None:
            self._stored_shapes = {tensor.name: tensor.shape for tensor in self.tensors if tensor.role == "param"}
        modules = [component for component, value in self.components.items() if isinstance(value, torch.nn.Module)]
        paths = (*(f"{component}/{name}" for component in modules), name.replace(".", "/", 1))
        return self.rename is None and any(self._stored_shapes.get(path) == tuple(live.shape) for path in paths)

    def touches(self, name: str) -> bool:
        """Return whether part of a component may be selected."""
        if self.only is None:
            return True
        heads = [pattern.split("/", 1)[0] for pattern in self.only]
        return any(selected(name, [head]) for head in heads)

    def note_class(self, path: str, live: object, stored: str | None) -> None:
        """Add a note if an object of another class saved the component at ``path``. The state may fit nevertheless."""
        if stored is not None and not is_of(live, stored):
            self.result.notes.append(
                f"{path}: stored by {name_in(stored)}, the live object is {name_in(class_path(live))}"
            )

    def guarded(self, path: str, action: Thunk) -> None:
        """Run ``action``; an error of the user's code is raised as an ``IncompatibleState`` at ``path``."""
        try:
            action()
        except RelightError:
            raise
        except Exception as error:  # the error of a user's load_state_dict: add the path, keep its message
            raise IncompatibleState(f"{type(error).__name__} while restoring: {error}", where=path) from error
