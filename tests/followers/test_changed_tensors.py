"""Which tensors a switch changed, and the live tensors by their stored names: what an engine must be sent."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import relight


def test_a_switch_names_the_tensors_that_changed(tmp_path: Path) -> None:
    """The first one names all, later ones those that got bytes, and each the checkpoint that the others still have."""
    model, live = (nn.Sequential(*(nn.Linear(1, 1 << 18, bias=False) for _ in range(3))) for _ in range(2))
    names = [f"model/{name}" for name, _ in model.named_parameters()]
    path = tmp_path / "s/run"
    ckpt = relight.Checkpointer(path, model=model, background=False, save=relight.every(steps=1))
    with ckpt, relight.follow(path, live) as follower:
        assert follower.tensors == {}
        ckpt.step(0)
        first = follower.poll()
        assert first is not None and sorted(first.changed) == names and first.before is None
        assert sorted(follower.tensors) == names
        for name, parameter in live.named_parameters():
            assert follower.tensors[f"model/{name}"].data_ptr() == parameter.data_ptr()
        model[0].weight.data.add_(1)
        ckpt.step(1)
        second = follower.poll()
        assert second is not None and second.changed == ("model/0.weight",) and second.before == first.id
        live[1].weight = nn.Parameter(torch.zeros(1 << 18, 1))  # new memory: nothing is known about it
        ckpt.step(2)
        third = follower.poll()
        assert third is not None and third.changed == ("model/1.weight",) and third.before == second.id
        assert torch.equal(follower.tensors["model/1.weight"], model[1].weight.detach())
