"""``first_step=1``: step numbers that count finished steps, as frameworks have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import relight
from relight.importers import detect, import_checkpoint
from relight.store import open_bytes


def run_steps(path: Path, first: int, last: int, **options: Any) -> int:
    """Train until step ``last`` in a loop that counts from ``first``. Return the step at which it began."""
    model = torch.nn.Linear(2, 2)
    with relight.Checkpointer(path, model=model, background=False, first_step=first, **options) as ckpt:
        start = ckpt.restore()
        for step in range(start, last + 1):
            ckpt.step(step)
    return start


def listed(path: Path) -> list[tuple[int, int]]:
    """Return step and number of finished steps of each checkpoint."""
    return [(checkpoint.step, checkpoint.body.steps_done) for checkpoint in relight.open(path).checkpoints()]


def test_step_five_is_the_state_after_five_steps(tmp_path: Path) -> None:
    """Triggers and retention count finished steps, and a restart continues with the next step."""
    assert run_steps(tmp_path / "s/run", 1, 5, save=relight.every(steps=5)) == 1
    assert listed(tmp_path / "s/run") == [(5, 5)]
    assert run_steps(tmp_path / "s/run", 1, 12, save=relight.every(steps=5), keep=relight.keep(every=5)) == 6
    assert listed(tmp_path / "s/run") == [(5, 5), (10, 10), (12, 12)]
    plan = relight.open(tmp_path / "s/run").plan_prune(relight.keep(every=5))
    assert {verdict.step: verdict.keep for verdict in plan.verdicts} == {5: True, 10: True, 12: True}


def test_a_rollback_counts_finished_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import of 10 finished steps is before step 10 of a loop that counts from 0, and after step 10 of one that counts from 1."""
    run_steps(tmp_path / "s/run", 1, 10, save=relight.every(steps=5))
    assert listed(tmp_path / "s/run") == [(5, 5), (10, 10)]
    model = torch.nn.Linear(2, 2)
    for first, begun in ((0, 10), (1, 6)):
        monkeypatch.setenv("RELIGHT_BEFORE", "10")
        with relight.Checkpointer(
            tmp_path / "s/run", model=model, background=False, save=None, first_step=first
        ) as ckpt:
            assert ckpt.restore() == begun


@pytest.mark.parametrize(("before", "after", "begun"), [(0, 1, 6), (1, 0, 5)])
def test_a_run_is_continued_by_a_script_that_counts_differently(
    before: int, after: int, begun: int, tmp_path: Path
) -> None:
    """Five steps are done: the next one is number 5 where counting starts with 0, and number 6 where it starts with 1."""
    run_steps(tmp_path / "s/run", before, 4 + before, save=relight.every(steps=5))
    assert run_steps(tmp_path / "s/run", after, 9 + after, save=relight.every(steps=5)) == begun
    assert listed(tmp_path / "s/run") == [(4 + before, 5), (9 + after, 10)]


def test_a_save_within_a_step_is_continued_within_it(tmp_path: Path) -> None:
    """A save after a micro-batch of step 3 restores into step 3."""
    for first in (0, 1):
        model, path = torch.nn.Linear(2, 2), tmp_path / str(first) / "run"
        ckpt = relight.Checkpointer(path, model=model, background=False, save=None, first_step=first)
        ckpt.restore()
        ckpt.step(2 + first)
        ckpt.save(3 + first, micro_step=0)
        ckpt.close(save=False)
        for other in (0, 1):
            ckpt = relight.Checkpointer(path, model=model, background=False, save=None, first_step=other)
            assert (ckpt.restore(), ckpt.micro_step) == (3 + other, 1)
            ckpt.close(save=False)


@pytest.mark.parametrize("value", [2, -1, True, 1.0, "1", None])
def test_another_first_step_is_refused(value: Any, tmp_path: Path) -> None:
    """The hint names both meanings."""
    with pytest.raises(relight.ConfigError, match=r"0 if the loop is range\(N\)"):
        relight.Checkpointer(tmp_path / "s/run", model=torch.nn.Linear(2, 2), first_step=value)


@pytest.mark.parametrize(
    ("saved", "begun"),
    [({"step": 5}, 6), ({"global_step": 6}, 6), ({}, 0)],
    ids=["number of the last step", "count of steps", "weights alone"],
)
def test_an_import_is_continued_with_the_next_step(saved: dict[str, int], begun: int, tmp_path: Path) -> None:
    """Frameworks save how many steps are done, scripts the number of the last one. No step is skipped or done twice."""
    model = torch.nn.Linear(2, 2)
    torch.save({"model": model.state_dict(), **saved}, tmp_path / "old.pt")
    import_checkpoint(detect(str(tmp_path / "old.pt")), open_bytes(str(tmp_path / "s")), "run")
    with relight.Checkpointer(tmp_path / "s/run", model=model, background=False, save=None) as ckpt:
        assert ckpt.restore() == begun
