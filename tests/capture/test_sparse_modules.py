"""Sparse buffers and parameters of modules are restored in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import relight


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("as_parameter", [False, True], ids=["buffer", "parameter"])
def test_a_sparse_tensor_of_a_module_is_restored(layout: str, as_parameter: bool, tmp_path: Path) -> None:
    """As ``load_state_dict`` does: with the stored values, and also with other indices than the live ones."""

    def make(dense: torch.Tensor) -> nn.Module:
        module, tensor = nn.Module(), dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()
        if as_parameter:
            module.weight = nn.Parameter(tensor)
        else:
            module.register_buffer("weight", tensor)
        return module

    saved, live = make(torch.diag(torch.arange(1.0, 5))), make(torch.diag(torch.full((4,), -5.0)))
    with relight.Checkpointer(tmp_path / "s/run", model=saved, save=None, background=False) as ckpt:
        ckpt.restore()
        ckpt.save(0)
    with relight.Checkpointer(tmp_path / "s/run", model=live, save=None, background=False) as ckpt:
        assert ckpt.restore() == 1
    assert torch.equal(live.weight.detach().to_dense(), torch.diag(torch.arange(1.0, 5)))
