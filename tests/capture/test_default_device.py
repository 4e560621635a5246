"""Relight's own tensors stay in host memory, for every default device of ``torch.set_default_device``."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._device import _device_constructors

import relight

SOURCE = Path(relight.__file__).parent
OWN_PROCESSES = {"bench", "demo", "drill", "prediction"}
"""Packages that make tensors only in processes of their own, never in a user's process."""


@pytest.fixture(autouse=True)
def _default_device() -> Iterator[None]:
    yield
    torch.set_default_device(None)  # with any device, also "cpu", each call of torch passes a mode


def parts(seed: int) -> dict[str, Any]:
    """Return a training's objects, explicitly on the CPU, with random values from ``seed``."""
    torch.manual_seed(seed)
    with torch.device("cpu"):
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        sparse = torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0 + seed, 2.0], (2, 2)).coalesce()
        return {
            "model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
            "generator": torch.Generator().manual_seed(seed), "python": random.Random(seed), "numpy": np.random.default_rng(seed),
            "table": {"a": torch.full((3,), float(seed)), "strided": torch.arange(12.0).reshape(3, 4).t() + seed, "half": torch.ones(2).half()},
            "sparse": {"coo": sparse, "csr": sparse.to_sparse_csr()},
            "loader": torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2, shuffle=True, generator=torch.Generator()),
        }  # fmt: skip


def flat(value: Any) -> Any:
    """Return ``value`` without tensors, for comparisons."""
    if isinstance(value, torch.Tensor):
        return value.detach().to_dense().tolist()
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    return flat(value.state_dict()) if hasattr(value, "state_dict") else value


@pytest.mark.parametrize("when", ["both", "save", "restore"])
@pytest.mark.parametrize("background", [False, True])
def test_saves_and_restores_are_the_same_under_another_default_device(
    tmp_path: Path, when: str, background: bool
) -> None:
    """Save and restore with the default device "meta": a buffer of Relight on it would have no memory."""
    saved, live = parts(1), parts(2)
    if when != "restore":
        torch.set_default_device("meta")
    with relight.Checkpointer(tmp_path / "run", **saved, save=None, on_failure="raise", background=background) as ckpt:
        ckpt.save(0)
    torch.set_default_device("cpu" if when == "save" else "meta")
    with relight.Checkpointer(tmp_path / "run", **live, save=None, on_failure="raise", background=background) as ckpt:
        assert ckpt.restore() == 1
        for name in ("model", "optimizer", "scheduler", "table", "sparse"):
            assert flat(ckpt[name]) == flat(saved[name]), name
        for name in ("generator", "python", "numpy"):
            state = getattr(live[name], "get_state", None) or getattr(
                live[name], "getstate", lambda name=name: live[name].bit_generator.state
            )
            other = getattr(saved[name], "get_state", None) or getattr(
                saved[name], "getstate", lambda name=name: saved[name].bit_generator.state
            )
            assert flat(state()) == flat(other()), name
        ckpt.close(save=False)
    loaded = relight.load(tmp_path / "run")
    assert loaded["table"]["a"].device.type == "cpu" and flat(loaded["table"]) == flat(saved["table"])


def test_every_tensor_that_relight_makes_names_its_device() -> None:
    """Give each constructor a ``device=``, except in Relight's own processes: else it uses the default device."""
    names = {function.__name__ for function in _device_constructors()}
    calls = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path.relative_to(SOURCE).parts[0] in OWN_PROCESSES:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and not any(keyword.arg == "device" for keyword in node.keywords):
                made = (
                    node.args[0]
                    if isinstance(node.func, ast.Name) and node.func.id == "partial" and node.args
                    else node.func
                )
                if (
                    isinstance(made, ast.Attribute)
                    and isinstance(made.value, ast.Name)
                    and made.value.id == "torch"
                    and made.attr in names
                ):
                    calls.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert calls == []
