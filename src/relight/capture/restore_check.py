"""Refuse saves that could not be restored: checked at the first save, and when the structure of the state has changed."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

from relight.capture import Captured, mismatches
from relight.errors import IncompatibleState

ALWAYS = 4
"""Number of structures for which a restore is planned at any cost."""
SHARE_MAX = 0.01
"""Share of the time since the last plan that a further one may take: a state that grows at each save has a new structure each time."""


class Restorable:
    """Plans of one Checkpointer. A plan costs about a third of a first capture, once for each structure; a comparison 0.2 µs a tensor."""

    def __init__(self) -> None:
        self._structure: object = None
        self._plans = 0
        self._cost_s = self._at_s = 0.0

    def check(self, components: Mapping[str, object], state: Captured) -> Captured:
        """Return ``state``. ``IncompatibleState``, by path, if it could not be restored into ``components``."""
        if error := self.error(components, state):
            raise error
        return state

    def error(self, components: Mapping[str, object], state: Captured) -> IncompatibleState | None:
        """Return what ``check`` raises; None if it raises nothing."""
        structure = _structure_of(state)
        now = perf_counter()
        if structure == self._structure or (self._plans >= ALWAYS and self._cost_s > SHARE_MAX * (now - self._at_s)):
            return None
        problems = mismatches(components, state)
        self._structure, self._at_s = structure, perf_counter()
        self._cost_s, self._plans = self._at_s - now, self._plans + 1
        if not problems:
            return None
        self._structure = None
        return IncompatibleState(
            "this state can be saved, and not restored",
            details=problems,
            hint="nothing was written; give the object that is named a state_dict() and load_state_dict() that take the state back, "
            "or give what it holds as components of their own",
        )


def _structure_of(state: Captured) -> object:
    """Return the names and dtypes of the tensors.

    Shapes are omitted: buffers that grow would change them at each save.
    """
    fixed_count = len(state.fixed.items) if state.fixed is not None else 0
    items = state.items[fixed_count:]
    # Strings, not tuples: the garbage collector would go through tens of thousands of them at each save.
    names, dtypes = "\0".join([item.name for item in items]), " ".join([item.dtype for item in items])
    return id(state.fixed) if state.fixed is not None else None, hash(names), hash(dtypes)
