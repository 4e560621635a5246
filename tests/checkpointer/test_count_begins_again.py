"""Order of steps. Micro-batches end no step. A partial restore or a fresh start may begin another training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import relight
from relight.errors import CheckpointNotFound, ConfigError


def make(run: Path, **options: Any) -> tuple[relight.Checkpointer, nn.Linear]:
    model = nn.Linear(2, 2)
    options = {"save": relight.every(steps=1), **options}
    return relight.Checkpointer(run, model=model, background=False, signals=False, **options), model


def train(run: Path, first: int, last: int, **options: Any) -> None:
    ckpt, model = make(run, **options)
    ckpt.restore()
    with ckpt:
        for step in range(first, last):
            with torch.no_grad():
                model.weight += 1.0
            ckpt.step(step, loss=1.0)


def steps_of(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in relight.open(run).checkpoints()]


@pytest.mark.parametrize("options", [{}, {"fresh": True}])
@pytest.mark.parametrize("first", [0, 19])
def test_weights_of_a_run_may_begin_another_training(tmp_path: Path, options: dict[str, Any], first: int) -> None:
    """After ``restore(WHICH, only=…)``, steps may count from 0 again. Retention keeps the earlier checkpoints."""
    run = tmp_path / "store" / "run"
    train(run, 0, 20)
    ckpt, _ = make(run, keep=relight.keep(last=2), **options)
    assert ckpt.restore("best:loss", only=["model/*"]) == 20
    with ckpt:
        for step in range(first, first + 4):
            ckpt.step(step)
        with pytest.raises(ConfigError, match=f"step 0 was reported after step {first + 3}"):
            ckpt.step(0)
    assert steps_of(run) == [*range(20), first + 2, first + 3]


def test_a_part_from_which_steps_continue_stays_on_its_line(tmp_path: Path) -> None:
    """If the script begins at the step that ``restore()`` returned, the checkpoints before are ancestors, as after any restore."""
    run = tmp_path / "store" / "run"
    train(run, 0, 6)
    ckpt, _ = make(run, keep=relight.keep(last=2))
    start = ckpt.restore("best:loss", only=["model/*"])
    with ckpt:
        for step in range(start, start + 2):
            ckpt.step(step)
    assert start == 6 and steps_of(run)[-2:] == [6, 7] and min(steps_of(run)) >= 5


def test_a_fresh_start_from_a_certain_checkpoint_keeps_all_others(tmp_path: Path) -> None:
    """Keep all checkpoints with ``fresh=True``, also if one of them is restored and continued."""
    run = tmp_path / "store" / "run"
    train(run, 0, 6)
    ckpt, _ = make(run, keep=relight.keep(last=1), fresh=True)
    start = ckpt.restore(3)
    with ckpt:
        ckpt.step(start)
        ckpt.step(start + 1)
    assert steps_of(run) == [0, 1, 2, 3, 4, 5, 5]


def test_a_whole_restore_still_counts_up(tmp_path: Path) -> None:
    """Steps below a checkpoint that was restored whole are a slip."""
    run = tmp_path / "store" / "run"
    train(run, 0, 4)
    ckpt, _ = make(run)
    ckpt.restore(2)
    with pytest.raises(ConfigError, match="step 0 was reported after step 2"):
        ckpt.step(0)
    ckpt.close(save=False)


@pytest.mark.parametrize("skipped", [[9], [9, 10], [19]])
def test_a_step_that_reported_only_micro_batches_loses_no_multiple(tmp_path: Path, skipped: list[int]) -> None:
    """A script that leaves a step within its micro-batches saves ``every(steps=10)`` at the next step that ends."""
    run = tmp_path / "store" / "run"
    ckpt, _ = make(run, save=relight.every(steps=10))
    ckpt.restore()
    for step in range(25):
        for micro in range(2):
            ckpt.step(step, micro_step=micro)
        if step not in skipped:
            ckpt.step(step)
    ckpt.close(save=False)
    assert steps_of(run) == [skipped[-1] + 1 if multiple in skipped else multiple for multiple in (9, 19)]


def test_a_step_that_was_restored_within_its_micro_batches_loses_no_multiple(tmp_path: Path) -> None:
    """The step before it is the last that ended."""
    run = tmp_path / "store" / "run"
    ckpt, _ = make(run, save=None)
    ckpt.restore()
    ckpt.save(9, micro_step=0)
    ckpt.close(save=False)
    ckpt, _ = make(run, save=relight.every(steps=10))
    assert ckpt.restore() == 9
    assert ckpt.step(10) is not None
    ckpt.close(save=False)


def test_a_number_of_thousands_of_digits_names_no_checkpoint(tmp_path: Path) -> None:
    """Python refuses to convert such numbers with an error of its own, which names nothing."""
    run = tmp_path / "store" / "run"
    train(run, 0, 1)
    ckpt, _ = make(run)
    with pytest.raises(CheckpointNotFound):
        ckpt.restore("9" * 5000)
    with pytest.raises(ConfigError, match="bits names no checkpoint"):
        ckpt.restore(10**5000)
    ckpt.close(save=False)
