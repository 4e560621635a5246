"""First calls of elementary functions: made by one thread, and leaving everything else alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import relight
from relight.capture import math_init, warm_up_vector_math


def test_random_states_and_settings_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators, the default device and dtype, and whether gradients are kept are as before."""
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
    """In both widths; the second time, none."""
    called: list[torch.dtype] = []
    monkeypatch.setattr(math_init, "_done", False)
    monkeypatch.setattr(torch, "tanh", lambda some: called.append(some.dtype))
    warm_up_vector_math()
    warm_up_vector_math()
    assert called == [torch.float32, torch.float64]


def test_a_restore_comes_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that resumes has made the first calls when it gets its state."""
    monkeypatch.setattr(math_init, "_done", False)
    with relight.Checkpointer(tmp_path / "run", state={"value": 1}) as ckpt:
        assert ckpt.restore() == 0
        assert math_init._done
