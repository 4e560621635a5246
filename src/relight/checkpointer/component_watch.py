"""Watch the script's use of its components: batches that loaders deliver, steps of optimizers, attributes that
change."""

from __future__ import annotations

from collections.abc import Mapping

from relight.capture import report_steps, unwatch_loaders, watch_loaders
from relight.checkpointer.epoch_count import EpochCount
from relight.checkpointer.hooks import Hook
from relight.checkpointer.outside_state import OutsideState
from relight.checkpointer.ungiven import UngivenOptimizers
from relight.observe import emit


class ComponentWatch(Hook):
    """The hooks and records of one Checkpointer, from its construction to its end."""

    def __init__(self, components: Mapping[str, object], reports: bool) -> None:
        """``reports``: whether this rank emits events about them."""
        self._components, self._reports = components, reports
        watch_loaders(components, self)
        self.ungiven = UngivenOptimizers(components, reports)
        self.outside = OutsideState(components, reports)
        self.epochs = EpochCount(components)

    @property
    def sentences(self) -> list[str]:
        """One sentence for each state that changes in training and is in no checkpoint."""
        return [*self.ungiven.sentences, *self.outside.sentences]

    def saved(self) -> None:
        """Report, after one of the first saves, state that it does not have. Each finding is reported once."""
        self.ungiven.saved()
        self.outside.saved()

    def report(self, step: int | None, micro_step: int | None, last: tuple[int | None, int | None], each: bool) -> None:
        """Count the batches that the loop has used, at the report of ``step`` after ``last`` (step and micro-batch).

        ``each``: whether every step is reported, as by ``Checkpointer.step``. Otherwise the steps between are counted
        by their numbers.
        """
        if step is None:
            self.epochs.forget()  # a restore
        if step is None or micro_step is not None:
            return
        before = None if last[0] is None else last[0] - (last[1] is not None)
        steps = 1 if each else step + 1 if before is None else step - before
        if step == before or steps < 1:
            return
        for name in report_steps(self._components, steps):
            if self._reports:
                emit(
                    "loader.prefetched",
                    f"loader {name}: something takes batches from it before the training loop uses them; those count as not delivered. "
                    "If they were used, state how many were: relight.capture.used(loader, batches)",
                    loader=name,
                )

    def on_close(self, polite: bool) -> None:
        """Remove all hooks. Idempotent."""
        unwatch_loaders(self._components, self)
        self.ungiven.close()
