"""How far a Checkpointer has come: the last reported step, the last save, and what the next save needs to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import Any

from relight.checkpointer.calls import Calls
from relight.checkpointer.inflight import At, InflightSaves
from relight.checkpointer.metric_values import as_they_are
from relight.checkpointer.save_handle import Save
from relight.log.checkpoint_view import age_of
from relight.restore.result import Resumed
from relight.save_reason import SaveReason


@dataclass(slots=True)
class RunProgress:
    """The progress of one Checkpointer, in this process."""

    run: str
    calls: Calls = field(init=False)
    """Checks of the calls that reported it."""
    in_flight: InflightSaves = field(default_factory=InflightSaves)
    """Saves in the writer process."""
    step: int | None = None
    """The step that was reported last."""
    micro_step: int | None = None
    """The micro-batch that ended last, if that step is not over."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The metrics of that report."""
    saved: At | None = None
    """Step and micro-batch of the last save that was started and has not failed."""
    saved_s: float = field(default_factory=lambda: monotonic())  # noqa: PLW0108 - tests replace the clock
    """When that save was started, or failed."""
    returned_s: float = field(default_factory=perf_counter)
    """When ``step()`` returned last, of the performance counter."""
    resumed: Resumed = field(default_factory=Resumed)
    """What the last restore did."""
    parent: str | None = None
    """The parent of the next checkpoint."""
    due: SaveReason | None = None
    """The reason of a postponed save."""
    durable: Save | None = None
    """The last save that became a checkpoint."""
    failed_in_a_row: int = 0
    """Failed saves since the last checkpoint."""

    def __post_init__(self) -> None:
        self.calls = Calls(self.run)

    @property
    def at(self) -> tuple[int | None, int | None]:
        """Step and micro-batch that were reported last."""
        return self.step, self.micro_step

    @property
    def saved_step(self) -> int | None:
        """The step of the last save."""
        return self.saved[0] if self.saved is not None else None

    @property
    def facts(self) -> list[tuple[str, object]]:
        """What a notebook shows: the last step, the newest checkpoint that this process knows, and the saves in flight."""
        facts: list[tuple[str, object]] = [("step", self.step)]
        saves = self.in_flight.saves  # one that is durable stays there until the next call
        durable = next((save for save in reversed(saves) if save.done), self.durable)
        if durable is not None:
            facts.append(("newest checkpoint", durable.line))
        elif (restored := self.resumed.checkpoint) is not None:
            facts.append(("restored checkpoint", f"step {restored.step} ({restored.id}, {age_of(restored.time)})"))
        facts += [("saving", save.line) for save in saves if not save.done and save.error is None]
        return [*facts, ("failed saves in a row", self.failed_in_a_row or None)]

    def report(self, step: int, micro_step: int | None, metrics: Mapping[str, Any]) -> None:
        """Record that a step, or a micro-batch of it, has ended."""
        self.step, self.micro_step, self.metrics = step, micro_step, as_they_are(metrics)

    def save_started(self, step: int, micro_step: int | None) -> None:
        """Record that a save was started."""
        self.saved, self.saved_s = (step, micro_step), monotonic()

    def save_failed(self) -> None:
        """Record that a save has failed."""
        self.failed_in_a_row, self.saved_s = self.failed_in_a_row + 1, monotonic()
