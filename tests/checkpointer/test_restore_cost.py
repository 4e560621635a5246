"""Calls that a restore, a first capture and a plan make for each tensor. Unlike seconds, their number does not depend on the machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import relight
from relight.capture import capture
from relight.capture.capture_cache import CaptureCache
from relight.capture.kinds import named_parameters
from relight.commit import plan_save
from relight.restore.execute import restore_first_good
from relight.restore.request import RestoreRequest
from relight.store import LocalStore

PYTHON_MAX = {"many": 0.5, "layers": 6.0}
C_MAX = {"many": 5.0, "layers": 19.0}
LOAD_PYTHON_MAX = {"many": 3.0, "layers": 8.0}
"""One more for the form that an optimizer's ``load_state_dict`` takes."""
LOAD_C_MAX = {"many": 10.0, "layers": 21.0}
CAPTURE_PYTHON_MAX = {"many": 12.0, "layers": 26.0}
CAPTURE_C_MAX = 55.0
PLAN_PYTHON_MAX = 9.0
"""Calls a tensor. What is done for each layer and each parameter's dict is shared by its tensors."""


def many(count: int) -> dict[str, Any]:
    """Return ``count`` parameters in one module."""
    return {"model": nn.ParameterList([nn.Parameter(torch.full((3,), float(number))) for number in range(count)])}


def layers(count: int) -> dict[str, Any]:
    """Return ``count`` tensors: weights and biases of small layers, and what AdamW keeps for them."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(count // 8)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def calls(work: Callable[[], object]) -> tuple[int, int]:
    """Python functions and C functions that ``work`` calls in this thread."""
    counts = {"call": 0, "c_call": 0}

    def watch(frame: FrameType, event: str, arg: object) -> None:
        if event in counts:
            counts[event] += 1

    gc.collect()
    gc.disable()  # a collection here would count finalizers of other tests' objects
    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counts["call"], counts["c_call"]


def per_tensor(
    tmp_path: Path, build: Callable[[int], dict[str, Any]], work: Callable[[str, dict[str, Any]], object]
) -> list[float]:
    """Calls that each further tensor costs, from 400 to 800."""
    costs = []
    for count in (400, 800):
        components = build(count)
        relight.save(tmp_path / f"{count}", components, step=1)
        run, live = f"{count}", build(count)
        work(run, live)  # run once what each process does once
        costs.append(calls(lambda run=run, live=live: work(run, live)))
    (few, few_c), (double, double_c) = costs
    return [(double - few) / 400, (double_c - few_c) / 400]


@pytest.mark.parametrize("build", [many, layers])
def test_a_restore_does_little_for_each_tensor(tmp_path: Path, build: Callable[[int], dict[str, Any]]) -> None:
    """Read the part, decode the tree, check what fits, and read in place: no call for each tensor of one module, few for small layers."""
    store = LocalStore(tmp_path)

    def work(run: str, live: dict[str, Any]) -> None:
        restore_first_good(RestoreRequest(store, run, live))

    python, c = per_tensor(tmp_path, build, work)
    assert python <= PYTHON_MAX[build.__name__] and c <= C_MAX[build.__name__], f"{python} and {c} calls a tensor"


@pytest.mark.parametrize("build", [many, layers])
def test_so_does_a_load(tmp_path: Path, build: Callable[[int], dict[str, Any]]) -> None:
    """``relight.load`` makes each tensor, and little more."""
    python, c = per_tensor(tmp_path, build, lambda run, live: relight.load(tmp_path / run))
    assert python <= LOAD_PYTHON_MAX[build.__name__] and c <= LOAD_C_MAX[build.__name__], (
        f"{python} and {c} calls a tensor"
    )


@pytest.mark.parametrize("build", [many, layers])
def test_a_first_capture_does_little_for_each_tensor(tmp_path: Path, build: Callable[[int], dict[str, Any]]) -> None:
    """Collect the facts of plain tensors at once, instead of by function calls for each."""
    python, c = per_tensor(tmp_path, build, lambda _, live: capture(live, recall=CaptureCache()))
    assert python <= CAPTURE_PYTHON_MAX[build.__name__] and c <= CAPTURE_C_MAX, f"{python} and {c} calls a tensor"


def test_a_plan_does_little_for_each_tensor(tmp_path: Path) -> None:
    """Check names and extents of all tensors at once."""

    def plan(_: str, live: dict[str, Any]) -> None:
        plan_save(capture(live).items, id="0" * 10)

    whole, _ = per_tensor(tmp_path, many, plan)
    captured, _ = per_tensor(tmp_path, many, lambda _, live: capture(live))
    assert whole - captured <= PLAN_PYTHON_MAX, f"{whole - captured} calls a tensor"


def test_many_tensors_come_back_to_the_bit(tmp_path: Path) -> None:
    """Restore by the fast path what the full path restores, and increment every version counter."""
    saved, live = layers(160), layers(160)
    with torch.no_grad():
        for parameter in saved["model"].parameters():
            parameter.normal_()
    relight.save(tmp_path / "r", saved, step=1)
    versions = [parameter._version for parameter in live["model"].parameters()]
    moments = [id(state) for state in live["optimizer"].state.values()]
    restore_first_good(RestoreRequest(LocalStore(tmp_path), "r", live))
    for parameter, restored in zip(saved["model"].parameters(), live["model"].parameters(), strict=True):
        assert torch.equal(parameter, restored)
        for key, value in saved["optimizer"].state[parameter].items():
            assert torch.equal(value, live["optimizer"].state[restored][key])
    assert all(p._version > then for p, then in zip(live["model"].parameters(), versions, strict=True))
    assert [id(state) for state in live["optimizer"].state.values()] == moments, (
        "state that is there is filled where it is"
    )


def test_no_memory_is_made_for_a_pack_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the tensor sizes that a part states with the pack's length before memory is allocated."""
    relight.save(tmp_path / "r", {"x": torch.zeros(1000), "y": 1}, step=1)
    pack = next(tmp_path.glob("r/*/pack-*"))
    pack.write_bytes(pack.read_bytes()[:-8])

    def refuse(*args: object, **options: object) -> torch.Tensor:
        raise AssertionError("memory was made")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(relight.CorruptCheckpoint, match="were committed"):
        relight.load(tmp_path / "r", which=1)
    with pytest.raises(relight.CorruptCheckpoint, match="were committed"):
        restore_first_good(RestoreRequest(LocalStore(tmp_path), "r", {"x": None, "y": 0}, 1))
    pack.unlink()
    assert relight.load(tmp_path / "r", which=1, only=["y"]) == {"y": 1}, "what needs no pack needs none to be there"


def test_a_shared_parameter_is_named_as_by_torch() -> None:
    """Name each parameter as ``named_parameters`` does, if modules or names share some of them."""
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(nn.Linear(2, 2), shared), "c": nn.Linear(2, 2)})
    model["c"].weight = shared.weight
    model["c"].register_parameter("none", None)
    for repeats in (False, True):
        pairs = named_parameters(model, repeats=repeats)
        theirs = list(model.named_parameters(remove_duplicate=not repeats))
        assert [(name, id(value)) for name, value in pairs] == [(name, id(value)) for name, value in theirs]


def test_stale_gradients_are_cleared_where_a_step_would_add_to_them(tmp_path: Path) -> None:
    """Clear gradients of trained parameters, and keep those of frozen parameters."""
    relight.save(tmp_path / "r", many(3), step=1)
    live = many(3)
    first, second, third = live["model"]
    first.grad, second.grad = torch.ones(3), torch.ones(3)
    second.requires_grad = False
    restore_first_good(RestoreRequest(LocalStore(tmp_path), "r", live))
    assert first.grad is None and second.grad is not None and third.grad is None
