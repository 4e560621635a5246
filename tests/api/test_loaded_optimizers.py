"""What ``relight.load`` returns for an optimizer goes into torch's own ``load_state_dict``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import relight

Make = Callable[[torch.nn.Sequential], torch.optim.Optimizer]


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(5, 3)).square().sum().backward()
        optimizer.step()


MAKE: dict[str, Make] = {
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
    "Adam, with an average": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True),
    "SGD with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "several groups": lambda model: torch.optim.Adam(
        [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters(), "weight_decay": 0.2}], lr=0.1
    ),
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters()),
}


@pytest.mark.parametrize("kind", MAKE)
def test_a_loaded_optimizer_state_goes_into_torchs_load_state_dict(tmp_path: Path, kind: str) -> None:
    """Training continues bit by bit from what ``relight.load`` returned, without a Checkpointer."""
    model = _model()
    optimizer = MAKE[kind](model)
    if kind == "LBFGS":
        optimizer.step(lambda: model(torch.ones(5, 3)).square().sum() + 0 * sum(p.sum() for p in model.parameters()))
    else:
        _train(model, optimizer, 3)
    relight.save(tmp_path / "run", {"model": model, "optimizer": optimizer}, step=3)
    state, again = relight.load(tmp_path / "run"), _model()
    other = MAKE[kind](again)
    again.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    if kind != "LBFGS":
        _train(model, optimizer, 2)
        _train(again, other, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_another_optimizer_gets_torchs_own_error(tmp_path: Path) -> None:
    """If the groups do not fit, torch refuses the state in its own words."""
    model = _model()
    relight.save(tmp_path / "run", {"model": model, "optimizer": MAKE["Adam"](model)}, step=0)
    state = relight.load(tmp_path / "run")["optimizer"]
    with pytest.raises(ValueError, match="different number of parameter groups"):
        MAKE["several groups"](_model()).load_state_dict(state)


def test_a_part_of_an_optimizer_has_the_keys_of_that_part(tmp_path: Path) -> None:
    """``only=`` selects by the stored paths, and the groups are called as torch calls them."""
    model = _model()
    optimizer = MAKE["Adam"](model)
    _train(model, optimizer, 1)
    relight.save(tmp_path / "run", {"model": model, "optimizer": optimizer}, step=0)
    assert relight.load(tmp_path / "run", only=["optimizer/groups"])["optimizer"].keys() == {"param_groups"}
    part = relight.load(tmp_path / "run", only=["optimizer/state/0.bias/exp_avg"])
    assert part["optimizer"]["state"].keys() == {"0.bias"} and part.keys() == {"optimizer"}
