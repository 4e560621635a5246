"""``relight.load(dtype=)`` casts floating-point tensors while they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relight


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one checkpoint of all kinds of tensors."""
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model, "optimizer": optimizer, "generator": torch.Generator(), "array": np.ones(3, np.float32),
        "count": torch.arange(3), "double": torch.ones(2, dtype=torch.float64), "spins": torch.ones(2, dtype=torch.complex64),
        "sparse": torch.eye(3).to_sparse(), "wide": torch.ones(1, 2).expand(3, 2), "flag": torch.tensor([True]),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
    }  # fmt: skip
    relight.save(tmp_path / "run", state, step=0)
    return tmp_path / "run"


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.float16", torch.float64])
def test_floating_point_tensors_get_the_dtype(run: Path, dtype: Any) -> None:
    """Values are those of ``Tensor.to``; integers, flags, complex numbers, arrays and quantised tensors are unchanged."""
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.removeprefix("torch."))
    as_stored, loaded = relight.load(run), relight.load(run, dtype=dtype)
    for name in ("weight", "bias"):
        assert torch.equal(loaded["model"][name], as_stored["model"][name].to(wanted))
    moments = loaded["optimizer"]["state"]["weight"]
    assert moments["exp_avg"].dtype == wanted and moments["step"].dtype == torch.float32
    assert loaded["double"].dtype == loaded["sparse"].dtype == loaded["wide"].dtype == wanted
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3, dtype=wanted)) and loaded["wide"].shape == (3, 2)
    for name in ("count", "spins", "flag"):
        assert loaded[name].dtype == as_stored[name].dtype and torch.equal(loaded[name], as_stored[name])
    assert loaded["array"].dtype == np.float32 and loaded["quantized"].dtype == torch.qint8
    assert loaded["quantized"].dequantize().tolist() == [1.0, 1.0]
    assert str(loaded["generator"]) == str(as_stored["generator"])


def test_a_lazy_checkpoint_casts_when_a_tensor_is_read(run: Path) -> None:
    """``get_tensor`` and ``get_slice`` return the dtype, and a slice states it before anything is read."""
    whole = relight.load(run)["model"]["weight"]
    with relight.load(run, lazy=True, dtype="bfloat16") as lazy:
        assert torch.equal(lazy.get_tensor("model/weight"), whole.bfloat16())
        rows = lazy.get_slice("model/weight")
        assert (rows.dtype, rows.get_dtype()) == (torch.bfloat16, "BF16")
        assert torch.equal(rows[1:3, ::2], whole[1:3, ::2].bfloat16())
        assert lazy.get_tensor("count").dtype == torch.int64 and lazy.get_slice("count").get_dtype() == "I64"
        assert lazy.get_tensor("optimizer/state/weight/step").dtype == torch.float32


@pytest.mark.parametrize("wrong", ["int8", torch.int64, "bfloat", 16, "complex64"])
def test_another_dtype_is_refused(run: Path, wrong: Any) -> None:
    """Only a floating-point dtype can be asked for."""
    with pytest.raises(relight.ConfigError, match="floating-point"):
        relight.load(run, dtype=wrong)


def test_mapped_tensors_have_their_stored_dtype(run: Path) -> None:
    """``mmap=True`` maps the file's bytes, so it takes no dtype."""
    with pytest.raises(relight.ConfigError, match="stored dtype"):
        relight.load(run, dtype="bfloat16", mmap=True)
