"""Several ranks, one checkpoint: complete or not there, whoever dies, fails, or comes too late."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import Ranks

from relight.catalog import open_checkpoint
from relight.checkpointer.component_watch import ComponentWatch
from relight.checkpointer.save_handle import Save
from relight.checkpointer.stale_model_check import StaleModelCheck
from relight.comm import RankTimeout
from relight.commit import Attempt, SaveReport, SaveRequest, multi_rank
from relight.commit.multi_rank import OthersFailed
from relight.commit.save import CommitTarget, Participant
from relight.errors import Fenced, NoSpace, RelightError
from relight.format.names import READY_DIR
from relight.log import fold
from relight.observe import counters
from relight.save_reason import ASKED
from relight.store import LocalStore


class Died(BaseException):
    """A rank's death."""


@pytest.fixture(params=[2, 5])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Ranks:
    return Ranks(tmp_path, request.param)


def test_all_of_them_make_one_checkpoint(ranks: Ranks) -> None:
    """One record, one root with rank 0's words, every part; each rank is told the same; no helper's file is left."""
    for step in range(3):
        found = ranks.save(step)
        assert all(isinstance(one, SaveReport) for one in found), found
        assert len({(one.id, one.seq, one.stored_bytes) for one in found}) == 1
    assert len(ranks.committed()) == 3
    ranks.check()
    view = ranks.attempt.view()
    opened = open_checkpoint(ranks.attempt.store, "run", fold(view).live[-1], store_id=view.store_id, run_id=view.run_id)
    assert opened.root.world == ranks.world and opened.root.metrics == {"rank": 0}
    assert not [name for name in ranks.files() if name.startswith(("ready", "draft", "failed", ".tmp"))]
    assert not list(ranks.folder.glob(f"run/0*-e*/{READY_DIR}"))


def test_a_part_without_trained_tensors_tells_nothing_of_them(ranks: Ranks) -> None:
    """A rank's share may hold moments alone: that is not a model that does not change."""
    assert {one.trainable_digest for one in ranks.save()} == {b""}
    components = {"model": torch.nn.Linear(2, 2)}
    stale = StaleModelCheck(components, ComponentWatch(components, reports=False))
    before = counters["save.stale"]
    for step in range(3):
        save = Save(step, ASKED)
        stale.notice(save, step - 1, b"", 100)
    assert counters["save.stale"] == before


def test_who_does_not_come_is_named_and_nothing_shows(ranks: Ranks) -> None:
    """The others wait so long, and no longer; then all that they wrote is gone but the void root."""
    late = ranks.world - 1

    def stays_away(rank: int) -> None:
        if rank == late:
            raise Died

    started = time.monotonic()
    found = ranks.save(timeout_s=0.5, before=stays_away)
    assert time.monotonic() - started < 5
    waited = [one for one in found if not isinstance(one, Died)]
    assert all(isinstance(one, (RankTimeout, OthersFailed)) for one in waited), found
    assert [one.ranks for one in waited if isinstance(one, RankTimeout)][0] == (late,)
    assert all(f"rank {late} was not there" in one.what for one in waited), found
    assert ranks.committed() == []
    assert ranks.files() == ["root.json"]
    assert (next(ranks.folder.glob("run/0*-e*/root.json"))).read_bytes().startswith(multi_rank.VOID)
    assert isinstance(ranks.save(1)[0], SaveReport), "the next save is made"


def test_one_that_comes_too_late_saves_nothing(ranks: Ranks) -> None:
    """Neither alone nor with those who have gone."""
    found = ranks.save(timeout_s=0.3, before=lambda rank: time.sleep(1.5) if rank == 0 else None)
    assert all(isinstance(one, RelightError) for one in found)
    assert ranks.committed() == [] and not [name for name in ranks.files() if name.startswith(("pack", "part", "ready"))]


def test_a_rank_without_room_stops_the_others_at_once(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not wait for the deadline, and say which rank it was and why."""
    usual = multi_rank.write_part

    def write(place: CommitTarget, request: SaveRequest, *rest: Any) -> Any:
        if request.seat is not None and request.seat.rank == 1:
            raise NoSpace("the disk is full")
        return usual(place, request, *rest)

    monkeypatch.setattr(multi_rank, "write_part", write)
    started = time.monotonic()
    found = ranks.save(timeout_s=30)
    assert time.monotonic() - started < 10
    assert isinstance(found[1], NoSpace)
    for rank, one in enumerate(found):
        assert rank == 1 or (isinstance(one, OthersFailed) and "rank 1 could not save" in one.what), found
    assert ranks.committed() == [] and not [name for name in ranks.files() if name.startswith(("pack", "part", "ready"))]


def test_a_full_disk_is_made_room_on_to_say_so(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even an empty file can be made while the packs of the rank that found it full are there: it takes them back, then says so."""

    class Full(LocalStore):
        def put_once(self, key: str, data: bytes) -> bool:
            self.look()
            return super().put_once(key, data)

        def look(self) -> None:
            if full and "pack-00001-000.safetensors" in ranks.files():
                raise NoSpace("the disk is full")

    full: list[int] = []
    usual = multi_rank.write_part

    def write(place: CommitTarget, request: SaveRequest, *rest: Any) -> Any:
        found = usual(place, request, *rest)
        if request.seat is not None and request.seat.rank == 1:
            full.append(1)
            raise NoSpace("the disk is full")
        return found

    monkeypatch.setattr(multi_rank, "write_part", write)
    ranks.places = [place._replace(store=Full(str(ranks.folder))) for place in ranks.places]
    started = time.monotonic()
    found = ranks.save(timeout_s=30)
    assert time.monotonic() - started < 10
    assert isinstance(found[1], NoSpace)
    assert all(rank == 1 or (isinstance(one, OthersFailed) and "rank 1" in one.what) for rank, one in enumerate(found)), found
    assert not [name for name in ranks.files() if name.startswith(("pack", "part", "ready"))]


@pytest.mark.parametrize("death", ["before the root", "behind the root"])
def test_the_one_that_should_have_committed_may_die(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, death: str) -> None:
    """Somebody else does."""
    dead: list[int] = []
    complete, append = multi_rank._complete, multi_rank._append

    def dying(usual: Callable[..., Any]) -> Callable[..., Any]:
        def work(*args: Any) -> Any:
            seat = next((one for one in args if isinstance(one, Participant)), None)
            names = ranks.files()
            all_ready = sum(name.startswith("ready") for name in names) == ranks.world
            if all_ready and not dead:
                dead.append(seat.rank if seat else threading.get_ident())
                raise Died
            return usual(*args)

        return work

    monkeypatch.setattr(multi_rank, "_give_up", lambda *args: None)  # the dead do nothing
    if death == "before the root":
        monkeypatch.setattr(multi_rank, "_complete", dying(complete))
    else:
        monkeypatch.setattr(multi_rank, "_append", dying(append))
    found = ranks.save()
    assert sum(isinstance(one, Died) for one in found) == 1
    assert sum(isinstance(one, SaveReport) for one in found) == ranks.world - 1, found
    assert len(ranks.committed()) == 1
    ranks.check()


def test_a_superseded_attempt_commits_nothing(ranks: Ranks) -> None:
    """However complete its parts are."""
    Attempt.begin(LocalStore(str(ranks.folder)), "run")
    found = ranks.save()
    assert all(isinstance(one, (Fenced, OthersFailed)) for one in found) and any(isinstance(one, Fenced) for one in found), found
    assert ranks.committed() == []


@pytest.mark.parametrize("seed", range(6))
def test_giving_up_and_completing_never_both_happen(tmp_path: Path, seed: int) -> None:
    """Ranks that come about when the others' patience ends: whatever is committed is whole, and nobody is told otherwise of it."""
    rng = random.Random(seed)
    ranks = Ranks(tmp_path, 3)
    outcomes = {"saved": 0, "given up": 0}
    for step in range(12):
        delays = [rng.random() * 0.12 for _ in range(3)]
        found = ranks.save(step, timeout_s=0.04 + rng.random() * 0.08, before=lambda rank: time.sleep(delays[rank]))
        there = f"{step:010d}" in ranks.committed()
        assert there or not any(isinstance(one, SaveReport) for one in found), found
        assert not there or all(isinstance(one, SaveReport) for one in found), found
        outcomes["saved" if there else "given up"] += 1
    ranks.check()
    assert all(outcomes.values()), outcomes
