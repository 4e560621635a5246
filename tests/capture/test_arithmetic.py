"""First calls of elementary functions are made by one thread, and change nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import relight
from relight.capture import math_init, warm_up_vector_math


def test_random_states_and_settings_stay_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change no generator, default device, default dtype or gradient mode."""
    monkeypatch.setattr(math_init, "_done", False)
    torch.manual_seed(3)
    random.seed(3)
    before = torch.get_rng_state(), random.getstate()
    with torch.device("meta"):
        warm_up_vector_math()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32


def test_every_function_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call every function in both widths, and none again at a second warm-up."""
    called: list[torch.dtype] = []
    monkeypatch.setattr(math_init, "_done", False)
    monkeypatch.setattr(torch, "tanh", lambda some: called.append(some.dtype))
    warm_up_vector_math()
    warm_up_vector_math()
    assert called == [torch.float32, torch.float64]


def test_a_restore_comes_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make the first calls before a restore returns."""
    monkeypatch.setattr(math_init, "_done", False)
    with relight.Checkpointer(tmp_path / "run", state={"value": 1}) as ckpt:
        assert ckpt.restore() == 0
        assert math_init._done
