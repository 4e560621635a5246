"""Handover: which rank saves a dead rank's state, and what is saved. The ranks are in one process, with heartbeat pages
in a directory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replace_struct

import relight.checkpointer.handover as heir
from relight.capture import CaptureCache, Captured, capture
from relight.checkpointer.boundary import Boundary
from relight.checkpointer.handover import Handover
from relight.checkpointer.pre_update_state import AHEAD_S, OFTEN, PreUpdateState
from relight.comm import RankTimeout
from relight.commit import Attempt, CommitTarget, SaveInfo, SaveReport, SaveRequest
from relight.commit.multi_rank import save_multi_rank
from relight.commit.save import Participant
from relight.format import encode_tree
from relight.heartbeat import HeartbeatWriter, RankStateWriter, lost_of, make_rank_state, rank_state_path
from relight.heartbeat.heartbeat_page import make_page
from relight.layout import Bytes
from relight.ranks.several import SeveralRanks
from relight.save_reason import SaveReason
from relight.store import open_bytes

STEP = 5


class Rank:
    """A rank with its components, its boundary, and its side of a handover."""

    def __init__(
        self, number: int, world: int, folder: Path, monkeypatch: pytest.MonkeyPatch, run: str, **more: object
    ) -> None:
        self.teller = HeartbeatWriter(str(folder / f"heartbeat-{number}"))
        self._monkeypatch = monkeypatch
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 3)
        components = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), **more}
        ranks = SeveralRanks(SimpleNamespace(rank=number, size=world), ("mine",) if "mine" in more else (), 5.0)  # type: ignore[arg-type]
        ranks._shared = SimpleNamespace(whole=True)  # type: ignore[assignment]
        common = capture(ranks.split(components)[0], rng=False)
        ranks._own_table(common)
        ranks.seat = Participant(number, world, "0" * 16, 5.0)
        self._here()
        self.components = components
        self.heirs = Handover(ranks, components, run)
        self.boundary = Boundary(components, CaptureCache(), self.heirs.published_state)

    def _here(self) -> None:
        self._monkeypatch.setattr(heir, "heartbeat", lambda: self.teller)

    def ends(self, step: int) -> None:
        """End a step."""
        self._here()
        self.boundary.remember(step)

    def updates(self) -> None:
        """Begin the update of a step."""
        self._here()
        self.heirs._update_begins()

    def hand_over(self, attempt: Attempt) -> bool:
        """Save the last step for all ranks, with the dead rank's published state."""
        self._here()
        return self.heirs.hand_over(RuntimeError("lost"), self.boundary, attempt.place, _request, [])


def _request(
    state: Captured, step: int, reason: SaveReason, metrics: Mapping[str, float], micro_step: int | None
) -> SaveRequest:
    return SaveRequest(
        SaveInfo(step=step, reason=reason, components=state.kinds), tree=encode_tree(state.tree), items=state.items
    )


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Rank]]:
    """Return a factory of ranks with additional components."""

    def made(world: int, run: str = "run", **more: object) -> list[Rank]:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(world))
        for number in range(world):
            make_page(tmp_path / f"heartbeat-{number}")
            for ahead in (False, True):
                make_rank_state(rank_state_path(tmp_path / "heartbeat-0", number, ahead))
        return [Rank(number, world, tmp_path, monkeypatch, run, **more) for number in range(world)]

    return made


def test_a_rank_that_cannot_save_leaves_the_save_to_the_next(
    ranks: Callable[..., list[Rank]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leave the save to the next rank if the first one cannot read its state, because its device has failed."""
    first, second, dead = ranks(3)
    for rank in (first, second, dead):
        rank.ends(STEP)
    attempt = Attempt.begin(open_bytes(tmp_path / "store"), "run")
    saves = save_multi_rank

    class Broken(Bytes):
        def view(self) -> Any:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def broken(place: CommitTarget, request: SaveRequest) -> SaveReport:
        return saves(
            place,
            replace(
                request,
                items=[replace_struct(item, source=Broken(bytes(item.source.length))) for item in request.items],
            ),
        )

    monkeypatch.setattr(heir, "save_multi_rank", broken)
    assert not first.hand_over(attempt)
    monkeypatch.setattr(heir, "save_multi_rank", saves)
    assert second.hand_over(attempt)
    assert [checkpoint.step for checkpoint in attempt.history().live] == [STEP]
    assert not first.hand_over(attempt), "already saved"


def test_a_survivor_without_threads_leaves_the_save_to_the_next_at_once(
    ranks: Callable[..., list[Rank]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the system refuses a thread for one part, no other part waits for it until the deadline, and nothing is left of
    the save. The next survivor saves."""
    first, second, dead = ranks(3)
    for rank in (first, second, dead):
        rank.ends(STEP)
        rank.heirs._ranks.seat = Participant(rank.heirs._ranks.seat.rank, 3, "0" * 16, 60.0)
    attempt = Attempt.begin(open_bytes(tmp_path / "store"), "run")
    start, begins = threading.Thread.start, time.monotonic()

    def refused(self: threading.Thread) -> None:
        if self.name == "relight-heir_1":
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        assert not first.hand_over(attempt)
    assert time.monotonic() - begins < 20 and not attempt.history().live
    assert second.hand_over(attempt)
    assert [checkpoint.step for checkpoint in attempt.history().live] == [STEP]


@pytest.mark.parametrize(("run", "alike"), [("run", False), ("other", True)])
def test_rank_states_of_another_checkpointer_are_not_used(
    ranks: Callable[..., list[Rank]], tmp_path: Path, run: str, alike: bool
) -> None:
    """Ignore the rank state of a second Checkpointer in the same process. Its checkpoint is for another run, or is not
    made."""
    more = {"generator": torch.Generator()}
    first, second = ranks(2, **more), ranks(2, run, **(more if alike else {}))
    for rank in (*first, *second):
        rank.ends(STEP)
    attempt = Attempt.begin(open_bytes(tmp_path / "store"), "run")
    assert not first[0].hand_over(attempt) and not attempt.history().live
    assert second[0].hand_over(attempt)


def test_tensors_added_after_the_comparison_are_not_taken_for_replicas(
    ranks: Callable[..., list[Rank]], tmp_path: Path
) -> None:
    """Save nothing if state was added after the ranks compared their states before the first step. Optimizer state may
    be sharded, and the dead rank's shard would be lost."""
    living, dead = ranks(2)
    model, optimizer = living.components["model"], living.components["optimizer"]
    assert isinstance(model, torch.nn.Module) and isinstance(optimizer, torch.optim.Optimizer)
    optimizer.param_groups[0]["momentum"] = 0.9
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for rank in (living, dead):
        rank.ends(STEP)
    attempt = Attempt.begin(open_bytes(tmp_path / "store"), "run")
    assert not living.hand_over(attempt) and not attempt.history().live


def test_a_rank_state_that_became_large_is_not_left_out(ranks: Callable[..., list[Rank]], tmp_path: Path) -> None:
    """Save nothing if a rank's own value has become a tensor. It is not in the published rank state, and a checkpoint
    without it is incomplete."""
    living, dead = ranks(2, mine=3)
    for rank in (living, dead):
        rank.components["mine"] = torch.zeros(3)
        rank.ends(STEP)
    attempt = Attempt.begin(open_bytes(tmp_path / "store"), "run")
    assert not living.hand_over(attempt) and not attempt.history().live


@pytest.mark.parametrize(
    ("alike", "drawn", "taken"), [(3, "", True), (2, "", False), (9, "by it", False), (9, "by both", False)]
)
def test_the_rank_state_before_an_update_counts_if_it_always_equalled_the_one_at_the_end(
    ranks: Callable[..., list[Rank]], tmp_path: Path, alike: int, drawn: str, taken: bool
) -> None:
    """A rank dies in its update, and the other one ends the step. The state published before the update counts only if
    it has always equalled the state at the step's end. One random draw in between, or one by the survivor, disqualifies
    it."""
    living, dead = ranks(2, mine=torch.Generator())
    dead.components["mine"] = torch.Generator()
    for step in range(alike + 1):
        for rank in (living, dead):
            generator = rank.components["mine"]
            assert isinstance(generator, torch.Generator)
            if step:
                torch.rand(2, generator=generator)
                rank.updates()
            if step == 5 and drawn == "by it" and rank is dead:
                torch.rand(2, generator=generator)
            rank.ends(step)
    for rank in (living, dead):
        generator = rank.components["mine"]
        assert isinstance(generator, torch.Generator)
        torch.rand(3, generator=generator)
        rank.updates()
    if drawn == "by both":
        torch.rand(2, generator=living.components["mine"])  # type: ignore[call-overload]
    living.ends(alike + 1)
    attempt = Attempt.begin(open_bytes(tmp_path / "store"), "run")
    assert living.hand_over(attempt) is taken
    assert [checkpoint.step for checkpoint in attempt.history().live] == [alike + 1] * taken


def test_a_rank_that_learns_of_a_failure_ends_its_step_and_hands_it_over(
    ranks: Callable[..., list[Rank]], tmp_path: Path
) -> None:
    """End the step and hand it over if another rank has failed. The rank learns of it at the step's end, because its
    next exchange may be far."""
    living, dead = ranks(2)
    for rank in (living, dead):
        rank.ends(STEP - 1)
    dead.ends(STEP)
    lost_of(tmp_path / "heartbeat-0").touch()
    with pytest.raises(RankTimeout, match="another rank has failed"):
        living.ends(STEP)
    attempt = Attempt.begin(open_bytes(tmp_path / "store"), "run")
    assert living.hand_over(attempt)
    assert [checkpoint.step for checkpoint in attempt.history().live] == [STEP]


def test_publishing_that_is_slow_is_abandoned_by_its_fastest_time(tmp_path: Path) -> None:
    """Stop publishing before the update if it is always slow. A machine that is busy now and then is no reason."""
    make_rank_state(tmp_path / "ahead-0")
    state = PreUpdateState()
    state.will = RankStateWriter(tmp_path / "ahead-0")
    for seconds in [20 * AHEAD_S, AHEAD_S / 2, *[20 * AHEAD_S] * (OFTEN - 1)]:
        state.took(seconds)
    assert state.will is not None
    state.took(20 * AHEAD_S)
    assert state.will is None
