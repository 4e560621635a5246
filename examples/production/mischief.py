"""Trouble that can only come from inside a rank, where run.py asks for it by a file."""

from __future__ import annotations

import resource
from pathlib import Path

import torch


class Mischief:
    """Trouble in one rank. ``folder`` has run.py's requests as files."""

    def __init__(self, folder: str, rank: int) -> None:
        self._folder, self._rank = Path(folder), rank

    def over(self, step: int) -> bool:
        """Return whether the run ends before this step. The file has the step long before."""
        wish = self._folder / "until"
        return wish.exists() and step >= int(wish.read_text())

    def during(self, step: int, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss. Called once a step.

        ``bad-STEP``: the step's batch makes the loss NaN, each time that the step is tried. ``greedy-RANK``, which is
        deleted then: memory ends in the middle of the step.
        """
        wish = self._folder / f"greedy-{self._rank}"
        if wish.exists():
            wish.unlink()
            now = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (now + (64 << 20), resource.RLIM_INFINITY))
            torch.empty(1 << 30, dtype=torch.uint8).fill_(1)
        return loss * float("nan") if (self._folder / f"bad-{step}").exists() else loss
