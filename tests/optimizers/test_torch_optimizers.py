"""The part of the sweep over optimizers that needs only torch. ``make optimizers`` tests those of other libraries."""

from __future__ import annotations

import pytest
from tests.optimizers import sweep

BUILDS = sweep.torchs()


@pytest.mark.parametrize("name", BUILDS)
def test_torch_optimizers_resume_exactly(name: str) -> None:
    """Each optimizer of torch resumes in new objects to the bit. SparseAdam is left out: it cannot step the sweep's
    model."""
    outcome = sweep.trial(BUILDS[name])
    assert outcome.kind == (sweep.ARGUMENTS if name == "SparseAdam" else sweep.EXACT), outcome.why
