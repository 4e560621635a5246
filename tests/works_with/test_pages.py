"""The pages of what works with which tool are those that the tests' results make."""

from __future__ import annotations

import pytest
from tests.works_with import page

ASKED = {
    "TensorBoard", "W&B", "MLflow", "Hydra", "argparse", "pydantic", "bitsandbytes", "torchao", "schedule-free", "Muon", "PEFT",
    "datasets, streaming", "WebDataset", "MosaicML Streaming", "torchdata", "Accelerate", "Lightning", "Trainer", "Hugging Face Hub",
}  # fmt: skip


@pytest.mark.parametrize("path", page.pages(), ids=lambda path: path.name)
def test_the_page_has_the_results(path) -> None:
    """``make fix`` writes it again."""
    assert path.read_text() == page.pages()[path], "make fix"


def test_each_tool_has_a_test_that_passed() -> None:
    """No tool is missing, and no committed result is a failure."""
    assert {row["tool"] for row in page.rows()} >= ASKED
    assert page.failed() == []
    assert all(row["version"] for row in page.rows())
