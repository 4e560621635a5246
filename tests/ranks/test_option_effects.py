"""A table of each option's effect: on one rank, on several, and where rank 0 writes; in background and foreground."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import relight
from relight.catalog import Run as StoredRun
from relight.checkpointer import boundary, session
from relight.comm import RankTimeout, SingleProcess, ThreadGroup
from relight.errors import SaveFailed, StoreUnavailable
from relight.ranks.several import SeveralRanks
from relight.store import LocalStore

MODES = {
    f"{name}, {'background' if background else 'foreground'}": (size, options, background)
    for name, size, options in (
        ("one rank", 1, {}),
        ("several ranks", 2, {}),
        ("rank 0 writes", 2, {"writer": "rank 0"}),
    )
    for background in (True, False)
}
Run = Callable[..., list[Any]]


@pytest.fixture(name="train", params=MODES)
def train_fixture(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls a function with a Checkpointer on each rank of one mode, and returns what it returned on each."""
    size, fixed, background = MODES[request.param]
    local = threading.local()
    monkeypatch.setattr(session, "find_world", lambda timeout_s: getattr(local, "world", SingleProcess()))
    monkeypatch.setattr(boundary, "FREE_S", 1.0)
    monkeypatch.setenv("RELIGHT_BACKGROUND", "1")

    def run(
        action: Callable[[relight.Checkpointer, torch.nn.Module], Any], elements: int = 1000, **options: Any
    ) -> list[Any]:
        def one(world: ThreadGroup) -> Any:
            local.world = world if size > 1 else SingleProcess()
            model = torch.nn.Module()
            model.frozen = torch.nn.Parameter(torch.arange(float(elements)), requires_grad=False)
            model.weight = torch.nn.Parameter(torch.zeros(elements))
            given = {
                "limits": relight.Limits(deadline_s=60, when_busy="queue"),
                "save": relight.every(steps=2),
                **options,
            }
            with relight.Checkpointer(
                tmp_path / "s" / "run", model=model, signals=False, background=background, **fixed, **given
            ) as ckpt:
                return action(ckpt, model)

        return ThreadGroup.run(size, one, 60.0)

    run.ranks, run.at_once = size, size == 1 and not background  # type: ignore[attr-defined]
    return run


def steps_of(ckpt: relight.Checkpointer, model: torch.nn.Module, steps: int = 10, pause_s: float = 0.0) -> int:
    start = ckpt.restore()
    for step in range(start, steps):
        with torch.no_grad():
            model.weight += 1
        ckpt.step(step, loss=float(step))
        time.sleep(pause_s)
    return start


def saved_steps(tmp_path: Path) -> list[int]:
    return [checkpoint.step for checkpoint in relight.open(tmp_path / "s" / "run").checkpoints()]


def test_saves_retention_metadata_and_storage(train: Run, tmp_path: Path) -> None:
    """Every due save is made, the rules keep what they name, metadata is stored, and what did not change is stored once."""
    train(
        steps_of,
        keep=relight.keep(last=3, every=6),
        metadata={"owner": "me"},
        compact=relight.Compact(),
        elements=300_000,
    )
    assert saved_steps(tmp_path) == [1, 5, 7, 9], "the first stays: its frozen tensor is needed"
    run = StoredRun(LocalStore(str(tmp_path / "s")), "run")
    last = run.history().live[-1]
    assert run.open(last).root.user["owner"] == "me" and last.body.new_bytes < 0.6 * last.body.logical_bytes


def test_a_busy_queue_is_waited_for(train: Run, tmp_path: Path) -> None:
    """With when_busy="queue" every due save is made at its own step, however slow the store is."""
    limits = relight.Limits(memory=1 << 20, bytes_per_second=1e6, when_busy="queue", deadline_s=60)
    train(steps_of, elements=20_000, limits=limits, keep=relight.keep(last=50))
    assert saved_steps(tmp_path) == [1, 3, 5, 7, 9]


def test_bounds_hold_for_all_ranks_together(train: Run) -> None:
    """Five saves of 0.8 MB at 4 MB/s take a second in each mode, and reading one back at 2 MB/s takes 0.4 s."""
    began = time.monotonic()
    train(steps_of, elements=100_000, limits=relight.Limits(bytes_per_second=4e6, when_busy="queue", deadline_s=60))
    assert time.monotonic() - began > 0.9

    def restored(ckpt: relight.Checkpointer, model: torch.nn.Module) -> float:
        begins = time.monotonic()
        assert ckpt.restore() == 10 and float(model.weight.detach()[0]) == 10
        return time.monotonic() - begins

    assert max(train(restored, elements=100_000, limits=relight.Limits(read_bytes_per_second=2e6, deadline_s=60))) > 0.3


@pytest.mark.parametrize("policy", ["warn", "retry", "raise"])
def test_a_failed_save(train: Run, tmp_path: Path, policy: str) -> None:
    """ "warn" leaves the failed save out, "retry" makes it again at once or at a later step, "raise" stops training."""
    run, ranks = tmp_path / "s" / "run", train.ranks  # type: ignore[attr-defined]
    together = threading.Barrier(ranks, timeout=20)

    def with_a_fault(ckpt: relight.Checkpointer, model: torch.nn.Module) -> str:
        ckpt.restore()
        for step in range(9):
            if step == 3:  # the run's directory is away while this step is saved
                if together.wait() == 0:
                    run.rename(tmp_path / "away")
                    run.touch()
                together.wait()
            try:
                handle = ckpt.step(step)
                if step == 3 and handle is not None:
                    with contextlib.suppress(StoreUnavailable, SaveFailed, RankTimeout):
                        handle.wait(timeout=20)
                    ckpt._saves.poll()
            except SaveFailed as error:
                raised = str(error)
            else:
                raised = ""
            if step == 3:
                if together.wait() == 0:
                    run.unlink()
                    (tmp_path / "away").rename(run)
                together.wait()
            if raised:
                return raised
        return ""

    raised = train(with_a_fault, save=relight.every(steps=4), on_failure=policy)
    steps = saved_steps(tmp_path)
    if policy == "raise":
        assert all("1 saves in a row failed" in message for message in raised) and steps in ([], [3]), (
            "leaving the block saves the last step"
        )
        return
    assert 3 not in steps and raised == [""] * ranks and steps[-2:] == [7, 8]
    assert any(3 < step < 7 for step in steps) == (policy == "retry" and not train.at_once)  # type: ignore[attr-defined]


def test_a_best_value_is_in_the_checkpoint_that_it_made_due(train: Run, tmp_path: Path) -> None:
    """Several ranks save one step later, which reports no such metric: the value is stored all the same."""
    losses = {2: 5.0, 5: 4.0, 8: 6.0, 11: 3.0}

    def validated(ckpt: relight.Checkpointer, model: torch.nn.Module) -> None:
        ckpt.restore()
        for step in range(14):
            ckpt.step(step, **({"val_loss": losses[step]} if step in losses else {}))

    train(validated, save=relight.best("val_loss"), keep=relight.keep(last=20))
    history = StoredRun(LocalStore(str(tmp_path / "s")), "run").history()
    later = 0 if train.ranks == 1 else 1  # type: ignore[attr-defined]
    assert [(saved.step - later, saved.body.metrics["val_loss"]) for saved in history.live[:-1]] == [
        (2, 5.0),
        (5, 4.0),
        (11, 3.0),
    ]


def test_the_end_reports_a_last_step_that_is_not_yet_stored(train: Run, tmp_path: Path) -> None:
    """A save that takes longer than the deadline is not reported as stored."""
    limits = relight.Limits(bytes_per_second=2e5, when_busy="queue", deadline_s=1.5)

    def ended(ckpt: relight.Checkpointer, model: torch.nn.Module) -> int:
        with contextlib.suppress(SaveFailed, RankTimeout):
            steps_of(ckpt, model, 1)
        with contextlib.suppress(SaveFailed, RankTimeout):
            ckpt.close()
        return ckpt.ended.exit_code

    codes = train(ended, elements=200_000, limits=limits)
    try:
        stored = saved_steps(tmp_path) == [0]
    except relight.CheckpointNotFound:
        stored = False
    assert codes == [0 if stored else 1] * train.ranks  # type: ignore[attr-defined]


@pytest.mark.parametrize("named", ["optimizer", "model"])
def test_an_optimizer_stays_with_its_module(named: str) -> None:
    """per_rank= that separates them is refused at once on all ranks: the save would fail on one, and the others would wait."""
    model = torch.nn.Linear(2, 2)
    components = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    ranks = SeveralRanks(SingleProcess(), [named], 1.0)
    with pytest.raises(
        relight.ConfigError, match=r"separates optimizer 'optimizer' from the module that it trains, 'model'"
    ) as error:
        ranks.check_split(components)
    assert error.value.hint == "name both or neither: per_rank=['model', 'optimizer']"
    SeveralRanks(SingleProcess(), ["model", "optimizer"], 1.0).check_split(components)
    SeveralRanks(SingleProcess(), [named], 1.0).check_split(
        {**components, "optimizer": torch.optim.SGD(model.named_parameters(), 0.1)}
    )
