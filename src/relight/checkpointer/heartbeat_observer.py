"""Publish the loop's progress in the heartbeat page that the supervisor reads: see ``relight.heartbeat``."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from relight.checkpointer.observer import ObservedCheckpointer, observers
from relight.checkpointer.step_pauses import StepPauses
from relight.errors import Diverged, ReplicasDiffer
from relight.heartbeat import ENDED, HeartbeatWriter, heartbeat
from relight.heartbeat.writer import last_words
from relight.observe import Event, subscribe
from relight.policy.rollback_env import SPIKES
from relight.policy.spikes import spikes_of
from relight.store.urls import absolute

AWAY_EVERY = 10
"""Read device-resident losses only every N steps, all of them, one step late: reading the first one waits for the stream."""


class HeartbeatObserver:
    """An ``Observer`` that also receives the events of saves. Costs a few microseconds per step. Raises ``Diverged`` if
    the loss is NaN or infinite, or jumped."""

    def __init__(self, teller: HeartbeatWriter) -> None:
        self._teller = teller
        self._spikes = spikes_of(os.environ.get(SPIKES, ""))
        self._pauses = StepPauses()
        self._away: list[tuple[int, torch.Tensor]] = []
        """Steps with losses on a device that were not read yet."""
        self._open: weakref.WeakSet[ObservedCheckpointer] = weakref.WeakSet()
        self._trained: weakref.WeakSet[ObservedCheckpointer] = weakref.WeakSet()
        """Open Checkpointers that have completed a step. Others, such as that of a teacher's weights, may never be closed."""
        self._has_ended = False
        """Whether the phase ``ENDED`` was published, and no Checkpointer was opened, and no step completed, since."""
        subscribe(self._on_risk)
        last_words.append(self._leave)

    def place(self, url: str, run: str) -> tuple[str, str]:
        """Publish store and run, and leave them unchanged."""
        self._teller.at(absolute(url), run)
        return url, run

    def on_start(self, ckpt: ObservedCheckpointer) -> None:
        """Remember an open Checkpointer: if the script ends by an error, it is closed as a ``with`` block would close
        it. The script trains again if an earlier one was closed."""
        self._open.add(ckpt)
        if self._has_ended:
            self._has_ended = False
            self._teller.phase("starting")

    def on_restore(self, ckpt: ObservedCheckpointer, step: int, checkpoint_id: str | None) -> None:
        """Publish the last step that the restored checkpoint has; −1 for a fresh run."""
        self._teller.restored(step - 1 if checkpoint_id is not None else -1)

    def on_step(self, ckpt: ObservedCheckpointer, step: int, metrics: Mapping[str, Any], samples: Any) -> None:
        """Publish the end of a step and its loss. Raise ``Diverged`` or ``ReplicasDiffer`` if training must roll
        back."""
        if ckpt.replica_mismatch:
            hint = "relight run goes back to before it; what differs by design goes into per_rank="
            raise ReplicasDiffer(ckpt.replica_mismatch, where=f"before step {step}", hint=hint)
        self._trained.add(ckpt)
        self._has_ended = False
        losses = self._read(step, metrics.get("loss"))
        self._teller.stepped(step, losses[-1][1] if losses else math.nan)
        if ckpt._signals is None or not ckpt._signals.ending:
            self._teller.paused(self._pauses.after_step(self._teller.path))
        for loss_step, loss in losses:
            jump = self._spikes.update(loss_step, loss)
            if jump is not None:
                raise Diverged(jump.why, where=f"onset {jump.onset}", hint="relight run goes back to before it")

    def on_end(self, ckpt: ObservedCheckpointer) -> None:
        """Publish the phase ``ENDED`` once no Checkpointer trains: the rest of the script may take any time."""
        has_trained = ckpt in self._trained
        self._open.discard(ckpt)
        self._trained.discard(ckpt)
        if not self._open or (has_trained and not self._trained):
            self._has_ended = True
            self._teller.phase(ENDED)

    def _leave(self, error: Exception) -> None:
        for ckpt in list(self._open):
            with contextlib.suppress(Exception):  # the script's error matters more
                ckpt.__exit__(type(error), error, error.__traceback__)

    def _read(self, step: int, loss: Any) -> list[tuple[int, float]]:
        """Return the losses that can be read without waiting for a device, with their steps, oldest first."""
        if type(loss) in (float, int):
            return [(step, float(loss))]
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return []
        if loss.device.type == "cpu":
            return [(step, float(loss.detach()))]
        losses = []
        if len(self._away) >= AWAY_EVERY:
            losses = [(before, float(value)) for before, value in self._away]
            self._away = []
        self._away.append((step, loss.detach().clone()))  # a CUDA graph writes each step's loss to the same memory
        return losses

    def _on_risk(self, event: Event) -> None:
        step = event.fields.get("step")
        if type(step) is not int:
            return
        if event.name == "save.requested":
            self._teller.save_requested(step)
        elif event.name == "save.sealed":
            self._teller.sealed(step)
        elif event.name in ("save.durable", "save.failed"):
            self._teller.over(step, durable=event.name == "save.durable")


def attach_heartbeat() -> None:
    """Add the observer if a supervisor reads this process's heartbeat. Idempotent."""
    if heartbeat().has_reader and not any(isinstance(observer, HeartbeatObserver) for observer in observers):
        observers.append(HeartbeatObserver(heartbeat()))
