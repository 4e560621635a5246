"""A file that holds something other than a state dict is refused in plain words, without names of Relight's classes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from relight.errors import IncompatibleState
from relight.importers.detect import detect


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(3), "it holds a single tensor instead of a state dict"),
        (torch.eye(3).to_sparse(), "it holds a sparse or quantized tensor instead of a state dict"),
        ([torch.ones(3)], "it holds a list instead of a state dict"),
        (7, "it holds an int instead of a state dict"),
        (torch.ones(3).untyped_storage(), "it holds a storage instead of a state dict"),
    ],
    ids=["tensor", "sparse", "list", "int", "storage"],
)
def test_the_error_names_what_the_file_holds(tmp_path: Path, value: object, words: str) -> None:
    """``relight import`` and ``relight import --all`` show this error."""
    torch.save(value, tmp_path / "one.pt")
    with pytest.raises(IncompatibleState) as refused:
        detect(tmp_path / "one.pt")
    assert words in refused.value.what
