"""Every rank writes its part: calls of the Checkpointer on ranks that are threads, with errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import relight
from relight.checkpointer import background, boundary, session
from relight.checkpointer.signals import SignalHandlers
from relight.checkpointer.slot_copy_plan import SlotCopyPlan
from relight.comm import SingleProcess, ThreadGroup
from relight.errors import ConfigError, RelightError
from relight.ranks.several import SeveralRanks
from relight.snapshot import Snapshot

SOON_S = 10.0
"""Seconds within which no rank can have waited for the deadline."""
Run = Callable[..., list[Any]]


@pytest.fixture
def on_ranks(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs an action on several ranks, in threads with one process group."""
    local = threading.local()
    monkeypatch.setattr(session, "find_world", lambda timeout_s: getattr(local, "world", SingleProcess()))
    monkeypatch.setattr(boundary, "FREE_S", 1.0)

    def run(size: int, action: Callable[[int], Any], timeout_s: float = 60.0) -> list[Any]:
        def one(world: ThreadGroup) -> Any:
            local.world = world
            return action(world.rank)

        return ThreadGroup.run(size, one, timeout_s)

    return run


def make(path: Path, **options: Any) -> relight.Checkpointer:
    """Make a Checkpointer with an equal model on all ranks and a generator of each rank."""
    model = torch.nn.Linear(300, 300)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(2.0)
    options = {"save": None, "signals": False, "background": False, "limits": relight.Limits(deadline_s=60), **options}
    return relight.Checkpointer(path / "store" / "run", model=model, draws=torch.Generator(), **options)


def test_a_boundary_is_consistent_after_a_save_too(tmp_path: Path, on_ranks: Run) -> None:
    """Ranks compare what they have in common at each save, and all they have at each step's end: neither forgets for
    the other."""

    def rank(number: int) -> list[bool]:
        consistent = []
        with make(tmp_path, save=relight.every(steps=2)) as ckpt:
            assert ckpt.restore() == 0
            for step in range(5):
                ckpt.step(step)
                consistent.append(ckpt._capture.boundary.consistent() is not None)
        return consistent

    assert on_ranks(2, rank) == [[True] * 5] * 2


def test_a_micro_step_is_refused_at_once(tmp_path: Path, on_ranks: Run) -> None:
    """The error comes at the call, and not with the first save hours later."""

    def rank(number: int) -> None:
        with make(tmp_path) as ckpt:
            ckpt.restore()
            for call in (ckpt.step, ckpt.save):
                with pytest.raises(ConfigError, match="one process's gradients"):
                    call(0, micro_step=1)

    on_ranks(2, rank)


def test_ranks_that_have_lost_each_other_end_when_they_are_asked_to(
    tmp_path: Path, on_ranks: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without agreement no save is possible, so no rank waits for one."""
    ended: list[str | None] = []
    monkeypatch.setattr(SignalHandlers, "end", lambda self: ended.append(self.pending))

    def rank(number: int) -> None:
        ckpt = make(tmp_path, signals=True)
        ckpt.restore()
        ckpt.step(0)
        assert isinstance(ckpt._session.ranks, SeveralRanks) and ckpt._signals is not None
        ckpt._session.ranks._lost = True
        ckpt._signals.adopt("SIGTERM")
        ckpt.step(1)

    on_ranks(2, rank)
    assert ended == ["SIGTERM"] * 2


@pytest.mark.parametrize("how", ["an error", "touched"])
def test_no_rank_waits_for_a_part_that_fails_in_the_trainer(
    tmp_path: Path, on_ranks: Run, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one rank cannot copy its state, or training changed it meanwhile, all ranks get the error."""
    local, copy_now, begin = threading.local(), SlotCopyPlan.copy_now, Snapshot.__init__

    def broken(self: SlotCopyPlan, *arguments: Any) -> None:
        if getattr(local, "fails", False):
            raise RuntimeError("cannot be read")
        copy_now(self, *arguments)

    def touched(
        self: Snapshot, marks: Any, base: int, on_complete: Callable[[list[str]], None], on_copied: Any = None
    ) -> None:
        fails = getattr(local, "fails", False)
        begin(self, marks, base, (lambda found: on_complete(["model/weight"])) if fails else on_complete, on_copied)

    if how == "touched":
        monkeypatch.setattr(background, "Snapshot", type("Touched", (Snapshot,), {"__init__": touched}))
    else:
        monkeypatch.setattr(SlotCopyPlan, "copy_now", broken)

    def rank(number: int) -> float:
        with make(tmp_path, background=True) as ckpt:
            ckpt.restore()
            assert ckpt.save(0).done
            local.fails = number == 1
            before = time.monotonic()
            save = ckpt.save(1)
            took = time.monotonic() - before
            assert save.error is not None and not save.done
            local.fails = False
            assert ckpt.save(2).done
        return took

    assert max(on_ranks(2, rank)) < SOON_S
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "store" / "run").checkpoints()] == [0, 2]


class Picky:
    """A component that fails to load its state if ``refuses``."""

    def __init__(self, refuses: bool) -> None:
        self._refuses = refuses

    def state_dict(self) -> dict[str, int]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self._refuses:
            raise ZeroDivisionError("its own")


def test_a_component_that_fails_on_one_rank_fails_on_all(tmp_path: Path, on_ranks: Run) -> None:
    """With another number of ranks, generators are compared after the restore. No rank waits there for a failed one."""

    def save(number: int) -> None:
        with make(tmp_path, state={"picky": Picky(False)}) as ckpt:
            ckpt.restore()
            ckpt.save(0)

    def restore(number: int) -> tuple[str, float]:
        ckpt = make(tmp_path, state={"picky": Picky(number == 1)})
        before = time.monotonic()
        with pytest.raises((RelightError, ZeroDivisionError)) as raised:
            ckpt.restore()
        return str(raised.value), time.monotonic() - before

    on_ranks(3, save)
    (first, took), (second, _) = on_ranks(2, restore)
    assert first.startswith("rank 1: ") and "its own" in first and "its own" in second
    assert took < SOON_S
