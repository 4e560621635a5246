"""What a supervisor tells the next life of a job, by its environment. Pure."""

from __future__ import annotations

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
