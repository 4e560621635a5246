"""Refuse ``only=`` patterns that match nothing, because training would silently start from scratch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import relight
from relight.errors import IncompatibleState


@pytest.fixture
def run(tmp_path: Path) -> str:
    """Return a run with a model and a value."""
    model = torch.nn.Linear(2, 2)
    with relight.Checkpointer(
        tmp_path / "runs" / "demo", state={"count": 3}, model=model, background=False, save=None
    ) as ckpt:
        ckpt.save(5)
    return str(tmp_path / "runs" / "demo")


@pytest.mark.parametrize(
    "only", [["weight"], ["model/wieght"], ["model/*", "optimzer/*"], ["model.weight"], ["count/x"]]
)
def test_a_pattern_that_fits_nothing_is_refused(run: str, only: list[str]) -> None:
    """Name the patterns that match nothing in ``restore(only=…)``, and change nothing."""
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    ckpt = relight.Checkpointer(run, state={"count": 0}, model=model, background=False, save=None)
    with pytest.raises(IncompatibleState, match=rf"nothing in the checkpoint fits only=.*{only[-1].split('*')[0]}"):
        ckpt.restore(only=only)
    assert torch.equal(model.weight, before)
    ckpt.close()


@pytest.mark.parametrize("only", [["model"], ["model/*"], ["model/weight"], ["count"], ["*/bias", "model/w*"]])
def test_patterns_that_fit_are_restored(run: str, only: list[str]) -> None:
    """Restore by patterns for whole components, for parts of them, and by several patterns."""
    ckpt = relight.Checkpointer(run, state={"count": 0}, model=torch.nn.Linear(2, 2), background=False, save=None)
    assert ckpt.restore(only=only) == 6
    ckpt.close()


def test_load_refuses_patterns_that_fit_nothing(run: str) -> None:
    """Raise an error in ``load`` instead of returning an empty dictionary."""
    assert list(relight.load(run, only=["model/*", "other/*"])) == ["model"]
    with pytest.raises(IncompatibleState, match="nothing in the checkpoint fits"):
        relight.load(run, only=["modle/*"])


def test_without_strict_a_part_that_fits_is_restored(run: str) -> None:
    """With ``strict=False``, refuse only a list in which no pattern matches."""
    ckpt = relight.Checkpointer(run, model=torch.nn.Linear(2, 2), background=False, save=None)
    assert ckpt.restore(only=["model/*", "other/*"], strict=False) == 6
    with pytest.raises(IncompatibleState):
        ckpt.restore(only=["other/*"], strict=False)
    ckpt.close()
