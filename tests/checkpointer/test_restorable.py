"""A save that could not be restored is refused when it is made: at the first one, and when the structure of the state has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import relight
from relight.capture import restore_check as restorable


class Gives(nn.Module):
    """A state_dict with an entry that load_state_dict does not take, once ``odd`` is set."""

    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.weight, self.odd = nn.Parameter(torch.ones(2)), odd

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.odd:
            destination[f"{prefix}norm"] = self.weight.detach().norm()


def checkpointer(path: Path, **components: Any) -> relight.Checkpointer:
    """Return a Checkpointer that saves at each step, in this process."""
    return relight.Checkpointer(
        str(path / "x"), save=relight.every(steps=1), background=False, signals=False, **components
    )


@pytest.mark.parametrize("first", ["step", "save"])
def test_the_first_save_is_refused_with_the_path(tmp_path: Path, first: str) -> None:
    """If a restore of the state would be refused, the first step or save raises, names the path and the way out, and writes nothing."""
    c = checkpointer(tmp_path, model=nn.Sequential(Gives(odd=True)))
    with pytest.raises(relight.IncompatibleState, match=r"model/0\.norm") as caught:
        getattr(c, first)(0)
    assert "_load_from_state_dict" in str(caught.value)
    assert not list(tmp_path.rglob("*.root"))
    c.close(save=False)


def test_a_structure_that_changes_is_planned_again(tmp_path: Path) -> None:
    """A state that becomes unrestorable during training is refused at the next save. Earlier saves stay."""
    model = Gives(odd=False)
    c = checkpointer(tmp_path, model=model)
    for step in range(3):
        c.step(step)
    model.odd = True
    with pytest.raises(relight.IncompatibleState, match="norm"):
        c.step(3)
    c.close(save=False)
    assert checkpointer(tmp_path, model=Gives(odd=False)).restore() == 3


def test_one_plan_for_one_structure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore is planned once for each structure, not at each save: ten saves with one optimizer need one plan."""
    plans = []
    original = restorable.mismatches
    monkeypatch.setattr(restorable, "mismatches", lambda *given: plans.append(1) or original(*given))
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    c = checkpointer(tmp_path, model=model, optimizer=optimizer)
    for step in range(10):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        c.step(step)
    c.close(save=False)
    assert len(plans) == 1


def test_plans_of_a_state_that_grows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state with a new structure at each save is planned a few times, and then for a hundredth of the time at most."""
    plans = []
    monkeypatch.setattr(restorable, "mismatches", lambda *given: plans.append(1) or [])
    clock = iter(0.1 * n for n in range(10_000))
    monkeypatch.setattr(restorable, "perf_counter", lambda: next(clock))
    check = restorable.Restorable()
    grown: dict[str, torch.Tensor] = {}
    for n in range(100):
        grown[str(n)] = torch.zeros(1)
        check.check({"losses": grown}, relight.capture.capture({"losses": grown}, rng=False))
    assert restorable.ALWAYS <= len(plans) <= restorable.ALWAYS + 12
