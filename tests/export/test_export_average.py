"""Averages: the mean, to the last bit that rounding leaves; of what each format and layout holds; as a file, and as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from outgoing import opened, same, saved_by_ranks
from safetensors.torch import load_file

import relight
from relight.errors import ConfigError, IncompatibleState
from relight.export import Options, ema_weights, execute_export, mixture, plan_export, save_average
from relight.export import execute as at_work
from relight.store import open_bytes


def models(count: int) -> list[dict[str, torch.Tensor]]:
    """Weights of each float dtype, and a count of steps."""
    states = []
    for number in range(count):
        torch.manual_seed(number)
        states.append({
            "w": torch.randn(70, 90), "h": torch.randn(999).half(), "b": torch.randn(33).bfloat16(), "d": torch.randn(5, dtype=torch.float64),
            "rep": torch.randn(1, 3).expand(4, 3), "steps": torch.tensor(number), "same": torch.arange(4),
        })  # fmt: skip
    return states


def checkpoints(path: Path, states: list[dict[str, torch.Tensor]]) -> list[Any]:
    """One run's, opened."""
    for step, state in enumerate(states):
        relight.save(path / "run", {"model": state}, step=step)
    return [opened(path, number=number) for number in range(len(states))]


def expected(states: list[dict[str, torch.Tensor]], weights: list[float], name: str) -> torch.Tensor:
    """In double precision, as torch has it, rounded once: double to single to half rounds as once would where no tie is near."""
    total = sum(weight * state[name].double() for weight, state in zip(weights, states, strict=True))
    return total.to(states[0][name].dtype)


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same, but for a last bit where a sum of doubles may round otherwise."""
    return one.dtype == other.dtype and torch.allclose(
        one.double(), other.double(), rtol=2 * torch.finfo(one.dtype).eps, atol=0
    )


@pytest.mark.parametrize("elements", [64, at_work.SLAB_ELEMENTS])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], ema_weights(3, 0.5)], ids=["mean", "ema"])
def test_the_average_is_the_weighted_mean(
    tmp_path: Path, weights: list[float], elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of floats of every width, whatever the size of a slab; whole numbers that differ are the last one's, and named."""
    monkeypatch.setattr(at_work, "SLAB_ELEMENTS", elements)
    states = models(3)
    mixed = mixture(checkpoints(tmp_path / "runs", states), weights)
    report = execute_export(plan_export(mixed, tmp_path / "a.safetensors"))
    averaged = load_file(tmp_path / "a.safetensors")
    shares = [weight / sum(weights) for weight in weights]
    assert [
        name for name in ("w", "h", "b", "d", "rep") if not near(averaged[name], expected(states, shares, name))
    ] == []
    assert averaged["steps"] == 2 and same(averaged["same"], states[0]["same"])
    assert report.from_last == ["model/steps"]
    assert averaged["w"].ne(states[2]["w"]).all()


def test_what_is_averaged_with_itself_is_itself(tmp_path: Path) -> None:
    """To the bit, of floats that have fewer digits than the sum."""
    state = models(1)[0]
    mixed = mixture(checkpoints(tmp_path / "runs", [state] * 3), [0.1, 0.7, 0.2])
    execute_export(plan_export(mixed, tmp_path / "a.safetensors", Options(only=("w", "h", "b"))))
    averaged = load_file(tmp_path / "a.safetensors")
    assert all(same(averaged[name], state[name]) for name in ("w", "h", "b"))


@pytest.mark.parametrize("elements", [100, at_work.SLAB_ELEMENTS])
def test_layouts_may_differ(tmp_path: Path, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One was saved by two ranks, one by three, cut across; one by none."""
    monkeypatch.setattr(at_work, "SLAB_ELEMENTS", elements)
    states = [{name: tensor for name, tensor in state.items() if name in ("w", "h", "b")} for state in models(3)]
    checkpoints = [saved_by_ranks(tmp_path / "two", states[0], 2), saved_by_ranks(tmp_path / "three", states[1], 3)]
    relight.save(tmp_path / "one" / "run", {"model": states[2]}, step=9)
    checkpoints.append(opened(tmp_path / "one"))
    execute_export(plan_export(mixture(checkpoints, [1, 1, 2]), tmp_path / "a.safetensors"))
    result = load_file(tmp_path / "a.safetensors")
    assert [name for name in states[0] if not near(result[name], expected(states, [0.25, 0.25, 0.5], name))] == []


def test_it_may_be_a_checkpoint_of_a_run_of_its_own(tmp_path: Path) -> None:
    """Loaded and verified as any; it records its sources; a run that training saves to is refused."""
    states = models(2)
    mixed = mixture(checkpoints(tmp_path / "runs", states), [1, 3])
    plan = plan_export(mixed, tmp_path / "unused")
    store = open_bytes(tmp_path / "runs")
    new = save_average(mixed, "model", plan.entries, store, "averages", None)
    loaded = relight.load(tmp_path / "runs" / "averages")["model"]
    assert all(near(loaded[name], expected(states, [0.25, 0.75], name)) for name in ("w", "h", "b", "d", "rep"))
    root = opened(tmp_path / "runs", "averages").root
    assert root.id == new and [source["weight"] for source in root.user["relight.averaged"]] == [0.25, 0.75]
    assert save_average(mixed, "model", plan.entries, store, "averages", None) != new
    with pytest.raises(ConfigError, match="training saves"):
        save_average(mixed, "model", plan.entries, store, "run", None)


def test_what_cannot_be_averaged_is_named(tmp_path: Path) -> None:
    """Other shapes, other dtypes, tensors that one checkpoint lacks, invalid weights."""
    states: list[dict[str, torch.Tensor]] = [
        {"a": torch.ones(3), "b": torch.ones(2)},
        {"a": torch.ones(4), "c": torch.ones(1)},
    ]
    made = checkpoints(tmp_path / "runs", states)
    with pytest.raises(IncompatibleState) as error:
        plan_export(mixture(made, [1, 1]), tmp_path / "a.safetensors")
    assert len(error.value.details) == 2
    for checkpoints_, weights in [(made, [1, -1]), (made, [float("nan"), 1]), (made[:1], [1])]:
        with pytest.raises(ConfigError):
            mixture(checkpoints_, weights)
    with pytest.raises(ConfigError):
        ema_weights(3, 1.0)
