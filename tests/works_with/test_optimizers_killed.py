"""Optimizers of libraries in a job that is killed twice by SIGKILL: each loss as without a kill, to the bit. All of them: ``make optimizers``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.plugins.killing import killed_and_resumed
from tests.works_with.optimizer_kinds import KINDS

pytestmark = pytest.mark.slow
KILLED = "killed and resumed"
TOOLS = {
    "muon-and-adamw": ("Muon", "torch", "torch", "two optimizers"),
    "adamw-later": ("torch's optimizers", "torch", "torch", "a parameter group added later"),
    "adamw-fused": ("torch's optimizers", "torch", "torch", "fused"),
    "adamw-foreach": ("torch's optimizers", "torch", "torch", "foreach"),
    "adafactor": ("torch's optimizers", "torch", "torch", "Adafactor"),
    "bnb-adamw8bit": ("bitsandbytes", "bitsandbytes", "bitsandbytes", "AdamW8bit"),
    "bnb-lion8bit": ("bitsandbytes", "bitsandbytes", "bitsandbytes", "Lion8bit"),
    "bnb-paged-adamw8bit": ("bitsandbytes", "bitsandbytes", "bitsandbytes", "PagedAdamW8bit"),
    "ao-adamw8bit": ("torchao", "torchao", "torchao", "AdamW8bit"),
    "ao-adamw4bit": ("torchao", "torchao", "torchao", "AdamW4bit"),
    "ao-adamwfp8": ("torchao", "torchao", "torchao", "AdamWFp8"),
    "schedulefree-adamw": ("schedule-free", "schedulefree", "schedulefree", "AdamWScheduleFree"),
    "prodigy": ("Prodigy", "prodigyopt", "prodigyopt", "Prodigy"),
    "shampoo": ("pytorch-optimizer", "pytorch_optimizer", "pytorch_optimizer", "Shampoo"),
    "soap": ("pytorch-optimizer", "pytorch_optimizer", "pytorch_optimizer", "SOAP"),
    "lion": ("pytorch-optimizer", "pytorch_optimizer", "pytorch_optimizer", "Lion"),
}
"""For each name in ``KINDS``: tool, distribution, module and what of the tool is tried."""


def cases() -> list[Any]:
    """Return the parameters of the test, with the marker of each row."""
    return [
        pytest.param(
            name,
            id=name,
            marks=[
                pytest.mark.shows(tool=tool, package=package, feature=KILLED, outcome="exact", why=what),
                pytest.mark.skipif(not find_spec(module), reason=f"{module} is not installed: make optimizers"),
            ],
        )
        for name, (tool, package, module, what) in TOOLS.items()
    ]


def test_each_kind_is_tried() -> None:
    """No optimizer of the job is left out."""
    assert TOOLS.keys() == KINDS.keys()


@pytest.mark.parametrize("name", cases())
def test_an_optimizer_resumes_to_the_bit(name: str, tmp_path: Path) -> None:
    """The first kill is before a group is added in the job, the second after it."""
    killed_and_resumed(["-m", "tests.works_with.optimizer_job", name], [17, 43], tmp_path)
