"""``step()`` and ``save()`` take metrics in the same two forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import relight


@pytest.fixture
def ckpt(tmp_path: Path) -> relight.Checkpointer:
    """A Checkpointer that saves at each step."""
    model = torch.nn.Linear(2, 2)
    return relight.Checkpointer(
        tmp_path / "run", model=model, save=relight.every(steps=1), background=False, signals=False
    )


@pytest.mark.parametrize(
    ("mapping", "named"),
    [
        ({"val/loss": 0.25, "loss": 0.5}, {}),
        ({"val/loss": 0.25}, {"loss": 0.5}),
        ({"val/loss": torch.tensor(0.25)}, {"loss": torch.tensor([0.5])}),
        (None, {"val/loss": 0.25, "loss": 0.5}),
    ],
)
@pytest.mark.parametrize("call", ["step", "save"])
def test_metrics_are_a_dict_or_keywords(
    ckpt: relight.Checkpointer, tmp_path: Path, call: str, mapping: dict[str, Any] | None, named: dict[str, Any]
) -> None:
    """Names may have slashes in both forms, and both forms may be mixed."""
    getattr(ckpt, call)(0, metrics=mapping, **named)
    assert relight.open(tmp_path / "run").latest().metrics == {"val/loss": 0.25, "loss": 0.5}


@pytest.mark.parametrize("call", ["step", "save"])
@pytest.mark.parametrize(
    "wrong",
    [{"metrics": {"loss": 1.0}, "loss": 2.0}, {"metrics": 3}, {"metrics": {"loss": "x"}}, {"metrics": {3: 1.0}}],
)
def test_invalid_metrics_are_refused_at_the_call(ckpt: relight.Checkpointer, call: str, wrong: dict[str, Any]) -> None:
    """A name in both forms, and a value that is not a number, are a ``ConfigError`` of both methods."""
    with pytest.raises(relight.ConfigError, match="metric"):
        getattr(ckpt, call)(0, **wrong)


@pytest.mark.parametrize(
    ("slip", "option"), [("blok", "block"), ("tags", "tag"), ("prioritiy", "priority"), ("metric", "metrics")]
)
def test_a_misspelt_option_of_save_is_no_metric(ckpt: relight.Checkpointer, slip: str, option: str) -> None:
    """A keyword that resembles an option is refused, with the option and the way to use it as a metric."""
    with pytest.raises(relight.ConfigError, match="no option") as raised:
        ckpt.save(0, **{slip: False})
    assert f"did you mean {option}=?" in raised.value.hint
    ckpt.save(0, metrics={slip: 1.0})
