"""A run that was rolled back: which checkpoint is the latest then, in this log and in those of further tiers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import relight
from relight.catalog.find import candidates, resolve
from relight.catalog.tiers import merge
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.format import Leaf, encode_tree
from relight.format.records import NoteBody
from relight.format.topics import ROLLED_BACK, RollbackNote
from relight.layout import Bytes, Item
from relight.log import History
from relight.policy.rollback_env import BEFORE, CUT, SKIP
from relight.ranks.group import SINGLE_RANK
from relight.restore.rollback import apply_requested_rollback, scale_learning_rates
from relight.store import MemoryStore, open_bytes

RUN = "run"


def save(attempt: Attempt, step: int, loss: float = 1.0) -> str:
    """A checkpoint's id."""
    item = Item("t", "uint8", (4,), "param", Bytes(bytes([step] * 4)), None, True)
    tree = encode_tree({"t": Leaf("tensor", (0,))})
    return attempt.save(SaveRequest(SaveInfo(step=step, metrics={"loss": loss}), tree=tree, items=[item])).id


def steps(history: History) -> list[int]:
    """Return the steps in the order in which a restore tries them."""
    return [checkpoint.step for checkpoint in candidates(history)]


def test_a_checkpoint_after_a_rollback_is_not_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints after the rollback's step come last. A later save becomes the latest, at any step."""
    store = MemoryStore()
    attempt = Attempt.begin(store, RUN)
    for step in (10, 20, 30, 40):
        save(attempt, step, loss=1.0 / step)
    monkeypatch.setenv(BEFORE, "25")
    monkeypatch.setenv(SKIP, "25-26")
    apply_requested_rollback(store, RUN, SINGLE_RANK)
    history = attempt.history()
    assert steps(history) == [20, 10, 30, 40] and history.skips == [(25, 26)]
    assert (
        resolve(history, "latest").step == 20
        and resolve(history, "best").step == 20
        and resolve(history, 30).step == 30
    )
    apply_requested_rollback(store, RUN, SINGLE_RANK)  # the note is written once
    assert len(attempt.history().notes) == 1
    save(attempt, 24)
    save(attempt, 30)
    assert steps(attempt.history()) == [30, 24, 20, 10, 30, 40]


def test_a_fresh_run_may_skip_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with a first loss of NaN has no checkpoint, and skips steps all the same."""
    store = MemoryStore()
    monkeypatch.setenv(BEFORE, "3")
    monkeypatch.setenv(SKIP, "3-3")
    apply_requested_rollback(store, RUN, SINGLE_RANK)
    history = Attempt.begin(store, RUN).history()
    assert history.skips == [(3, 3)] and not history.live


@pytest.mark.parametrize(
    ("before", "skip"),
    [(None, None), ("25", "x-y"), (True, "1-2-3"), (2.5, 7), (-(10**30), "9" * 40), ("", "-")],
    ids=str,
)
def test_an_invalid_note_is_ignored(before: object, skip: object) -> None:
    """An invalid note rolls nothing back and skips no step."""
    attempt = Attempt.begin(MemoryStore(), RUN)
    save(attempt, 10)
    fits = not isinstance(before, int) or abs(before) < 2**53
    data = {"before": before, "skip": skip} if fits else {"skip": skip}
    attempt.note(NoteBody(topic=ROLLED_BACK.name, data=data))  # type: ignore[arg-type]
    history = attempt.history()
    assert not history.skips and not history.rolled_back_ids


def test_further_tiers_are_rolled_back_too() -> None:
    """Copies of the same checkpoints in further tiers are rolled back with them."""
    near, far = Attempt.begin(MemoryStore(), RUN), Attempt.begin(MemoryStore(), RUN)
    for step in (10, 20, 30):
        save(near, step)
    near.note(ROLLED_BACK.note(RollbackNote(before=20, skip="20-20")))
    save(far, 5)
    merged = merge([near.history(), far.history()]).history
    assert steps(merged)[-2:] == [20, 30] and merged.skips == [(20, 20)] and len(merged.rolled_back_ids) == 2


def test_learning_rates_are_lowered_once_for_each_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The factors apply to checkpoints before a rollback, not to later ones. Invalid factors are ignored."""
    store = MemoryStore()
    attempt = Attempt.begin(store, RUN)
    first = save(attempt, 10)
    for cut in ("0.5", "", "0.1"):
        monkeypatch.setenv(BEFORE, "20")
        monkeypatch.setenv(CUT, cut)
        apply_requested_rollback(store, RUN, SINGLE_RANK)
        second = save(attempt, 15)
    attempt.note(NoteBody(topic=ROLLED_BACK.name, data={"before": 20, "skip": "", "lr": "much"}))
    attempt.note(ROLLED_BACK.note(RollbackNote(before=20, lr=7.0)))
    third = save(attempt, 16)
    cuts = attempt.history().lr_factors
    assert cuts[first] == cuts[""] == pytest.approx(0.05) and second not in cuts and third not in cuts


Made = tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]


def rates_after(made: Callable[[float], Made], cut_at: int, rate: float, factor: float) -> list[float]:
    """Return the learning rates of the steps after ``cut_at``, of ten steps at that rate."""
    optimizer, scheduler = made(rate)
    seen = []
    for step in range(10):
        optimizer.step()
        scheduler.step()
        if step == cut_at:
            scale_learning_rates({"optimizer": optimizer, "scheduler": scheduler, "other": 3}, factor)
        seen.append(optimizer.param_groups[0]["lr"])
    return seen[cut_at + 1 :]


def test_optimizers_and_schedulers_continue_with_lower_rates() -> None:
    """The rate is lower at once and in all later steps, as if it had been lower from the start."""

    def made(rate: float) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], rate)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    assert rates_after(made, 4, 0.4, 0.25) == pytest.approx(rates_after(made, 4, 0.1, 1.0))


@pytest.mark.parametrize("kind", ["SequentialLR", "ChainedScheduler", "CyclicLR"])
def test_schedulers_of_schedulers_continue_with_lower_rates(kind: str) -> None:
    """Inner schedulers are scaled, too. Otherwise the next step would compute the old rate again."""
    schedulers = torch.optim.lr_scheduler

    def made(rate: float) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], rate, momentum=0.9)
        if kind == "CyclicLR":
            return optimizer, schedulers.CyclicLR(optimizer, rate, 10 * rate, step_size_up=5)
        inner = [
            schedulers.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3)),
            schedulers.CosineAnnealingLR(optimizer, 20),
        ]
        if kind == "ChainedScheduler":
            return optimizer, schedulers.ChainedScheduler([inner[0]], optimizer)
        return optimizer, schedulers.SequentialLR(optimizer, inner, [3])

    assert rates_after(made, 1, 0.4, 0.25) == pytest.approx(rates_after(made, 1, 0.1, 1.0))


def test_rates_that_were_not_restored_are_not_lowered_again(tmp_path: Path) -> None:
    """Restoring only the weights of an older checkpoint does not lower restored rates a second time."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.4)
    with relight.Checkpointer(
        tmp_path / "run", model=model, optimizer=optimizer, background=False, signals=False
    ) as ckpt:
        ckpt.save(10, tag="kept")
    Attempt.begin(open_bytes(str(tmp_path)), "run").note(ROLLED_BACK.note(RollbackNote(before=20, lr=0.5)))
    with relight.Checkpointer(
        tmp_path / "run", model=model, optimizer=optimizer, background=False, signals=False
    ) as ckpt:
        for only, rate in ((None, 0.2), (["model/*"], 0.2), (["optimizer/*"], 0.2), (None, 0.2)):
            ckpt.restore("kept", only=only)
            assert optimizer.param_groups[0]["lr"] == pytest.approx(rate), only
