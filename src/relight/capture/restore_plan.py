"""What all that plans a restore works on: what is stored, where it goes, what does not fit, what to do when the bytes are there."""

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
"""When something is done: the lower the earlier."""
SAID_MAX = 5
"""Of what was left out."""


@dataclass
class RestorePlan:
    """Fill ``sinks``, then call ``finish``. ``values`` are those of components that cannot be changed in place, set by ``finish``."""

    strict: bool = True
    where: str = ""
    sinks: dict[int, Sink] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    """What is in the checkpoint and not here, in sentences, if it may be on other ranks."""
    notes: list[str] = field(default_factory=list)
    actions: list[tuple[int, Thunk]] = field(default_factory=list)

    def refuse(self, wrong: Sequence[str]) -> None:
        """``IncompatibleState`` if there is something, and it counts; else it is skipped."""
        if wrong and self.strict:
            raise IncompatibleState(
                f"the checkpoint does not fit: {len(wrong)} mismatches" if len(wrong) > 1 else "the checkpoint does not fit",
                where=self.where,
                details=list(wrong),
                hint="strict=False restores what fits; only=[patterns] restores a part; map={'old/*': 'new/*'} renames",
            )
        self.skipped += wrong
        if wrong:
            some = "; ".join(sorted(wrong)[:SAID_MAX]) + (f"; and {len(wrong) - SAID_MAX} more" if len(wrong) > SAID_MAX else "")
            self.notes.append(f"strict=False left out what does not fit: {some}")

    def finish(self) -> None:
        """Set what is not tensors: loaders before generators, as making an iterator draws random numbers."""
        with torch.no_grad():
            for _, action in sorted(self.actions, key=lambda pair: pair[0]):
                action()
        self.actions.clear()  # they hold the temporaries, and this plan: a cycle that would keep all of it until some later collection


class Planning:
    """Of one restore. ``only``, ``strict``, ``rename``: see ``plan_restore``."""

    def __init__(
        self,
        components: Mapping[str, object],
        tensors: Sequence[Tensor],
        only: Sequence[str] | None,
        strict: bool,
        rename: Callable[[str], str] | None,
        memory: FreshTensors,
        where: str,
    ) -> None:
        self.components, self.tensors, self.only, self.rename, self.memory = components, tensors, only, rename, memory
        self.idle: list[str] = list(dict.fromkeys(only)) if only is not None else []
        """Patterns of ``only`` that nothing has matched yet."""
        self.result = RestorePlan(strict, where)
        self.wrong: list[str] = []
        self.unused: list[str] = []
        self.targets = Targets(tensors, self.wrong, strict=strict)
        self.mastered: set[tuple[int, str]] = set()
        """Which runs of declared flat tensors, by ``id``, have stored values of their own, by the parameter's name."""
        self.classes: Mapping[str, str] = {}
        """Recorded class of each stored component, by its live name."""
        self.imported = False
        """Whether another framework stored it."""
        self._stored_shapes: dict[str, tuple[int, ...]] | None = None
        self.undo: list[Thunk] = []
        """What takes back changes that planning had to make."""
        self.resized: set[int] = set()
        """Parameters, by ``id``, that are stored in another shape: nor does what an optimizer holds for them fit."""

    def back(self) -> None:
        """Undo what planning has changed in live objects: a restore that is refused leaves them as they were."""
        while self.undo:
            self.undo.pop()()

    def do(self, order: int, action: Thunk) -> None:
        """``action`` when the bytes are there, in its turn."""
        self.result.actions.append((order, action))

    def takes(self, path: str) -> bool:
        """Whether what is at ``path`` was asked for."""
        found = selected(path, self.only)
        if found and self.idle:
            self.idle = [one for one in self.idle if not selected(path, [one])]
        return found

    def has_shape(self, name: str, live: torch.Tensor) -> bool:
        """Whether a parameter of that name is stored in the shape of the live one, so that all state kept for it fits as well."""
        if self._stored_shapes is None:
            self._stored_shapes = {one.name: one.shape for one in self.tensors if one.role == "param"}
        modules = [component for component, value in self.components.items() if isinstance(value, torch.nn.Module)]
        paths = (*(f"{component}/{name}" for component in modules), name.replace(".", "/", 1))
        return self.rename is None and any(self._stored_shapes.get(path) == tuple(live.shape) for path in paths)

    def touches(self, name: str) -> bool:
        """Whether something of a component may have been asked for."""
        if self.only is None:
            return True
        heads = [pattern.split("/", 1)[0] for pattern in self.only]
        return any(selected(name, [head]) for head in heads)

    def note_class(self, path: str, live: object, stored: str | None) -> None:
        """Note it if the component at ``path`` was saved by an object of another class: what it stored may fit all the same."""
        if stored is not None and not is_of(live, stored):
            self.result.notes.append(f"{path}: stored by {name_in(stored)}, the live object is {name_in(class_path(live))}")

    def guarded(self, path: str, action: Thunk) -> None:
        """``action``; what others' code raises is told as what is at ``path`` not fitting."""
        try:
            action()
        except RelightError:
            raise
        except Exception as error:  # somebody else's load_state_dict: say whose, keep what it said
            raise IncompatibleState(f"{type(error).__name__} while restoring: {error}", where=path) from error
