"""Flat tensors with a declared layout (``relight.flattened``), in one process. ``tests/ranks`` has several
processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import relight
from relight.errors import ConfigError, IncompatibleState
from relight.testing.store_suite import refuses


class Mixed:
    """A bfloat16 model that is trained as one flat float32 tensor. ``order`` orders the parameters in it. A gap of one
    element follows each parameter."""

    def __init__(self, order: Callable[[list[nn.Parameter]], list[nn.Parameter]] = list) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False)).bfloat16()
        self.line = order(list(self.model.parameters()))
        sizes = [parameter.numel() for parameter in self.line]
        self.begins = [sum(sizes[:position]) + position for position in range(len(sizes))]
        self.flat = nn.Parameter(torch.zeros(sum(sizes) + len(sizes)))
        for parameter, begin in self.runs():
            self.flat.data[begin : begin + parameter.numel()] = parameter.detach().flatten() + 1e-5
        relight.flattened(self.flat, self.line, begins=self.begins)
        self.optimizer = torch.optim.AdamW([self.flat], lr=0.01)

    def runs(self) -> list[tuple[nn.Parameter, int]]:
        return list(zip(self.line, self.begins, strict=True))

    def step(self, seed: int) -> float:
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(seed)).bfloat16()
        loss = self.model(x).float().square().mean()
        loss.backward()
        self.flat.grad = torch.zeros_like(self.flat)
        for parameter, begin in self.runs():
            self.flat.grad[begin : begin + parameter.numel()] = parameter.grad.flatten()
            parameter.grad = None
        self.optimizer.step()
        for parameter, begin in self.runs():
            parameter.data.copy_(self.flat.data[begin : begin + parameter.numel()].view_as(parameter))
        return float(loss.detach())

    def train(self, url: Path, until: int) -> list[float]:
        with relight.Checkpointer(url, model=self.model, optimizer=self.optimizer, save=relight.every(steps=1)) as ckpt:
            losses = []
            for step in range(ckpt.restore(), until):
                losses.append(self.step(step))
                ckpt.step(step)
        return losses


def test_more_precision_than_the_weights_have_comes_back(tmp_path: Path) -> None:
    """Resume bit-exactly from float32 masters that the rounded weights cannot give. A changed order of the parameters
    works too, and the gaps stay unchanged."""
    whole = Mixed().train(tmp_path / "whole", 8)
    for name, order in (("same", list), ("other", lambda line: line[::-1])):
        assert Mixed().train(tmp_path / name, 4) == whole[:4]
        second = Mixed(order)
        assert second.train(tmp_path / name, 8) == whole[4:]
        gaps = [begin - 1 for begin in second.begins[1:]]
        assert not second.flat.detach()[gaps].any() and not second.optimizer.state[second.flat]["exp_avg"][gaps].any()


def test_it_is_stored_by_parameter(tmp_path: Path) -> None:
    """Store moments and masters by the parameters' names and shapes. A plain optimizer can restore the moments with
    ``strict=False``."""
    mixed = Mixed()
    mixed.train(tmp_path / "run", 3)
    tree = relight.load(tmp_path / "run")["optimizer"]
    assert tree["param_groups"][0]["params"] == ["0.weight", "0.bias", "1.weight"]
    assert {name: tuple(master.shape) for name, master in tree["masters"].items()} == {
        "0.weight": (7, 5),
        "0.bias": (7,),
        "1.weight": (3, 7),
    }
    assert all(tree["state"][name]["exp_avg"].shape == master.shape for name, master in tree["masters"].items())
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False)).bfloat16()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1)
    ckpt = relight.Checkpointer(tmp_path / "run", save=None, model=plain, optimizer=optimizer)
    with pytest.raises(IncompatibleState, match="more precision"):
        ckpt.restore()
    assert ckpt.restore(strict=False) == 3
    ckpt.close(save=False)
    assert optimizer.param_groups[0]["lr"] == 0.01
    for parameter, begin in mixed.runs():
        twin = dict(plain.named_parameters())[
            next(name for name, p in mixed.model.named_parameters() if p is parameter)
        ]
        moment = mixed.optimizer.state[mixed.flat]["exp_avg"][begin : begin + parameter.numel()].view_as(parameter)
        assert torch.equal(optimizer.state[twin]["exp_avg"], moment) and torch.equal(twin, parameter)


def test_without_masters_it_is_filled_from_the_parameters(tmp_path: Path) -> None:
    """Restore a plain optimizer's checkpoint into a flat one. The flat tensor gets the restored weights' values."""
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False)).bfloat16()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.5)
    plain(torch.randn(2, 5).bfloat16()).sum().backward()
    optimizer.step()
    ckpt = relight.Checkpointer(tmp_path / "run", save=None, model=plain, optimizer=optimizer)
    ckpt.restore()
    ckpt.save(0)
    ckpt.close(save=False)
    mixed = Mixed()
    ckpt = relight.Checkpointer(tmp_path / "run", save=None, model=mixed.model, optimizer=mixed.optimizer)
    assert ckpt.restore() == 1
    ckpt.close(save=False)
    for (parameter, begin), twin in zip(mixed.runs(), plain.parameters(), strict=True):
        here = slice(begin, begin + parameter.numel())
        assert torch.equal(mixed.flat.detach()[here], twin.detach().flatten().float())
        assert torch.equal(
            mixed.optimizer.state[mixed.flat]["exp_avg"][here], optimizer.state[twin]["exp_avg"].flatten()
        )


def test_weights_that_are_restored_alone_are_followed(tmp_path: Path) -> None:
    """Copy weights that were restored by ``only=`` into the flat tensor, so that the next step starts from them. Leave
    the other values unchanged."""
    first = Mixed()
    first.train(tmp_path / "run", 3)
    for only in (["model"], ["model/1.weight"], ["rng"]):
        mixed = Mixed()
        before = mixed.flat.detach().clone()
        ckpt = relight.Checkpointer(tmp_path / "run", save=None, model=mixed.model, optimizer=mixed.optimizer)
        ckpt.restore(only=only)
        ckpt.close(save=False)
        for (parameter, begin), name in zip(mixed.runs(), ("0.weight", "0.bias", "1.weight"), strict=True):
            here = slice(begin, begin + parameter.numel())
            taken = only == ["model"] or f"model/{name}" in only
            expected = parameter.detach().flatten().float() if taken else before[here]
            assert torch.equal(mixed.flat.detach()[here], expected), (only, name)


def test_the_last_word_counts(tmp_path: Path) -> None:
    """Accept parameters as a generator. If the layout is declared again between two saves, the second save uses the
    last declaration."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    flat = nn.Parameter(torch.arange(24.0, dtype=torch.float64))
    relight.flattened(flat, model.parameters())
    optimizer = torch.optim.SGD([flat], lr=1)
    ckpt = relight.Checkpointer(tmp_path / "run", save=None, model=model, optimizer=optimizer)
    ckpt.restore()
    ckpt.save(0)
    first, second, third, fourth = model.parameters()
    relight.flattened(flat, [third, fourth, first, second])
    ckpt.save(1)
    ckpt.close(save=False)
    before, after = (relight.load(tmp_path / "run", step)["optimizer"]["masters"] for step in (0, 1))
    assert before["0.weight"].flatten().tolist() == after["1.weight"].flatten().tolist() == list(range(9))
    assert before["1.bias"].tolist() == after["0.bias"].tolist() == [21, 22, 23]


def test_a_parameter_of_no_component_is_refused(tmp_path: Path) -> None:
    """Refuse a parameter without a component: it has no name to be saved under."""
    mixed = Mixed()
    ckpt = relight.Checkpointer(tmp_path / "run", save=None, model=nn.Linear(2, 2), optimizer=mixed.optimizer)
    with pytest.raises(IncompatibleState, match="belong to no component"):
        ckpt.save(0)
    ckpt.close(save=False)


def test_what_cannot_be_is_refused() -> None:
    """Raise ConfigError for contradictory shapes, gaps and sizes when the layout is declared."""
    parameter, flat = nn.Parameter(torch.zeros(3, 2)), torch.zeros(8)
    for make in (
        lambda: relight.flattened(torch.zeros(2, 4), [parameter]),
        lambda: relight.flattened(torch.zeros(16)[::2], [parameter]),
        lambda: relight.flattened(torch.zeros(0), [parameter]),
        lambda: relight.flattened(flat, []),
        lambda: relight.flattened(flat, ["0.weight"]),  # type: ignore[list-item]
        lambda: relight.flattened(flat, [parameter, parameter]),
        lambda: relight.flattened(flat, [parameter], begins=[3]),
        lambda: relight.flattened(flat, [parameter], begins=[0, 1]),
        lambda: relight.flattened(flat, [parameter], begins=[-1]),
        lambda: relight.flattened(torch.zeros(5), [parameter]),
    ):
        refuses(ConfigError, make)
    relight.flattened(flat, [parameter], begins=[2])
