"""If ranks have different results, or fail between two exchanges, all ranks raise, and none waits for a rank that has
left."""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import relight
from relight.comm import RankTimeout, ThreadGroup, find_world
from relight.errors import CheckpointNotFound, CorruptCheckpoint, RelightError, SaveFailed, StoreUnavailable
from relight.ranks.collective_errors import raise_on_all_ranks
from relight.ranks.one_writer import OneWriter
from relight.ranks.several import SeveralRanks
from relight.restore import from_rank_0
from relight.restore.execute import restore_first_good
from relight.restore.request import RestoreRequest
from relight.store import LocalStore
from relight.store.base import Reader
from relight.store.wrapper import StoreWrapper


def outcomes(size: int, action: Any) -> list[Any]:
    """Return the result or the error of ``action(ranks)`` on each rank."""

    def one(world: ThreadGroup) -> Any:
        try:
            return action(SeveralRanks(world, (), 20.0))
        except Exception as error:
            return error

    return ThreadGroup.run(size, one, 20.0)


def test_an_error_of_rank_0_is_of_the_same_kind_on_all() -> None:
    """An error of one rank is raised on every rank, so each can catch it."""

    def missing() -> bytes:
        raise CheckpointNotFound("no checkpoint has a finite loss", hint="save one")

    result = outcomes(3, lambda ranks: ranks.run_on_rank0(missing, "choosing"))
    assert [type(error) for error in result] == [CheckpointNotFound] * 3
    assert [error.hint for error in result] == ["save one"] * 3


@pytest.mark.parametrize("error", [ValueError("of the user's own"), MemoryError("none left"), StoreUnavailable("gone")])
def test_what_one_rank_raises_all_raise(error: Exception) -> None:
    """Errors that are not Relight's end the wait of other ranks too."""

    def action(ranks: SeveralRanks) -> None:
        with raise_on_all_ranks(ranks, "trying"):
            if ranks.world.rank == 1:
                raise error

    result = outcomes(3, action)
    assert result[1] is error
    kind = type(error) if isinstance(error, RelightError) else SaveFailed
    assert [type(raised) for raised in (result[0], result[2])] == [kind] * 2
    assert all(str(error).splitlines()[0] in str(raised) for raised in result)


@pytest.mark.parametrize("blind", [0, 1])
def test_a_rank_that_sees_no_run_does_not_make_all_start_from_scratch(tmp_path: Path, blind: int) -> None:
    """If a file system does not show the run to one rank yet, all ranks raise that error and none starts at step 0."""
    model = torch.nn.Linear(2, 2)
    with relight.Checkpointer(tmp_path / "store" / "run", model=model, signals=False, background=False) as ckpt:
        ckpt.save(3)
    (tmp_path / "empty").mkdir()

    def action(ranks: SeveralRanks) -> Any:
        store = LocalStore(tmp_path / ("empty" if ranks.world.rank == blind else "store"))
        return restore_first_good(RestoreRequest(store, "run", {"model": torch.nn.Linear(2, 2)}, ranks=ranks))

    result = outcomes(2, action)
    assert [type(error) for error in result] == [StoreUnavailable] * 2, result


def test_all_ranks_start_from_scratch_where_there_is_no_run(tmp_path: Path) -> None:
    """All ranks behave as a single process."""

    def action(ranks: SeveralRanks) -> Any:
        return restore_first_good(RestoreRequest(LocalStore(tmp_path), "run", {"a": 1}, ranks=ranks))

    assert [outcome.checkpoint for outcome in outcomes(2, action)] == [None, None]


class Failing(StoreWrapper):
    """A store that fails at the n-th read of a checkpoint's files, counted from 0."""

    def __init__(self, path: Path, fails: int) -> None:
        super().__init__(LocalStore(path))
        self.reads, self._fails, self._lock = 0, fails, threading.Lock()

    def _read(self, key: str) -> None:
        with self._lock:
            self.reads += "/log/" not in key
            if "/log/" not in key and self.reads == self._fails + 1:
                raise CorruptCheckpoint(f"read {self._fails} is damaged", where=key)

    def get(self, key: str, limit: int) -> bytes:
        self._read(key)
        return super().get(key, limit)

    def open(self, key: str) -> Reader:
        self._read(key)
        return super().open(key)


class Stubborn:
    """State with an object that fails once when it is loaded."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.fails:
            self.fails = False
            raise CorruptCheckpoint("this rank refuses it")


@pytest.mark.parametrize("group", [SeveralRanks, OneWriter])
@pytest.mark.parametrize("apart", [True, False], ids=["each on its own node", "all on one node"])
def test_a_read_that_fails_on_one_rank_makes_all_restore_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: type[SeveralRanks], apart: bool
) -> None:
    """At each read of each rank: all ranks skip the newest checkpoint and restore the one before.

    Symptom: a damaged pack that only one node read. The ranks of the other nodes met the next exchange in another call, and
    the job ended with the error of a checkpoint that should be skipped.
    """
    state = {"model": torch.nn.Linear(300, 300), "other": Stubborn(False)}
    with relight.Checkpointer(tmp_path / "run", **state, signals=False, background=False) as ckpt:
        ckpt.save(3)
        ckpt.save(4)
    if apart:
        monkeypatch.setattr("relight.restore.reader.this_node", lambda: threading.get_ident().to_bytes(8, "little"))

    def restore(failing: int, read: int, refuses: bool = False) -> tuple[list[Any], list[int]]:
        counts = [0] * 3

        def one(world: ThreadGroup) -> Any:
            mine = world.rank == failing
            store = Failing(tmp_path, read if mine else -1)
            live = {"model": torch.nn.Linear(300, 300), "other": Stubborn(refuses and mine)}
            try:
                result = restore_first_good(RestoreRequest(store, "run", live, ranks=group(world, (), 20.0)))
            except Exception as error:
                return error
            counts[world.rank] = store.reads
            for name, tensor in state["model"].state_dict().items():
                assert torch.equal(live["model"].state_dict()[name], tensor)
            return result.checkpoint.step

        return ThreadGroup.run(3, one, 20.0), counts

    outcomes, counts = restore(0, -1)
    assert outcomes == [4] * 3 and counts[0] > 2
    for rank, count in enumerate(counts):
        for read in range(count):
            outcomes, _ = restore(rank, read)
            assert outcomes in ([3] * 3, [4] * 3), (rank, read, outcomes)
        outcomes, _ = restore(rank, -1, refuses=True)
        assert outcomes == [3] * 3, (rank, outcomes)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["_put", "_decode_boxes", "RestoreReader"])
def test_an_error_while_rank_0_sends_the_state_is_raised_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, rank: int
) -> None:
    """Any error of one rank, also of the user's storage, ends the restore on all ranks. None waits for another."""
    model = torch.nn.Linear(300, 300)
    with relight.Checkpointer(tmp_path / "run", model=model, signals=False, background=False) as ckpt:
        ckpt.save(3)
    failing: list[int] = []

    def fails(*arguments: Any, original: Any = getattr(from_rank_0, what)) -> Any:  # noqa: B009 - the parameter names it
        if threading.get_ident() in failing:
            raise ValueError("not a number")
        return original(*arguments)

    monkeypatch.setattr(from_rank_0, what, fails)

    def action(ranks: OneWriter) -> Any:
        if ranks.world.rank == rank:
            failing.append(threading.get_ident())
        restore_first_good(
            RestoreRequest(LocalStore(tmp_path), "run", {"model": torch.nn.Linear(300, 300)}, ranks=ranks)
        )

    def one(world: ThreadGroup) -> Any:
        try:
            return action(OneWriter(world, (), 5.0))
        except Exception as error:
            return error

    result = ThreadGroup.run(3, one, 5.0)
    if rank == 0 or what == "_put":
        assert not any(isinstance(error, RankTimeout) for error in result), result
        assert all("not a number" in str(error) for error in result), result
    else:
        assert result == [None] * 3


def meet(rank: int, meeting: str, calls: list[list[str]], reports: Any) -> None:
    """Make the rank's calls on Gloo. Report the texts of the errors."""
    dist.init_process_group("gloo", store=dist.FileStore(meeting, 3), rank=rank, world_size=3)
    world = find_world(20.0)
    for call in calls[rank]:
        kind, _, doing = call.partition(" ")
        try:
            if kind == "gather":
                assert world.gather(b"x" * rank, doing) == [b"", b"x", b"xx"]
            else:
                assert world.broadcast(b"word" if rank == 0 else None, 0, doing) == b"word"
        except RankTimeout as error:
            reports.put((rank, str(error)))
            return
    reports.put((rank, ""))


@pytest.mark.distributed
@pytest.mark.parametrize("last", ["gather opening", "broadcast opening"])
def test_ranks_on_gloo_that_meet_in_different_calls_raise_at_once(tmp_path: Path, last: str) -> None:
    """A gather meets a gather or a broadcast of another name: all ranks raise, within seconds."""
    context = multiprocessing.get_context("fork")
    reports = context.SimpleQueue()
    same = ["gather one", "broadcast two"]
    calls = [[*same, "gather choosing"], [*same, last], [*same, "gather choosing"]]
    ranks = [context.Process(target=meet, args=(rank, str(tmp_path / "m"), calls, reports)) for rank in range(3)]
    started = time.monotonic()
    for process in ranks:
        process.start()
    texts = [reports.get() for _ in ranks]
    assert time.monotonic() - started < 15
    for process in ranks:
        process.join(30)
        assert process.exitcode == 0
    for _, text in texts:
        assert "ranks 0, 2: choosing; rank 1: opening" in text, texts


def test_ranks_that_meet_in_different_calls_raise_at_once() -> None:
    """Every rank gets the error, which names what each was doing."""

    def action(ranks: SeveralRanks) -> None:
        ranks.world.gather(b"", "opening" if ranks.world.rank == 1 else "choosing")

    result = outcomes(3, action)
    assert [type(error) for error in result] == [RankTimeout] * 3
    assert "ranks 0, 2: choosing; rank 1: opening" in str(result[0]) and result[2].ranks == (1,)
