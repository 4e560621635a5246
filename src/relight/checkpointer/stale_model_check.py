"""Detect that the saved model does not change, because the Checkpointer was given another model than the one being trained."""

from __future__ import annotations

from collections.abc import Mapping

from relight.capture import capture
from relight.checkpointer.component_watch import ComponentWatch
from relight.checkpointer.hooks import CommittedSave, Hook
from relight.checkpointer.save_handle import Save
from relight.observe import emit


class StaleModelCheck(Hook):
    """Compares a hash of each save's trainable tensors with that of the previous save."""

    def __init__(self, components: Mapping[str, object], watch: ComponentWatch | None = None) -> None:
        """``watch``: reports, after the first saves, what they do not have."""
        self._components, self._watch = components, watch
        self._last: bytes | None = None

    def on_durable(self, done: CommittedSave) -> None:
        """Compare the checkpoint with the one before."""
        self.compare(done.save, done.before, done.report.trainable_digest, done.report.logical_bytes)

    def compare(self, save: Save, before: int | None, digest: bytes, logical_bytes: int) -> None:
        """Emit ``save.stale`` if all trainable tensors equal those saved at step ``before``."""
        if self._watch is not None:
            self._watch.saved()
        if save.step != before and digest and self._last == digest and logical_bytes and self._trains():
            emit(
                "save.stale",
                f"every trainable tensor saved at step {save.step} equals the one saved at step {before}: is the model "
                "given to the Checkpointer the one that is trained?",
                step=save.step,
                id=save.id,
            )
        self._last = digest

    def _trains(self) -> bool:
        return any(item.trainable for item in capture(self._components).items)
