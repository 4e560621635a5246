"""Comparison of two runs to the bit. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished step: its loss in ``float.hex`` format, which keeps every bit, and a hash of its samples."""

    step: int
    loss: str
    samples: str


@dataclass(frozen=True, slots=True)
class DemoDifference:
    """The first step at which the runs differ, and how. ``step`` is None if only the final parameters or optimizer differ."""

    step: int | None
    what: str
    straight: str
    killed: str

    def __str__(self) -> str:
        where = "after the last step" if self.step is None else f"at step {self.step}"
        return f"{where} the {self.what} differ: {self.straight} in the straight run, {self.killed} in the killed one"


def compare(
    steps: int, straight: Sequence[Finished], killed: Sequence[Finished], digests: tuple[str | None, str | None]
) -> DemoDifference | None:
    """Return the first difference, or None. A step that was done more than once must have had the same result each time."""
    expected = {entry.step: entry for entry in straight}
    done: dict[int, list[Finished]] = {}
    for entry in killed:
        done.setdefault(entry.step, []).append(entry)
    for step in range(steps):
        want, actual = expected.get(step), done.get(step, [])
        if want is None or not actual:
            return DemoDifference(
                step, "steps done", "done" if want else "never done", "done" if actual else "never done"
            )
        for entry in actual:
            if entry.samples != want.samples:
                return DemoDifference(step, "samples", want.samples, entry.samples)
            if entry.loss != want.loss:
                return DemoDifference(step, "losses", _show(want.loss), _show(entry.loss))
    if digests[0] is None or digests[0] != digests[1]:
        return DemoDifference(None, "parameters or optimizer", str(digests[0])[:16], str(digests[1])[:16])
    return None


def _show(loss: str) -> str:
    return f"{float.fromhex(loss):.9g} ({loss})"
