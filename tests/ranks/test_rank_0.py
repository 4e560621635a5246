"""Rank 0 writes for all ranks: calls of the Checkpointer on ranks that are threads, with errors, refusals and
fallbacks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import relight
from relight.checkpointer import session
from relight.comm import RankTimeout, SingleProcess, ThreadGroup
from relight.format import decode_tree
from relight.format.root_keys import RANKS
from relight.ranks.one_writer import OneWriter
from relight.reader import open_checkpoint
from relight.reader.one_writer import apart
from relight.store import LocalStore

SIZE = 3


@pytest.fixture
def on_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Return a function that runs an action on each rank, in a thread with its own process group."""
    local = threading.local()
    monkeypatch.setattr(session, "find_world", lambda timeout_s: getattr(local, "world", SingleProcess()))

    def run(action: Callable[[int], Any], timeout_s: float = 20.0) -> list[Any]:
        def act(world: ThreadGroup) -> Any:
            local.world = world
            return action(world.rank)

        return ThreadGroup.run(SIZE, act, timeout_s)

    return run


def make(path: Path, rank: int, value: float, **options: Any) -> relight.Checkpointer:
    """Make a Checkpointer with an equal model on all ranks and a large tensor of each rank.

    Only rank 0 can open the store.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 5)
    with torch.no_grad():
        model.weight.fill_(value)
    both = {
        "array": np.full((4, 3), value),
        "scalar": np.float32(value),
        "half": torch.full((3,), value, dtype=torch.bfloat16),
    }
    own = {
        "array": np.full(7, value + rank, dtype=np.int16),
        "large": torch.full((300, 1000), value + rank),
        "number": rank,
        "empty": torch.zeros(0, 3),
    }
    options = {"per_rank": ["own"], "signals": False, "background": False, "writer": "rank 0", **options}
    return relight.Checkpointer(path if rank == 0 else f"nowhere://{path}", model=model, both=both, own=own, **options)


def held(ckpt: relight.Checkpointer) -> tuple[float, float, int]:
    own, both = ckpt["own"], ckpt["both"]
    assert (
        float(both["array"][3, 2])
        == float(both["scalar"])
        == float(both["half"][0])
        == float(own["array"][-1]) - own["number"]
    )
    return float(ckpt["model"].weight.detach()[0, 0]), float(own["large"][-1, -1]), own["number"]


def saved(path: Path, on_ranks: Callable[..., list[Any]], steps: int = 2) -> list[str]:
    """Save ``steps`` steps with values that depend on the step. Return the ids."""

    def save(rank: int) -> list[str]:
        ids = []
        for step in range(steps):
            with make(path, rank, 10.0 * step) as ckpt:
                other = make(path, rank, 10.0 * step)
                if step:
                    assert ckpt.restore() == step
                    with torch.no_grad():
                        ckpt["model"].weight.fill_(10.0 * step)
                    ckpt["own"], ckpt["both"] = other["own"], other["both"]
                done = ckpt.save(step, metrics={"loss": 1.0 / (1 + step)}, tag=f"at-{step}")
                assert done.done and done.error is None
                ids.append(done.id)
        return ids

    ids_of_ranks = on_ranks(save)
    assert ids_of_ranks[0] == ids_of_ranks[1] == ids_of_ranks[2]
    return ids_of_ranks[0]


def test_each_rank_gets_its_own_back(tmp_path: Path, on_ranks: Callable[..., list[Any]]) -> None:
    """All ranks restore what rank 0 finds by latest, step, tag, id or best.

    Retention and tags work as for one process.
    """
    ids = saved(tmp_path / "s" / "run", on_ranks)

    def restore(rank: int) -> list[Any]:
        states = []
        for which in ("latest", 0, "at-0", ids[0], "best"):
            ckpt = make(tmp_path / "s" / "run", rank, -1.0, save=relight.best("loss"))
            start = ckpt.restore(which)
            states.append((start, *held(ckpt)))
            ckpt.close(save=False)
        return states

    for rank, states in enumerate(on_ranks(restore)):
        first, second = (1, 0.0, 0.0 + rank, rank), (2, 10.0, 10.0 + rank, rank)
        assert states == [second, first, first, first, second], rank
    root = relight.open(tmp_path / "s" / "run")
    assert [checkpoint.id for checkpoint in root.checkpoints()] == ids
    assert relight.load(tmp_path / "s" / "run")["own"]["number"] == 0


def test_one_process_and_ranks_that_all_read_restore_it(tmp_path: Path, on_ranks: Callable[..., list[Any]]) -> None:
    """From a checkpoint of one part, rank r restores the state of rank r."""
    saved(tmp_path / "s" / "run", on_ranks)

    def restore(rank: int) -> Any:
        ckpt = make(tmp_path / "s" / "run", 0, -1.0, writer="every rank")
        ckpt.restore()
        return held(ckpt)

    assert on_ranks(restore) == [(10.0, 10.0 + rank, rank) for rank in range(SIZE)]


def test_damage_found_by_rank_0_sends_all_to_the_older(tmp_path: Path, on_ranks: Callable[..., list[Any]]) -> None:
    """All ranks restore the older checkpoint, also if the damage is found after half of it was sent.

    By name it is the same error on all ranks.
    """
    ids = saved(tmp_path / "s" / "run", on_ranks)
    pack = next((tmp_path / "s" / "run").glob(f"*{ids[1]}*/pack*"))
    data = bytearray(pack.read_bytes())
    data[-5] ^= 1
    pack.write_bytes(data)

    def restore(rank: int) -> Any:
        ckpt = make(tmp_path / "s" / "run", rank, -1.0)
        with pytest.raises(relight.CorruptCheckpoint, match="chunk|rank 0"):
            ckpt.restore(ids[1])
        return ckpt.restore(), *held(ckpt)

    assert on_ranks(restore) == [(1, 0.0, 0.0 + rank, rank) for rank in range(SIZE)]


def test_what_does_not_fit_one_rank_is_refused_by_all(tmp_path: Path, on_ranks: Callable[..., list[Any]]) -> None:
    """All ranks refuse a state that does not fit one rank, before any tensor is sent."""
    saved(tmp_path / "s" / "run", on_ranks, steps=1)

    def restore(rank: int) -> str:
        ckpt = make(tmp_path / "s" / "run", rank, -1.0)
        if rank == 1:
            ckpt["model"].weight = torch.nn.Parameter(torch.zeros(2, 2))
        with pytest.raises(relight.IncompatibleState) as caught:
            ckpt.restore()
        assert float(ckpt["model"].weight.detach()[0, 0]) != 0.0 or rank == 1
        return caught.value.kind

    assert on_ranks(restore) == ["incompatible"] * SIZE


def test_a_fresh_run_is_fresh_on_all(tmp_path: Path, on_ranks: Callable[..., list[Any]]) -> None:
    """In an empty run all ranks start at step 0. A missing name is an error on all ranks."""

    def restore(rank: int) -> int:
        ckpt = make(tmp_path / "s" / "run", rank, -1.0)
        with pytest.raises(relight.CheckpointNotFound):
            ckpt.restore("at-0")
        return ckpt.restore()

    assert on_ranks(restore) == [0] * SIZE


def test_a_full_disk_is_reported_to_all_and_the_next_save_is_made(
    tmp_path: Path, on_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks get the same kind of error, no file is left, and the next save succeeds."""
    full = [True]
    usual = LocalStore.write

    def write(self: LocalStore, key: str, size: int) -> Any:
        if full[0] and "pack" in key:
            raise relight.NoSpace("the disk is full")
        return usual(self, key, size)

    monkeypatch.setattr(LocalStore, "write", write)

    def save(rank: int) -> list[str | None]:
        ckpt = make(tmp_path / "s" / "run", rank, 1.0)
        first = ckpt.save(0)
        if rank == 0:
            full[0] = False
        second = ckpt.save(1)
        ckpt.close(save=False)
        return [
            first.error.kind if first.error else None,
            second.error.kind if second.error else None,
            first.error.what,
        ]  # type: ignore[union-attr]

    results = on_ranks(save)
    assert [result[:2] for result in results] == [["no_space", None]] * SIZE
    assert results[1][2] == "rank 0: the disk is full"
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "s" / "run").checkpoints()] == [1]


def test_a_superseded_job_is_fenced_on_every_rank(tmp_path: Path, on_ranks: Callable[..., list[Any]]) -> None:
    """All ranks raise Fenced."""

    def save(rank: int) -> str:
        ckpt = make(tmp_path / "s" / "run", rank, 1.0)
        ckpt.save(0)
        if rank == 0:
            relight.save(tmp_path / "s" / "run", {"x": torch.ones(2)}, step=5)
        with pytest.raises(relight.Fenced) as caught:
            ckpt.save(1)
        return caught.value.kind

    assert on_ranks(save) == ["fenced"] * SIZE


def test_a_store_that_rank_0_cannot_open_is_an_error_on_all(on_ranks: Callable[..., list[Any]]) -> None:
    """All ranks raise at once; none waits for the failed rank."""

    def start(rank: int) -> str:
        with pytest.raises(relight.RelightError) as caught:
            relight.Checkpointer("nowhere://x/run", model=torch.nn.Linear(2, 2), writer="rank 0", signals=False)
        return caught.value.what

    messages = on_ranks(start)
    assert all("no store for nowhere" in message for message in messages)


def test_a_lost_rank_costs_only_the_save(tmp_path: Path, on_ranks: Callable[..., list[Any]]) -> None:
    """Both sides of the gathering wait until the deadline and name the missing ranks.

    Training continues without saves.
    """

    def save(rank: int) -> Any:
        ckpt = make(tmp_path / "s" / "run", rank, 1.0, limits=relight.Limits(deadline_s=1.0))
        ckpt.save(0)
        if rank == 1:
            assert isinstance(ckpt._session.ranks, OneWriter)
            ckpt._session.ranks.serve = lambda: b"f"  # type: ignore[method-assign]
            assert ckpt.save(1).error is not None
            return (1,)
        failed = ckpt.save(1)
        again = ckpt.save(2)
        assert isinstance(failed.error, RankTimeout) and isinstance(again.error, RankTimeout)
        return failed.error.ranks

    results = on_ranks(save, 1.0)
    assert results[0] == (1,) and results[2] == (0,)
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "s" / "run").checkpoints()] == [0]


def test_a_tensor_without_elements_that_rank_0_does_not_hold(
    tmp_path: Path, on_ranks: Callable[..., list[Any]]
) -> None:
    """An empty tensor of another rank needs no request, also next to small tensors."""

    def save(rank: int) -> None:
        model = torch.nn.Linear(3, 3)
        if rank == 1:
            model.more = torch.nn.Linear(2, 2)
            model.register_buffer("none", torch.zeros(0, 4))
            model.register_buffer("one", torch.ones(1))
        path = tmp_path / "s" / "run" if rank == 0 else f"nowhere://{tmp_path}/run"
        with relight.Checkpointer(path, model=model, signals=False, background=False, writer="rank 0") as ckpt:
            saved = ckpt.save(1)
            assert saved.done and saved.error is None, saved.error

    on_ranks(save)
    model_of_run = relight.load(tmp_path / "s" / "run")["model"]
    assert (
        model_of_run["none"].shape == (0, 4)
        and bool(model_of_run["one"] == 1)
        and model_of_run["more.weight"].shape == (2, 2)
    )


def test_ranks_must_be_given_the_same_writer(tmp_path: Path, on_ranks: Callable[..., list[Any]]) -> None:
    """Different or invalid values of ``writer=`` are refused: with different ones, ranks would wait for each other
    forever."""

    def start(rank: int) -> str:
        with pytest.raises(relight.ConfigError) as caught:
            make(tmp_path / "s" / "run", rank, 1.0, writer="rank 0" if rank else "every rank")
        return caught.value.what

    assert all("writer= is 'every rank' on rank 0, and 'rank 0' on rank 1" in message for message in on_ranks(start))
    with pytest.raises(relight.ConfigError, match="writer="):
        relight.Checkpointer(tmp_path / "s" / "run", model=torch.nn.Linear(2, 2), writer="rank 1", signals=False)


def test_alone_it_means_nothing(tmp_path: Path) -> None:
    """``writer=`` has no effect in a single process."""
    with relight.Checkpointer(tmp_path / "s" / "run", x=torch.ones(3), writer="rank 0", signals=False) as ckpt:
        ckpt.save(0)
    assert RANKS.name not in relight.open(tmp_path / "s" / "run").run().view().records[-1].body.__struct_fields__
    assert set(relight.load(tmp_path / "s" / "run")) == {"x", "rng"}


def test_a_part_that_does_not_hold_what_each_rank_had_is_refused(
    tmp_path: Path, on_ranks: Callable[..., list[Any]]
) -> None:
    """A root with another count of ranks than its tree is refused.

    A value that no job writes is a user's metadata and is ignored.
    """
    saved(tmp_path / "s" / "run", on_ranks, steps=1)
    run = relight.open(tmp_path / "s" / "run").run()
    view = run.view()
    opened = open_checkpoint(run.store, run.name, run.history().live[-1], store_id=view.store_id, run_id=view.run_id)
    tree = decode_tree(opened.parts[0].tree, len(opened.parts[0].tensors), "here")
    common, own = apart(opened.root, tree, "here")
    assert "rank" not in common and len(own) == SIZE and [state["own"]["number"] for state in own] == [0, 1, 2]
    for count in (2, 4, 10_000):
        with pytest.raises(relight.UnsafeContent, match=f"{count} ranks"):
            apart(msgspec.structs.replace(opened.root, user={RANKS.name: count}), tree, "here")
    for word in (0, 1, -1, True, "3", 10**9, None):
        assert apart(msgspec.structs.replace(opened.root, user={RANKS.name: word}), tree, "here") == (tree, (tree,))
