"""Which processes may call a Checkpointer, and with which steps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import relight
from relight.checkpointer.calls import refuse_unconnected
from relight.observe import counters
from relight.policy.triggers import TriggerInput, every


def made(path: Path, **more: object) -> relight.Checkpointer:
    """A Checkpointer of a small model."""
    return relight.Checkpointer(path / "demo", model=torch.nn.Linear(1, 1), save=None, signals=False, **more)  # type: ignore[arg-type]


def test_steps_count_up(tmp_path: Path) -> None:
    """Refuse a step below the last one. The error has both numbers and the remedy, and nothing is saved."""
    ckpt = made(tmp_path)
    ckpt.restore()
    for step in range(3):
        ckpt.step(step)
    with pytest.raises(relight.ConfigError, match=r"step 0 was reported after step 2(.|\n)*in one variable"):
        ckpt.step(0)
    with pytest.raises(relight.ConfigError, match="step 1 was reported after step 2"):
        ckpt.save(1)
    ckpt.close()
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "demo").checkpoints()] == [2]


def test_steps_count_up_from_what_was_restored(tmp_path: Path) -> None:
    """Refuse a step below the restored one. After restoring an earlier checkpoint, its next steps are accepted."""
    ckpt = made(tmp_path)
    ckpt.restore()
    for step in range(6):
        ckpt.step(step)
        ckpt.save(step)
    with pytest.raises(relight.ConfigError, match="step 0 was reported after step 5"):
        ckpt.step(0)
    assert ckpt.restore(3) == 4
    ckpt.step(4)
    ckpt.close(save=False)


def test_a_repeated_step_is_warned_of_once(tmp_path: Path) -> None:
    """Warn once about the second report of a step. save() after step() and micro-steps cause no warning."""
    before = counters["steps.repeated"]
    with made(tmp_path) as ckpt:
        ckpt.restore()
        ckpt.step(0)
        ckpt.save(0)
        ckpt.step(1, micro_step=0)
        ckpt.step(1, micro_step=1)
        ckpt.step(1)
        assert counters["steps.repeated"] == before
        for step in (2, 2, 3, 3):
            ckpt.step(step)
    assert counters["steps.repeated"] == before + 1


@pytest.mark.parametrize("call", ["step", "save", "restore"])
def test_a_forked_child_is_refused(tmp_path: Path, call: str) -> None:
    """Refuse save and restore in a child that was forked after the Checkpointer was made. Its close() does nothing."""
    ckpt = made(tmp_path)
    ckpt.restore()
    ckpt.step(0)
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            ckpt.restore() if call == "restore" else getattr(ckpt, call)(1)
        except relight.ConfigError as error:
            code = 7 if "forked" in str(error) else 1
        ckpt.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    ckpt.step(1)
    ckpt.close()
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "demo").checkpoints()] == [1]


def test_ranks_that_are_not_connected_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Refuse a rank above 0 that a launcher started without torch.distributed. Rank 0 and single processes are
    accepted."""
    for rank, size, refused in (
        ("0", "2", False),
        ("0", "1", False),
        ("1", "2", True),
        ("x", "2", False),
        ("", "", False),
    ):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", size)
        if refused:
            with pytest.raises(relight.ConfigError, match="init_process_group"):
                made(tmp_path)
        else:
            refuse_unconnected()


@pytest.mark.parametrize(
    ("previous", "step", "due"),
    [
        (None, 2, True),
        (None, 3, False),
        (1, 2, True),
        (1, 3, True),
        (2, 3, False),
        (1, 9, True),
        (2, 4, False),
        (2, 2, True),
        (3, 3, False),
        (None, 100, False),
    ],
)
def test_a_multiple_that_was_left_out_is_saved_at_the_next_step(previous: int | None, step: int, due: bool) -> None:
    """``every(steps=3)`` asks at steps 2, 5, 8 …, or at the first reported step after one of them."""
    facts = TriggerInput(step, 0.0, None, 0.0, previous=previous)
    assert bool(every(steps=3).due(facts)) == due
    assert bool((every(steps=3) | every(minutes=10)).by_step(step, previous)) == due
