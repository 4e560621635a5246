"""One checkpoint of several ranks: it is complete or absent, also if ranks die, fail or are late."""

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
from relight.reader import open_checkpoint
from relight.save_reason import ASKED
from relight.store import LocalStore


class Died(BaseException):
    """A rank's death."""


@pytest.fixture(params=[2, 5])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Ranks:
    return Ranks(tmp_path, request.param)


def test_all_ranks_make_one_checkpoint(ranks: Ranks) -> None:
    """One record, one root with rank 0's metadata, every part.

    Each rank gets the same result. No helper file is left.
    """
    for step in range(3):
        results = ranks.save(step)
        assert all(isinstance(result, SaveReport) for result in results), results
        assert len({(result.id, result.seq, result.stored_bytes) for result in results}) == 1
    assert len(ranks.committed()) == 3
    ranks.check()
    view = ranks.attempt.view()
    opened = open_checkpoint(
        ranks.attempt.store, "run", fold(view).live[-1], store_id=view.store_id, run_id=view.run_id
    )
    assert opened.root.world == ranks.world and opened.root.metrics == {"rank": 0}
    assert not [name for name in ranks.files() if name.startswith(("ready", "draft", "failed", ".tmp"))]
    assert not list(ranks.folder.glob(f"run/0*-e*/{READY_DIR}"))


def test_a_part_without_trained_tensors_reports_no_unchanged_model(ranks: Ranks) -> None:
    """If a rank's share has only moments, the model is not reported as unchanged."""
    assert {result.trainable_digest for result in ranks.save()} == {b""}
    components = {"model": torch.nn.Linear(2, 2)}
    stale = StaleModelCheck(components, ComponentWatch(components, reports=False))
    before = counters["save.stale"]
    for step in range(3):
        save = Save(step, ASKED)
        stale.compare(save, step - 1, b"", 100)
    assert counters["save.stale"] == before


def test_a_missing_rank_is_named_and_nothing_is_committed(ranks: Ranks) -> None:
    """Ranks wait for a missing rank until the timeout, and name it. Only the void root of their save remains."""
    late = ranks.world - 1

    def stays_away(rank: int) -> None:
        if rank == late:
            raise Died

    started = time.monotonic()
    results = ranks.save(timeout_s=0.5, before=stays_away)
    assert time.monotonic() - started < 5
    waited = [result for result in results if not isinstance(result, Died)]
    assert all(isinstance(failure, (RankTimeout, OthersFailed)) for failure in waited), results
    assert [failure.ranks for failure in waited if isinstance(failure, RankTimeout)][0] == (late,)
    assert all(f"rank {late} was not there" in failure.what for failure in waited), results
    assert ranks.committed() == []
    assert ranks.files() == ["root.json"]
    assert (next(ranks.folder.glob("run/0*-e*/root.json"))).read_bytes().startswith(multi_rank.VOID)
    assert isinstance(ranks.save(1)[0], SaveReport), "the next save is made"


def test_a_rank_that_is_too_late_saves_nothing(ranks: Ranks) -> None:
    """A late rank saves nothing, neither alone nor with the ranks that gave up."""
    results = ranks.save(timeout_s=0.3, before=lambda rank: time.sleep(1.5) if rank == 0 else None)
    assert all(isinstance(result, RelightError) for result in results)
    assert ranks.committed() == [] and not [
        name for name in ranks.files() if name.startswith(("pack", "part", "ready"))
    ]


def test_a_rank_without_room_stops_the_others_at_once(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks do not wait for the deadline. Their error names the rank and the cause."""
    usual = multi_rank.write_part

    def write(place: CommitTarget, request: SaveRequest, *rest: Any) -> Any:
        if request.seat is not None and request.seat.rank == 1:
            raise NoSpace("the disk is full")
        return usual(place, request, *rest)

    monkeypatch.setattr(multi_rank, "write_part", write)
    started = time.monotonic()
    results = ranks.save(timeout_s=30)
    assert time.monotonic() - started < 10
    assert isinstance(results[1], NoSpace)
    for rank, result in enumerate(results):
        assert rank == 1 or (isinstance(result, OthersFailed) and "rank 1 could not save" in result.what), results
    assert ranks.committed() == [] and not [
        name for name in ranks.files() if name.startswith(("pack", "part", "ready"))
    ]


def test_space_is_freed_on_a_full_disk_to_publish_the_failure(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk not even an empty file can be made.

    The rank deletes its packs first and then reports the failure.
    """

    class Full(LocalStore):
        def put_once(self, key: str, data: bytes) -> bool:
            self.fail_if_full()
            return super().put_once(key, data)

        def fail_if_full(self) -> None:
            if full and "pack-00001-000.safetensors" in ranks.files():
                raise NoSpace("the disk is full")

    full: list[int] = []
    usual = multi_rank.write_part

    def write(place: CommitTarget, request: SaveRequest, *rest: Any) -> Any:
        written = usual(place, request, *rest)
        if request.seat is not None and request.seat.rank == 1:
            full.append(1)
            raise NoSpace("the disk is full")
        return written

    monkeypatch.setattr(multi_rank, "write_part", write)
    ranks.places = [place._replace(store=Full(str(ranks.folder))) for place in ranks.places]
    started = time.monotonic()
    results = ranks.save(timeout_s=30)
    assert time.monotonic() - started < 10
    assert isinstance(results[1], NoSpace)
    assert all(
        rank == 1 or (isinstance(result, OthersFailed) and "rank 1" in result.what)
        for rank, result in enumerate(results)
    ), results
    assert not [name for name in ranks.files() if name.startswith(("pack", "part", "ready"))]


@pytest.mark.parametrize("death", ["before the root", "after the root"])
def test_the_committing_rank_may_die(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, death: str) -> None:
    """If the committing rank dies, another rank commits."""
    dead: list[int] = []
    complete, append = multi_rank._complete, multi_rank._append

    def dying(usual: Callable[..., Any]) -> Callable[..., Any]:
        def work(*args: Any) -> Any:
            seat = next((arg for arg in args if isinstance(arg, Participant)), None)
            names = ranks.files()
            all_ready = sum(name.startswith("ready") for name in names) == ranks.world
            if all_ready and not dead:
                dead.append(seat.rank if seat else threading.get_ident())
                raise Died
            return usual(*args)

        return work

    monkeypatch.setattr(multi_rank, "_give_up", lambda *args: None)  # a dead rank does nothing
    if death == "before the root":
        monkeypatch.setattr(multi_rank, "_complete", dying(complete))
    else:
        monkeypatch.setattr(multi_rank, "_append", dying(append))
    results = ranks.save()
    assert sum(isinstance(result, Died) for result in results) == 1
    assert sum(isinstance(result, SaveReport) for result in results) == ranks.world - 1, results
    assert len(ranks.committed()) == 1
    ranks.check()


def test_a_superseded_attempt_commits_nothing(ranks: Ranks) -> None:
    """A superseded attempt commits nothing, even with complete parts."""
    Attempt.begin(LocalStore(str(ranks.folder)), "run")
    results = ranks.save()
    assert all(isinstance(result, (Fenced, OthersFailed)) for result in results) and any(
        isinstance(result, Fenced) for result in results
    ), results
    assert ranks.committed() == []


@pytest.mark.parametrize("seed", range(6))
def test_giving_up_and_completing_never_both_happen(tmp_path: Path, seed: int) -> None:
    """Ranks that arrive at the deadline of the others: what is committed is complete, and no rank gets another result."""
    rng = random.Random(seed)
    ranks = Ranks(tmp_path, 3)
    outcomes = {"saved": 0, "given up": 0}
    for step in range(12):
        delays = [rng.random() * 0.12 for _ in range(3)]
        results = ranks.save(step, timeout_s=0.04 + rng.random() * 0.08, before=lambda rank: time.sleep(delays[rank]))
        is_committed = f"{step:010d}" in ranks.committed()
        assert is_committed or not any(isinstance(result, SaveReport) for result in results), results
        assert not is_committed or all(isinstance(result, SaveReport) for result in results), results
        outcomes["saved" if is_committed else "given up"] += 1
    ranks.check()
    assert all(outcomes.values()), outcomes
