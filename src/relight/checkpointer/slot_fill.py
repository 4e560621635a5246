"""The copy of one save's state into a slot, from its first byte to the seal or to a failure."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from relight.agent import Agent
from relight.arena import Slot
from relight.checkpointer.slot_copy_plan import written_meanwhile
from relight.errors import RelightError, known
from relight.snapshot import DeviceSnapshot, FrozenTensors, TensorMarks


class FillState(Enum):
    """How far the copy is."""

    COPYING = "copying"
    """Live tensors are read: by the training thread, then by the copying thread."""
    ARRIVING = "arriving"
    """No live tensor is read any more, and copies from accelerators are under way."""
    SEALED = "sealed"
    FAILED = "failed"


class FillOwner(Protocol):
    """The writer that fills a slot."""

    def finish_later(self, action: Callable[[list[str]], None], touched: list[str]) -> None:
        """Run ``action(touched)`` in the thread that waits for accelerators."""

    def on_slot_sealed(self, fill: SlotFill) -> None:
        """Called once if the slot was sealed, in the thread that sealed it, before the agent is notified."""

    def on_fill_failed(self, fill: SlotFill, error: RelightError) -> None:
        """Called once if the copy failed after the training thread had started it."""


class SlotFill:
    """One copy. The copying thread calls ``copied``; another thread may then wait for the accelerators."""

    def __init__(
        self, number: int, checkpoint_id: str, index: int, slot: Slot, request_at: int, agent: Agent, owner: FillOwner
    ) -> None:
        """``request_at``: offset of the save's request in the slot."""
        self.number, self.checkpoint_id, self.index, self.slot = number, checkpoint_id, index, slot
        self.state, self.started = FillState.COPYING, time.perf_counter()
        self.devices: list[DeviceSnapshot] = []
        """Copies from accelerators that were begun."""
        self.frozen: tuple[FrozenTensors, TensorMarks] | None = None
        """The frozen tensors, as the slot has them once it is sealed."""
        self.touched = False
        """Whether training wrote to a tensor while it was copied: then the save fails."""
        self._request_at, self._request_bytes, self._agent, self._owner = request_at, 0, agent, owner

    def begin(self, request: bytes) -> None:
        """Mark the slot as being filled, and write the save's request into it."""
        self._request_bytes = len(request)
        self.slot.begin(self.number)
        self.slot.view[self._request_at : self._request_at + len(request)] = request

    def announce(self) -> None:
        """Let the agent write what is copied, while the rest is still being copied."""
        self.slot.announce(self.number, self._request_at, self._request_bytes)
        self._agent.begin(self.index, self.number)

    def copied(self, touched: list[str]) -> None:
        """Continue when all live tensors were read. ``touched``: names of those that changed meanwhile."""
        if self.devices:
            self.state = FillState.ARRIVING
            self._owner.finish_later(self._arrived, touched)
        else:
            self._end(touched)

    def abandon(self) -> None:
        """End the copy after an error in the training thread, which reports it."""
        self.state = FillState.FAILED
        with contextlib.suppress(RuntimeError):
            for device in self.devices:
                device.finish()

    def _arrived(self, touched: list[str]) -> None:
        try:
            late = {name for device in self.devices for name in device.finish()}
        except RuntimeError as error:  # the accelerator failed: an earlier kernel of training, most often
            self._fail(known(error))
        else:
            self._end(sorted({*touched, *late}))

    def _end(self, touched: list[str]) -> None:
        if self.state is FillState.FAILED:  # abandoned: another save may have the slot
            return
        self.touched = bool(touched)
        if touched:
            self._fail(written_meanwhile(touched))
            return
        self.slot.seal(self.number, self._request_at, self._request_bytes)
        self.state = FillState.SEALED
        self._owner.on_slot_sealed(self)
        self._agent.save(self.index, self.number, self.checkpoint_id)

    def _fail(self, error: RelightError) -> None:
        self.state = FillState.FAILED
        self._owner.on_fill_failed(self, error)
