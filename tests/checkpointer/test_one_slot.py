"""A large state has one snapshot slot in memory, and a second once a save is due while the first is being written."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import relight
from relight.agent.client import Agent
from relight.checkpointer import background
from relight.errors import StoreUnavailable
from relight.observe import Event

SIZE = 1 << 20
"""Bytes of the state."""
SLOW = relight.Limits(bytes_per_second=2e6)
"""A save takes half a second."""


@pytest.fixture(autouse=True)
def _one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELIGHT_BACKGROUND", "1")
    monkeypatch.setattr(background, "ONE_SLOT_FROM", SIZE)


def make(path: Path, **options: Any) -> tuple[nn.Module, relight.Checkpointer]:
    model = nn.Linear(SIZE // 4, 1, bias=False)
    return model, relight.Checkpointer(path, model=model, save=relight.every(steps=1), **options)


def slots(ckpt: relight.Checkpointer) -> int:
    """Return the number of slots that the trainer has."""
    writer = ckpt._saves.writer
    assert isinstance(writer, background.Background) and writer._shape is not None
    return len(writer._shape.slots)


def agents_bytes(ckpt: relight.Checkpointer) -> int:
    """Return the bytes of shared memory that the agent has allocated."""
    agent = ckpt._saves.writer._agent  # type: ignore[union-attr]
    files = [Path(f"/proc/{agent.pid}/fd/{name}") for name in os.listdir(f"/proc/{agent.pid}/fd")]
    memory = [file.stat() for file in files if "memfd:relight" in os.readlink(file)]
    return sum({entry.st_ino: entry.st_size for entry in memory}.values())


def train(model: nn.Module, ckpt: relight.Checkpointer, steps: range, pause_s: float) -> None:
    """Make steps. After each, every weight equals the step."""
    for step in steps:
        with torch.no_grad():
            model.weight.fill_(step)
        ckpt.step(step)
        time.sleep(pause_s)


def check(path: Path) -> list[int]:
    """Return the saved steps. Each checkpoint must have its own step's weights."""
    checkpoints = relight.open(path).checkpoints()
    for checkpoint in checkpoints:
        weights = relight.load(path, checkpoint.step)["model"]["weight"]
        assert bool((weights == checkpoint.step).all()), checkpoint
    return [checkpoint.step for checkpoint in checkpoints]


def test_a_disk_that_is_faster_than_the_interval_needs_one_slot(tmp_path: Path) -> None:
    """Every step is saved, with the memory of one state."""
    model, ckpt = make(tmp_path / "s/run")
    with ckpt:
        ckpt.restore()
        model.weight.data.fill_(0)
        ckpt.save(0)
        for step in range(1, 5):
            model.weight.data.fill_(step)
            save = ckpt.step(step)
            assert save is not None
            save.wait()
        assert slots(ckpt) == 1
        assert SIZE <= agents_bytes(ckpt) < 1.02 * SIZE + (2 << 20)
    assert check(tmp_path / "s/run") == [0, 1, 2, 3, 4]


def test_a_save_that_is_due_too_soon_gets_a_second_slot(tmp_path: Path, events: list[Event]) -> None:
    """It is made some steps later, while the first one is still being written."""
    model, ckpt = make(tmp_path / "s/run", limits=SLOW)
    with ckpt:
        ckpt.restore()
        model.weight.data.fill_(0)
        first = ckpt.save(0, block=False)
        assert slots(ckpt) == 1
        ends = time.monotonic() + 20
        step = 1
        while slots(ckpt) == 1 and time.monotonic() < ends:
            train(model, ckpt, range(step, step + 1), 0.005)
            step += 1
        train(model, ckpt, range(step, step + 1), 0.0)
        assert slots(ckpt) == 2 and not first.done
    begun = [event.fields["step"] for event in events if event.name == "save.requested"]
    assert check(tmp_path / "s/run")[:2] == begun[:2] == [0, begun[1]]


def test_without_memory_for_a_second_slot_saves_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is made once. Every save is made, as soon as the slot is free."""
    wanted: list[bool] = []
    original = Agent.slots

    def refused(self: Agent, size: int, count: int, memory: int | None, timeout: float, *, more: bool = False) -> Any:
        wanted.append(more)
        if more:
            raise StoreUnavailable("no memory")
        return original(self, size, count, memory, timeout)

    monkeypatch.setattr(Agent, "slots", refused)
    model, ckpt = make(tmp_path / "s/run", limits=SLOW)
    with ckpt:
        ckpt.restore()
        model.weight.data.fill_(0)
        ckpt.save(0, block=False)
        train(model, ckpt, range(1, 40), 0.05)
        assert slots(ckpt) == 1
    saved = check(tmp_path / "s/run")
    assert wanted == [False, True]
    assert len(saved) > 2 and saved[-1] == 39


@pytest.mark.parametrize("at", [0.0, 0.01, 0.1, 0.3])
def test_a_new_layout_and_an_end_wait_for_the_second_slot(at: float, tmp_path: Path) -> None:
    """The state grows, and the run ends, while the second slot is being allocated: nothing is lost or left."""
    model, ckpt = make(tmp_path / "s/run", limits=SLOW, state={"more": [1]})
    with ckpt:
        ckpt.restore()
        train(model, ckpt, range(2), 0.02)
        ckpt.save(2, block=False)
        time.sleep(at)
        ckpt["more"].append(torch.full((SIZE // 4,), 3.0))
        model.weight.data.fill_(3)
        ckpt.save(3, block=False)
    assert bool((relight.load(tmp_path / "s/run")["more"][1] == 3).all())
    assert relight.open(tmp_path / "s/run").checkpoints()[-1].step == 3


@pytest.mark.parametrize("options", [{"compact": True}, {"limits": relight.Limits(memory=SIZE * 3)}], ids=str)
def test_what_compares_or_limits_is_as_before(options: dict[str, Any], tmp_path: Path) -> None:
    """Incremental saves compare with the save before, which stays in the other slot. A limit is met by one slot."""
    model, ckpt = make(tmp_path / "s/run", **options)
    with ckpt:
        ckpt.restore()
        ckpt.save(0)
        assert slots(ckpt) == (2 if "compact" in options else 1)
        assert not ckpt._saves.writer._shape.may_grow  # type: ignore[union-attr]
