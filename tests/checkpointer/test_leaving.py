"""The end of a ``with`` block by an exception: what may be saved as the end of the last step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import relight
from relight.checkpointer import boundary
from relight.observe import counters
from relight.run_records.run_end import has_ended


@pytest.fixture(autouse=True)
def _boundaries_at_any_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow boundaries at any cost: a busy machine must not change what these tests check."""
    monkeypatch.setattr(boundary, "FREE_S", 1.0)


class Failing(torch.optim.Optimizer):
    """An optimizer without state that updates through ``.data``, and fails between two parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.fails = False

    def step(self) -> None:  # type: ignore[override]
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            if number and self.fails:
                raise RuntimeError("out of memory")
            parameter.data.add_(parameter.grad, alpha=-0.1)


def with_minus(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data -= 0.1 * parameter.grad


def with_add(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.1)


def with_numpy(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.detach().numpy()[...] -= 0.1 * parameter.grad.numpy()


@pytest.mark.parametrize("update", [with_minus, with_add, with_numpy])
def test_an_update_that_torch_does_not_count_is_no_end_of_a_step(
    update: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    """After an update by hand through ``.data`` or NumPy, nothing is saved as the end of the step before it."""
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    before = counters["save.inconsistent"]
    with (
        pytest.raises(ZeroDivisionError),
        relight.Checkpointer(tmp_path / "s" / "run", save=None, model=model, background=False) as ckpt,
    ):
        for step in range(ckpt.restore(), 4):
            model.zero_grad()
            model(x).square().mean().backward()
            update(model)
            if step == 3:
                raise ZeroDivisionError
            ckpt.step(step)
    assert counters["save.inconsistent"] == before + 1
    assert relight.open(tmp_path / "s" / "run").run().history().live == []


def test_an_update_by_hand_of_tensors_without_a_module(tmp_path: Path) -> None:
    """The same holds for weights that are tensors in ``state=``."""
    w = torch.randn(4, requires_grad=True)
    with (
        pytest.raises(ZeroDivisionError),
        relight.Checkpointer(tmp_path / "s" / "run", save=None, state={"w": w}, background=False) as ckpt,
    ):
        for step in range(ckpt.restore(), 4):
            w.grad = None
            w.square().sum().backward()
            w.data -= 0.1 * w.grad
            if step == 3:
                raise ZeroDivisionError
            ckpt.step(step)
    assert relight.open(tmp_path / "s" / "run").run().history().live == []


def test_an_optimizer_that_fails_in_the_middle_of_its_step(tmp_path: Path) -> None:
    """A half update is not saved, also if the optimizer leaves no trace that torch counts."""
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    optimizer = Failing(model.parameters())
    with (
        pytest.raises(RuntimeError, match="out of memory"),
        relight.Checkpointer(
            tmp_path / "s" / "run", save=None, model=model, optimizer=optimizer, background=False
        ) as ckpt,
    ):
        for step in range(ckpt.restore(), 4):
            model.zero_grad()
            model(x).square().mean().backward()
            optimizer.fails = step == 3
            optimizer.step()
            ckpt.step(step)
    assert relight.open(tmp_path / "s" / "run").run().history().live == []


def test_the_last_of_many_parameters_is_checked_by_samples(tmp_path: Path) -> None:
    """An update of hundreds of parameters is detected, though only some of them are sampled."""
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(200))
    with (
        pytest.raises(ZeroDivisionError),
        relight.Checkpointer(tmp_path / "s" / "run", save=None, model=model, background=False) as ckpt,
    ):
        for step in range(ckpt.restore(), 3):
            for parameter in list(model.parameters())[: 10 if step == 2 else None]:
                parameter.data += 1
            if step == 2:
                raise ZeroDivisionError
            ckpt.step(step)
    assert relight.open(tmp_path / "s" / "run").run().history().live == []


def test_an_exit_within_the_block_saves_the_last_step(tmp_path: Path) -> None:
    """``sys.exit()`` loses no step, as the end of the block would not."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(SystemExit),
        relight.Checkpointer(
            tmp_path / "s" / "run", save=None, model=model, optimizer=optimizer, background=False
        ) as ckpt,
    ):
        for step in range(ckpt.restore(), 10):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            ckpt.step(step)
            if step == 5:
                sys.exit(0)
    (saved,) = relight.open(tmp_path / "s" / "run").checkpoints()
    assert saved.step == 5 and saved.body.reason == "end"
    assert torch.equal(relight.load(tmp_path / "s" / "run")["model"]["weight"], model.weight)
    assert ckpt.ended.exit_code == 0


@pytest.mark.parametrize(("code", "kind"), [(None, "end"), (0, "end"), (85, "exception"), ("failed", "exception")])
def test_an_exit_with_a_code_is_no_normal_end(code: int | str | None, kind: str, tmp_path: Path) -> None:
    """A scheduler may start the job again, so followers must wait for it, and the dashboard must not call it finished."""
    model = nn.Linear(4, 4)
    with (
        pytest.raises(SystemExit),
        relight.Checkpointer(tmp_path / "s" / "run", save=None, model=model, background=False) as ckpt,
    ):
        for step in range(ckpt.restore(), 3):
            ckpt.step(step)
        sys.exit(code)
    (saved,) = relight.open(tmp_path / "s" / "run").checkpoints()
    assert saved.step == 2 and saved.body.save_reason.kind == kind
    assert has_ended(relight.open(tmp_path / "s" / "run").run().history(), None) == (kind == "end")
