"""Capturable, fused and foreach forms of torch's optimizers on an accelerator, each saved and restored into new objects. ``make device``, ``make gpu``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.device.kind import KIND, marks
from tests.optimizers import sweep

pytestmark = marks
FORMS = sweep.torch_forms()


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    """Make models and batches of the sweep on the accelerator."""
    torch.set_default_device(KIND)
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("name", [name for name in FORMS if "=True" in name])
def test_a_form_resumes_to_the_bit(name: str) -> None:
    """The losses after the restore equal those of the run without a break. A form that the device's build lacks is skipped."""
    outcome = sweep.trial(FORMS[name])
    if outcome.kind == sweep.ARGUMENTS:
        pytest.skip(f"cannot step on {KIND}: {outcome.why}")
    assert outcome.kind == sweep.EXACT, outcome.why
