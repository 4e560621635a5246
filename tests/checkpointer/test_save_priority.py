"""``save(priority=)``: an urgent save takes the place of a less urgent one that waits to be written."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import relight
from relight.errors import ConfigError, SaveFailed
from relight.observe import Event

SLOW = relight.Limits(bytes_per_second=3e6)
"""Writing the state of 1.7 MB takes about half a second, and two snapshots fit into memory."""


@pytest.fixture(autouse=True)
def _background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELIGHT_BACKGROUND", "1")


class Loop:
    """A training loop with a save under way, and one that waits."""

    def __init__(self, path: Path, save: relight.Trigger | None = None, limits: relight.Limits = SLOW) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.ckpt = relight.Checkpointer(
            path / "s" / "run", model=self.model, optimizer=self.optimizer, save=save, limits=limits
        )
        self.states: dict[int, torch.Tensor] = {}
        self.ckpt.restore()
        self.train(0)
        self.ckpt.save(0)  # starts the agent and allocates its memory

    def train(self, step: int) -> None:
        """Do one step."""
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 64)).square().mean().backward()
        self.optimizer.step()
        self.states[step] = self.model[0].weight.detach().clone()  # type: ignore[union-attr]

    def save(self, step: int, **options: object) -> relight.Save:
        """Do one step, and save it without waiting."""
        self.train(step)
        return self.ckpt.save(step, block=False, **options)  # type: ignore[arg-type]


def live(path: Path) -> list[tuple[int, list[int]]]:
    """Step of each checkpoint, and those of its parents."""
    checkpoints = relight.open(path / "s" / "run").checkpoints()
    steps = {checkpoint.id: checkpoint.step for checkpoint in checkpoints}
    return [(checkpoint.step, [steps[parent] for parent in checkpoint.body.parents]) for checkpoint in checkpoints]


@pytest.mark.parametrize("waiting", ["low", "normal"])
def test_an_urgent_save_goes_before_one_that_waits(tmp_path: Path, events: list[Event], waiting: str) -> None:
    """Start the urgent save at once in the other save's slot. The replaced save reports its end, the history has no
    gap, and all checkpoints verify."""
    loop = Loop(tmp_path, limits=relight.Limits(bytes_per_second=1e6))
    first, second = loop.save(1), loop.save(2, priority=waiting)
    third = loop.save(3, priority="high")
    assert not first.done, "the third began while it is still being written"
    with pytest.raises(SaveFailed, match="the save of step 2 gave its slot to the more urgent one of step 3"):
        second.wait(0)
    third.wait(30)
    assert first.done and not second.done
    loop.ckpt.close()
    assert live(tmp_path) == [(0, []), (1, [0]), (3, [1])]
    assert [event.fields["step"] for event in events if event.name == "save.coalesced"] == [2]
    assert not [event for event in events if event.name == "save.failed"], "nothing has failed"
    assert torch.equal(relight.load(tmp_path / "s" / "run")["model"]["0.weight"], loop.states[3])
    assert not any(findings for _, findings in relight.open(tmp_path / "s" / "run").verify())


@pytest.mark.parametrize(
    ("second", "third"),
    [
        ({}, {}),
        ({"priority": "high"}, {"priority": "high"}),
        ({"tag": "keep"}, {"priority": "high"}),
        ({"priority": "low"}, {"priority": "low"}),
    ],
)
def test_an_urgent_or_tagged_save_keeps_its_place(
    tmp_path: Path, second: dict[str, str], third: dict[str, str]
) -> None:
    """Saves of one priority are made in their order, and a tag is never lost."""
    loop = Loop(tmp_path)
    saves = [loop.save(1), loop.save(2, **second), loop.save(3, **third)]
    loop.ckpt.close()
    assert all(save.done for save in saves)
    assert [step for step, _ in live(tmp_path)] == [0, 1, 2, 3]


def test_a_signals_save_is_urgent_by_its_reason(tmp_path: Path) -> None:
    """Give SIGUSR1's save the slot of a waiting save that a trigger made. Training continues, and later saves
    follow."""
    loop = Loop(tmp_path, relight.every(steps=1), relight.Limits(bytes_per_second=1e6))
    loop.train(1)
    first = loop.ckpt.step(1)
    loop.train(2)
    second = loop.ckpt.step(2)
    assert first is not None and second is not None
    signal.raise_signal(signal.SIGUSR1)
    loop.train(3)
    third = loop.ckpt.step(3)
    assert third is not None and second.error is not None and third.reason == "SIGUSR1"
    third.wait(30)
    loop.train(4)
    loop.ckpt.step(4)
    loop.ckpt.close()
    assert live(tmp_path) == [(0, []), (1, [0]), (3, [1]), (4, [3])]


def test_many_times_over(tmp_path: Path) -> None:
    """Make saves of all priorities as fast as possible. Each durable save exists with its own values, and the newest is
    the last."""
    loop = Loop(tmp_path)
    saves = {step: loop.save(step, priority=("low", "high", "normal")[step % 3]) for step in range(1, 25)}
    loop.ckpt.close()
    ids = {checkpoint.step: checkpoint.id for checkpoint in relight.open(tmp_path / "s" / "run").checkpoints()}
    assert max(ids) == 24
    for step, save in saves.items():
        assert save.done == (step in ids), step
        if save.done:
            assert torch.equal(relight.load(tmp_path / "s" / "run", step)["model"]["0.weight"], loop.states[step])


def test_another_word_is_refused(tmp_path: Path) -> None:
    """Refuse an unknown priority, and list the valid ones."""
    with (
        relight.Checkpointer(tmp_path / "run", x=torch.ones(3), background=False, save=None) as ckpt,
        pytest.raises(ConfigError, match="'low' or 'normal' or 'high'"),
    ):
        ckpt.save(0, priority="urgent")
