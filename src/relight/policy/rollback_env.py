"""Environment variables by which a supervisor passes its decisions to the next start of a job. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

BEFORE = "RELIGHT_BEFORE"
"""Step before which to restore: the job restores the newest checkpoint of an earlier step."""
SKIP = "RELIGHT_SKIP"
"""Range of steps; their samples are skipped from then on, as ``first-last``. Used with ``BEFORE``."""
CUT = "RELIGHT_LR_CUT"
"""Factor for the learning rates from then on. Used with ``BEFORE``."""
SPLIT = "RELIGHT_SPLIT"
"""Number of parts into which to split each micro-batch of the script."""
SPIKES = "RELIGHT_SPIKES"
"""Threshold of a loss spike in standard deviations: see ``Spikes``."""

_SANE = {
    BEFORE: r"\d{1,18}",
    SKIP: r"\d{1,18}-\d{1,18}",
    CUT: r"0\.\d{1,18}|\d(\.\d{1,18})?e-\d{1,3}",
    SPLIT: r"\d{1,7}",
}


def once_back(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to pass on after a rollback was done: micro-batches stay small, but the rollback is not
    repeated."""
    return {name: value for name, value in settings.items() if name not in (BEFORE, SKIP, CUT)}


def sane(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the valid entries of stored ``settings`` that a supervisor may have written: they become environment
    variables."""
    return {
        name: value for name, value in settings.items() if name in _SANE and re.fullmatch(_SANE[name], value, re.ASCII)
    }
