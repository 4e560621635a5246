"""Optimizers of libraries in a job that is killed by SIGKILL: each loss as without a kill, to the bit. All of them: ``make optimizers``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.plugins.killing import killed_and_resumed
from tests.works_with.optimizer_kinds import GROUPS, LATER

pytestmark = pytest.mark.slow
TOOLS = {
    "torch": ("torch's optimizers", "torch", "torch", "fused, foreach, Adafactor, a parameter group added later"),
    "muon": ("Muon", "torch", "torch", "`torch.optim.Muon` for matrices and AdamW for vectors: two optimizers"),
    "bitsandbytes": ("bitsandbytes", "bitsandbytes", "bitsandbytes", "AdamW8bit, Lion8bit, PagedAdamW8bit"),
    "torchao": ("torchao", "torchao", "torchao", "AdamW8bit, AdamW4bit, AdamWFp8"),
    "schedulefree": ("schedule-free", "schedulefree", "schedulefree", "AdamWScheduleFree"),
    "prodigyopt": ("Prodigy", "prodigyopt", "prodigyopt", "Prodigy"),
    "pytorch_optimizer": ("pytorch-optimizer", "pytorch_optimizer", "pytorch_optimizer", "Shampoo, SOAP, Lion"),
}
"""For each group of the job: tool, distribution, module and what of the tool is tried."""


def cases() -> list[Any]:
    """Return the parameters of the test, with the marker of each row."""
    return [
        pytest.param(
            group,
            id=group,
            marks=[
                pytest.mark.shows(tool=tool, package=package, feature="killed and resumed", outcome="exact", why=what),
                pytest.mark.skipif(not find_spec(module), reason=f"{module} is not installed: make optimizers"),
            ],
        )
        for group, (tool, package, module, what) in TOOLS.items()
    ]


def test_each_kind_is_tried() -> None:
    """No group of the job is left out."""
    assert TOOLS.keys() == GROUPS.keys()


@pytest.mark.parametrize("group", cases())
def test_optimizers_resume_to_the_bit(group: str, tmp_path: Path) -> None:
    """The kill is after a step at which the job adds a group of parameters. Nothing is compiled, as that takes minutes."""
    killed_and_resumed(
        ["-m", "tests.works_with.optimizer_job", group], [LATER + 9], tmp_path, {"TORCHDYNAMO_DISABLE": "1"}
    )
