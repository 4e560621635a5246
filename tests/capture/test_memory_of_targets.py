"""A restore refuses live objects without memory by name, and never reports a step that it did not load."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import relight
from relight.errors import IncompatibleState


def state(device: str = "cpu") -> dict[str, Any]:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "table": torch.zeros(5000),
        "held": {"list": [torch.zeros(2)]},
    }


@pytest.fixture(name="run")
def run_fixture(tmp_path: Path) -> Path:
    """Return a run with one checkpoint."""
    saved = {**state(), "table": torch.ones(5000)}
    saved["model"](torch.randn(2, 4)).sum().backward()
    saved["optimizer"].step()
    with relight.Checkpointer(tmp_path / "run", **saved, save=None, background=False, on_failure="raise") as ckpt:
        ckpt.save(0)
    return tmp_path / "run"


def fake() -> nn.Module:
    with FakeTensorMode():
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def mapped(folder: Path) -> torch.Tensor:
    np.zeros(5000, np.float32).tofile(folder / "table")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of an array that is not writable, once in a process
        return torch.from_numpy(np.memmap(folder / "table", np.float32, "r"))


def refused(run: Path, **other: object) -> IncompatibleState:
    live = {**state(), **other}
    if "model" in other:
        live["optimizer"] = torch.optim.AdamW(live["model"].parameters())
    ckpt = relight.Checkpointer(run, **live, save=None, background=False)
    with pytest.raises(IncompatibleState) as caught:
        ckpt.restore()
    ckpt.close(save=False)
    return caught.value


def test_a_model_on_the_meta_device_is_refused_with_the_way_to_give_it_memory(run: Path) -> None:
    """Refuse a meta tensor, into which copies have no effect. The ``to_empty`` that the message names is the remedy."""
    model = state("meta")["model"]
    error = refused(run, model=model)
    assert "model/0.weight: the live tensor is on the meta device and has no memory: call to_empty(device=…)" in str(
        error
    )
    assert not any("of another shape" in detail for detail in error.details)
    live = {**state(), "model": model.to_empty(device="cpu")}
    live["optimizer"] = torch.optim.AdamW(live["model"].parameters())
    with relight.Checkpointer(run, **live, save=None, background=False) as ckpt:
        assert ckpt.restore() == 1
        ckpt.close(save=False)
    stored = relight.load(run)
    assert all(torch.equal(stored["model"][name], value) for name, value in live["model"].state_dict().items())


@pytest.mark.parametrize("where", ["value", "below", "buffer"])
def test_a_meta_tensor_anywhere_is_refused(run: Path, where: str) -> None:
    """Refuse a meta tensor as a plain component, in a container, and as a buffer."""
    live = state()
    if where == "value":
        live["table"] = torch.zeros(5000, device="meta")
    elif where == "below":
        live["held"]["list"][0] = torch.zeros(2, device="meta")
    else:
        live["model"][1].running_mean = torch.zeros(3, device="meta")
    name = {"value": "table", "below": "held/list/0", "buffer": "model/1.running_mean"}[where]
    assert [detail.split(":")[0] for detail in refused(run, **live).details] == [name]


def test_traced_and_read_only_tensors_are_refused(run: Path, tmp_path: Path) -> None:
    """Refuse fake tensors, and files mapped for reading: a write would end the process with SIGSEGV."""
    assert "is a FakeTensor and has no memory" in str(refused(run, model=fake()))
    assert "table: the live tensor is in read-only memory" in str(refused(run, table=mapped(tmp_path)))


def test_without_strict_what_has_no_memory_is_left_out_and_listed(run: Path, tmp_path: Path) -> None:
    """Restore the rest, and write nothing to read-only memory."""
    live = {**state(), "table": mapped(tmp_path), "held": {"list": [torch.zeros(2, device="meta")]}}
    with relight.Checkpointer(run, **live, save=None, background=False) as ckpt:
        assert ckpt.restore(strict=False) == 1
        ckpt.close(save=False)
    assert not live["table"].any()
    assert torch.equal(relight.load(run)["model"]["0.weight"], live["model"][0].weight)
