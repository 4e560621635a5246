"""Start of an attempt: no mistake trains past a run's existing checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import relight
from relight.errors import ConfigError
from relight.observe import Event, subscribe


@pytest.fixture
def run(tmp_path: Path) -> str:
    return str(tmp_path / "store" / "run")


def train(run: str, first: int | None, last: int, **options: Any) -> relight.Checkpointer:
    """Train from ``first`` (None: from the result of ``restore()``) to before ``last``. Save every step in the
    foreground."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"save": relight.every(steps=1), "background": False, **options}
    ckpt = relight.Checkpointer(run, model=model, optimizer=optimizer, signals=False, **options)
    for step in range(ckpt.restore() if first is None else first, last):
        model(torch.randn(3, 2)).sum().backward()
        optimizer.step()
        ckpt.step(step)
    ckpt.close()
    return ckpt


def steps_of(run: str) -> list[int]:
    return [checkpoint.step for checkpoint in relight.open(run).checkpoints()]


@pytest.mark.parametrize("how", ["step", "save"])
def test_the_first_step_or_save_of_an_unrestored_run_is_refused(run: str, how: str) -> None:
    """Raise an error with the newest step and the remedies if a script forgets ``restore()``. Nothing is saved or
    deleted."""
    train(run, 0, 5)
    model = nn.Linear(2, 2)
    ckpt = relight.Checkpointer(run, model=model, save=relight.every(steps=1), keep=relight.keep(last=2), signals=False)
    with pytest.raises(ConfigError, match="the newest of step 4") as caught:
        getattr(ckpt, how)(0)
    assert "ckpt.restore()" in caught.value.hint
    assert "fresh=True" in caught.value.hint
    assert steps_of(run) == [0, 1, 2, 3, 4]


def test_a_restored_run_continues(run: str) -> None:
    """Continue after restoring the newest checkpoint, or another one on purpose, or in a run without a checkpoint."""
    train(run, None, 3)
    train(run, None, 5)
    model = nn.Linear(2, 2)
    ckpt = relight.Checkpointer(run, model=model, signals=False, background=False, save=None)
    assert ckpt.restore(2, only=["model/*"]) == 3
    ckpt.save(3)
    ckpt.close()
    assert steps_of(run) == [0, 1, 2, 3, 4, 3]


def test_fresh_begins_a_new_branch_and_the_old_one_stays(run: str) -> None:
    """Restore nothing with ``fresh=True``. Retention deletes nothing of the old branch, and the next restore takes the
    new one."""
    train(run, 0, 5)
    ckpt = train(run, None, 8, fresh=True, keep=relight.keep(last=2))
    assert ckpt.run == "run"
    assert steps_of(run) == [0, 1, 2, 3, 4, 6, 7]
    assert train(run, None, 8)._progress.step == 7
    plan = relight.open(run).plan_prune(relight.keep(last=1))
    reasons = {verdict.step: verdict.reason for verdict in plan.verdicts}
    assert "abandoned" in reasons[4]
    assert [verdict.step for verdict in plan.verdicts if not verdict.keep] == [6]


def test_abandoned_checkpoints_go_when_that_is_asked_for(run: str) -> None:
    """Apply the rules to all branches alike with ``prune_abandoned=True``."""
    train(run, 0, 5)
    train(run, 0, 4, fresh=True, keep=relight.keep(last=2, prune_abandoned=True))
    assert steps_of(run) == [2, 3]


def test_a_line_left_by_restoring_an_older_checkpoint_stays(run: str) -> None:
    """Delete none of steps 2 to 4 if training continues from step 1 on purpose, in the same process or in another."""
    train(run, 0, 5)
    model = nn.Linear(2, 2)
    ckpt = relight.Checkpointer(run, model=model, signals=False, background=False, save=None)
    ckpt.restore(1, only=["model/*"])
    second = [ckpt.save(step).id for step in (2, 3)]
    ckpt.restore(str(second[0]), only=["model/*"])
    third = [ckpt.save(step).id for step in (3, 4)]
    ckpt.close()
    plan = relight.open(run).plan_prune(relight.keep(last=1))
    going = [(verdict.id, verdict.step) for verdict in plan.verdicts if not verdict.keep]
    assert [step for _, step in going] == [0, 1, 2, 3], "only ancestors of the newest"
    assert [id_ for id_, _ in going[2:]] == [second[0], third[0]]


def test_saves_through_the_agent_have_the_save_before_as_parent(run: str) -> None:
    """Record the previous save as parent, even if it was still being written. After a restore, the parent is the
    restored checkpoint."""
    model = nn.Linear(2, 2)
    ckpt = relight.Checkpointer(run, model=model, signals=False, save=None, limits=relight.Limits(when_busy="queue"))
    for step in range(4):
        ckpt.save(step, block=False)
    ckpt.restore(1)
    ckpt.save(7)
    ckpt.close()
    live = relight.open(run).checkpoints()
    by_id = {checkpoint.id: checkpoint.step for checkpoint in live}
    assert {checkpoint.step: [by_id[parent] for parent in checkpoint.body.parents] for checkpoint in live} == {
        0: [],
        1: [0],
        2: [1],
        3: [2],
        7: [1],
    }


@pytest.mark.parametrize(("restarts", "job", "restores"), [("0", "a", False), ("1", "a", True), ("1", "b", False)])
def test_a_job_started_again_by_its_launcher_is_not_fresh_twice(
    run: str, monkeypatch: pytest.MonkeyPatch, restarts: str, job: str, restores: bool
) -> None:
    """Apply ``fresh=True`` to the job, not to each of its processes. A restart after a crash keeps the new branch."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    train(run, 0, 2)
    train(run, None, 6, fresh=True)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    ckpt = relight.Checkpointer(run, model=nn.Linear(2, 2), fresh=True, signals=False, save=None)
    assert ckpt.restore(only=["model/*"]) == (6 if restores else 0)


def test_the_first_line_of_an_attempt_names_what_it_does_not_continue_from(run: str) -> None:
    """Log which checkpoints the training does not continue from."""
    train(run, 0, 5)
    events: list[Event] = []
    undo: Callable[[], None] = subscribe(events.append)
    train(run, None, 1, fresh=True)
    undo()
    message = next(str(event.fields["message"]) for event in events if event.name == "attempt.started")
    assert "begins from scratch; it keeps 5 checkpoints that it does not continue from, the newest of step 4" in message


def test_an_unrestored_run_is_refused_for_what_a_further_tier_has(tmp_path: Path) -> None:
    """Refuse an unrestored run that has checkpoints only in a further tier. A wiped nearest tier does not make a run
    fresh."""
    train(str(tmp_path / "far" / "run"), 0, 3)
    tiers = relight.Tiers(near=relight.tier(tmp_path / "near" / "run"), far=relight.tier(tmp_path / "far" / "run"))
    ckpt = relight.Checkpointer(
        tiers, model=nn.Linear(2, 2), signals=False, background=False, save=relight.every(steps=1)
    )
    with pytest.raises(ConfigError, match="the newest of step 2"):
        ckpt.step(0)
