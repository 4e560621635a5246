"""What a supervisor tells the next life of a job, by its environment. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

BEFORE = "RELIGHT_BEFORE"
"""It restores the newest checkpoint of a step before this one."""
SKIP = "RELIGHT_SKIP"
"""Steps whose samples it does not train on, from then on, as ``first-last``. Goes with ``BEFORE``."""
CUT = "RELIGHT_LR_CUT"
"""By what learning rates are multiplied from then on. Goes with ``BEFORE``."""
SPLIT = "RELIGHT_SPLIT"
"""Into how many more micro-batches than the script says each one is to be split."""
SPIKES = "RELIGHT_SPIKES"
"""How far a loss may rise before it counts as one that jumped: see ``Spikes``."""

_SANE = {BEFORE: r"\d{1,18}", SKIP: r"\d{1,18}-\d{1,18}", CUT: r"0\.\d{1,18}|\d(\.\d{1,18})?e-\d{1,3}", SPLIT: r"\d{1,7}"}


def once_back(settings: Mapping[str, str]) -> dict[str, str]:
    """What is left to tell the next life once one has gone back: batches stay small, but nobody goes back twice."""
    return {name: value for name, value in settings.items() if name not in (BEFORE, SKIP, CUT)}


def sane(settings: Mapping[str, str]) -> dict[str, str]:
    """Of settings that were read from somewhere those that a supervisor may have told: they become environment of processes."""
    return {name: value for name, value in settings.items() if name in _SANE and re.fullmatch(_SANE[name], value, re.ASCII)}
