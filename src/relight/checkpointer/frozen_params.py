"""Frozen parameters that are assumed unchanged while their version counters are (``Compact(trust_versions=True)``)."""

from __future__ import annotations

from relight.capture import Captured
from relight.capture.capture import TemplateItems
from relight.capture.tensors import TensorSource
from relight.checkpointer.slot_copy_plan import OVERLAP_FROM
from relight.commit.chunk_index import UnchangedTensors
from relight.observe import emit
from relight.policy import Compact
from relight.snapshot import FrozenTensors, TensorMarks


class FrozenParams:
    """The frozen parameters of the last captured state, and their marks at this process's last save.

    Small parameters are always copied: checking them would cost as much.
    """

    def __init__(self, rules: Compact | None) -> None:
        self._asked = rules is not None and rules.trust_versions
        self._of: TemplateItems | None = None
        self._frozen: FrozenTensors | None = None
        self._now: TensorMarks | None = None
        self._then: tuple[str, TensorMarks] | None = None

    def frozen(self, state: Captured) -> FrozenTensors | None:
        """Return the frozen parameters, the same object while they are the same tensors in the same memory; None if
        there are none, or if version counters are not trusted."""
        if not self._asked or state.fixed is None:
            return None
        if state.fixed is not self._of:
            tensors = []
            for number in sorted(state.frozen):
                source = state.items[number].source
                if not isinstance(source, TensorSource):
                    continue
                tensor = source.host_tensor if source.host_tensor is not None else source.device_tensor
                if tensor is not None and source.length >= OVERLAP_FROM and not tensor.is_inference():
                    tensors.append((number, tensor))
            self._of, self._frozen, self._then = state.fixed, FrozenTensors(tensors) if tensors else None, None
        return self._frozen

    def vouched(self, state: Captured) -> UnchangedTensors | None:
        """Return the parameters that are unchanged since this process's last save. Call it when a save starts."""
        frozen, self._now = self.frozen(state), None
        if frozen is None:
            return None
        self._now = frozen.fingerprint()
        if self._then is None:
            return None
        checkpoint_id, then = self._then
        return UnchangedTensors(checkpoint_id, frozen.same(then, self._now), self.wrong)

    def committed(self, checkpoint_id: str) -> None:
        """Record that the save of the last ``vouched`` call is now the checkpoint ``checkpoint_id``."""
        self._then = (checkpoint_id, self._now) if self._now is not None else None

    def wrong(self, name: str) -> None:
        """Report a parameter that changed although its marks did not. From now on none is trusted."""
        self._asked, self._frozen, self._then = False, None, None
        emit(
            "frozen_param.modified",
            f"frozen parameter {name} was changed, and torch did not count the change: this save has its new value, "
            "earlier saves may have the old one; "
            "Compact(trust_versions=True) is switched off for this run",
            tensor=name,
        )
