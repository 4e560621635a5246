"""Result of the demo: a value, its JSON, and its text for terminals."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from relight.demo.compare import DemoDifference, Finished

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True, slots=True)
class Kill:
    """A SIGKILL and its consequences.

    ``step``: the last finished step. ``saving``: the directory of the save that the kill interrupted, or None. Training resumed
    at step ``resumed_from``. ``back_s``: seconds from the kill until its first step was done. ``caught_up_s``: seconds from the
    kill until the first step that had not been done before.
    """

    number: int
    step: int
    saving: str | None
    time: float
    resumed_from: int | None = None
    back_s: float | None = None
    caught_up_s: float | None = None

    @property
    def inside_save(self) -> bool:
        """Whether the kill interrupted a save."""
        return self.saving is not None

    @property
    def redone(self) -> int:
        """Number of steps that had to be repeated."""
        return 0 if self.resumed_from is None else self.step + 1 - self.resumed_from

    def after(self, entry: Mapping[str, Any]) -> Kill:
        """Return the kill, updated with a journal entry of the next process."""
        passed = round(entry["time"] - self.time, 3)
        if entry["what"] == "started" and self.resumed_from is None:
            return replace(self, resumed_from=entry["start"])
        if entry["what"] == "finished" and self.resumed_from is not None:
            if self.caught_up_s is None and entry["step"] > self.step:
                return replace(self, back_s=self.back_s or passed, caught_up_s=passed)
            if self.back_s is None:
                return replace(self, back_s=passed)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """Result of the demo. ``ok``: enough kills, and no ``difference``. ``stall_ms``: milliseconds that training waits for a save."""

    seed: int
    quick: bool
    steps: int
    save_every: int
    kills: tuple[Kill, ...]
    difference: DemoDifference | None
    problem: str | None
    curve_digest: str
    state_digest: str
    saves: int
    stall_ms_median: float
    stall_ms_max: float
    bytes_per_save: int
    parameters: int
    text_bytes: int
    loader: str
    machine: Mapping[str, object] = field(default_factory=dict)
    picture: str
    kept: str | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the killed run equals the straight one to the bit, with enough kills."""
        return self.difference is None and self.problem is None

    @property
    def kills_inside_save(self) -> int:
        """Number of kills that interrupted a save."""
        return sum(kill.inside_save for kill in self.kills)

    @property
    def redone(self) -> int:
        """Number of repeated steps, over all kills."""
        return sum(kill.redone for kill in self.kills)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for ``json.dumps``."""
        own_fields = ("inside_save", "redone")
        kills = [{**asdict(kill), **{name: getattr(kill, name) for name in own_fields}} for kill in self.kills]
        totals = {"kills_inside_save": self.kills_inside_save, "redone": self.redone}
        return {"ok": self.ok, **asdict(self), **totals, "kills": kills, "machine": dict(self.machine)}

    def __rich__(self) -> Group:
        from relight.demo.view import render

        return render(self)


def curve_digest(steps: Sequence[Finished]) -> str:
    """Return a hash of all losses of a run, by step, with every bit."""
    losses = {entry.step: entry.loss for entry in steps}
    return hashlib.sha256(" ".join(losses[step] for step in sorted(losses)).encode()).hexdigest()
