"""Parameters that are taken to be what they were, because nothing says that they were written to: where a run is told to trust that."""

from __future__ import annotations

from relight.capture import Captured
from relight.capture.capture import TemplateItems
from relight.checkpointer.slot_copy_plan import OVERLAP_FROM
from relight.commit.chunk_index import UnchangedTensors
from relight.observe import emit
from relight.policy import Compact
from relight.snapshot import FrozenTensors, TensorMarks


class FrozenParams:
    """What is frozen of the state that was captured last, and how it looked when it was saved last by this process.

    Small ones are left to be copied: looking at them would cost as much.
    """

    def __init__(self, rules: Compact | None) -> None:
        self._asked = rules is not None and rules.trust_versions
        self._of: TemplateItems | None = None
        self._frozen: FrozenTensors | None = None
        self._now: TensorMarks | None = None
        self._then: tuple[str, TensorMarks] | None = None

    def frozen(self, state: Captured) -> FrozenTensors | None:
        """The same object as long as they are the same tensors in the same memory; None if there are none, or none is to be trusted."""
        if not self._asked or state.fixed is None:
            return None
        if state.fixed is not self._of:
            found = []
            for number in sorted(state.frozen):
                source = state.items[number].source
                tensor = getattr(source, "host_tensor", None)
                tensor = getattr(source, "device_tensor", None) if tensor is None else tensor
                if tensor is not None and source.length >= OVERLAP_FROM and not tensor.is_inference():
                    found.append((number, tensor))
            self._of, self._frozen, self._then = state.fixed, FrozenTensors(found) if found else None, None
        return self._frozen

    def vouched(self, state: Captured) -> UnchangedTensors | None:
        """What this process's last save has of them as they are; to be asked at a save's call."""
        frozen, self._now = self.frozen(state), None
        if frozen is None:
            return None
        self._now = frozen.fingerprint()
        if self._then is None:
            return None
        checkpoint_id, then = self._then
        return UnchangedTensors(checkpoint_id, frozen.same(then, self._now), self.wrong)

    def committed(self, checkpoint_id: str) -> None:
        """The save for which ``vouched`` was asked last is that checkpoint now."""
        self._then = (checkpoint_id, self._now) if self._now is not None else None

    def wrong(self, name: str) -> None:
        """One was written to, and nothing told. None is trusted from now on."""
        self._asked, self._frozen, self._then = False, None, None
        emit(
            "frozen_param.modified",
            f"{name} was written to without a trace: this save has what it is now, earlier ones may have what it was. "
            "Compact(trust_versions=True) is not for this run; it is off from here on",
            tensor=name,
        )
