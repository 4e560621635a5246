"""Capture of a Checkpointer's components, and what one capture keeps for the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relight.capture import CaptureCache, Captured, capture, class_paths, warm_up_vector_math
from relight.capture.restore_check import Restorable
from relight.checkpointer.boundary import Boundary
from relight.checkpointer.handover import Handover
from relight.format.root_keys import CLASSES, MICRO_STEP
from relight.ranks.group import RankGroup


class StateCapture:
    """The components of one Checkpointer, as its saves read them. Captures refer to live tensors and copy none.

    Only the training thread uses it.
    """

    def __init__(self, components: dict[str, object], ranks: RankGroup, location: str) -> None:
        warm_up_vector_math()
        ranks.check_split(components)
        self.components = components
        self._ranks = ranks
        self._plans, self._cache = Restorable(), CaptureCache()
        self._whole_cache = ranks.cache_of_all(self._cache)
        self.handover = Handover(ranks, components, location)
        """The last step's small state, published for the case that another rank dies."""
        self.restart_boundary()

    def part(self, micro_step: int | None = None, failed: Exception | None = None) -> Captured:
        """Return this rank's part of the next checkpoint. Collective. Raise ``IncompatibleState`` if no restore would accept it.

        ``failed``: an error of this rank since the ranks decided to save. It is raised, on all ranks.
        """
        state = self._ranks.capture(
            self.components, self._plans, micro_step=micro_step, recall=self._cache, failed=failed
        )
        if micro_step is not None:
            self.boundary.forget()  # an older state must not be saved after this one
        return state

    def whole(self) -> Captured:
        """Return all that this rank has, whichever rank would write it. Raise ``IncompatibleState`` as ``part`` does."""
        return self._plans.check(self.components, capture(self.components, recall=self._whole_cache))

    def describe(self) -> Captured:
        """Return all that this rank has, unchecked."""
        return capture(self.components)

    def restart_boundary(self) -> None:
        """Forget the last step's end: a restore has changed the state."""
        self.boundary = Boundary(self.components, self._whole_cache, self.handover.published_state)

    def user_fields(self, metadata: Mapping[str, Any], micro_step: int | None) -> dict[str, Any]:
        """Return the metadata of a checkpoint of the last capture: the caller's, results of comparing ranks, and what a restore needs."""
        micro = {} if micro_step is None else MICRO_STEP.field(micro_step)
        return {**metadata, **self._ranks.root_user_fields, **micro, **CLASSES.field(class_paths(self.components))}
