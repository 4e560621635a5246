"""Unchanged tensors are not stored again under any choice of codecs, and commands show the right numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relight
from relight.catalog import Run
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.commit.chunk_index import OLDER_SAVES
from relight.format import encode_tree
from relight.format.root_keys import LOSSY
from relight.layout import Bytes, Item
from relight.log import Checkpoint
from relight.policy.compact import CodecSample, Compact, Conditions, Experience, choose
from relight.reader.chunk_reader import read_tensors
from relight.reader.storage_stats import stored_as, stored_of
from relight.store import LocalStore

MIB = 1 << 20
SLOW_CODER = (CodecSample("float32 param", 1.0, 0.9, 1 / 50e6),)
"""A sample by which codecs never pay on a disk."""


def noise(megabytes: float, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(int(megabytes * MIB))


def saved(attempt: Attempt, step: int, values: dict[str, bytes]) -> None:
    items = [Item(name, "uint8", (len(data),), "param", Bytes(data)) for name, data in values.items()]
    attempt.save(SaveRequest(SaveInfo(step=step), tree=encode_tree({}), items=items))


def new_megabytes(run: Run) -> list[float]:
    return [round(checkpoint.body.new_bytes / MIB, 1) for checkpoint in run.history().live]


def tensors(run: Run, checkpoint: Checkpoint) -> dict[str, bytes]:
    opened = run.open(checkpoint)
    part = opened.parts[0]
    rooms = [bytearray(tensor.length) for tensor in part.tensors]
    read_tensors(opened, part, {number: Bytes(room) for number, room in enumerate(rooms)})
    return {tensor.name: bytes(room) for tensor, room in zip(part.tensors, rooms, strict=True)}


def test_the_second_save_already_stores_only_what_changed(tmp_path: Path) -> None:
    """A tensor that the save before has is not written by the second save either."""
    store = LocalStore(tmp_path)
    attempt = Attempt.begin(store, "run")
    attempt.make_smaller(Compact())
    for step in range(3):
        saved(attempt, step, {"frozen": noise(4, 0), "trained": noise(1, step + 1)})
    assert new_megabytes(Run(store, "run")) == [5.0, 1.0, 1.0]


def test_a_tensor_that_stops_changing_is_not_stored_again(tmp_path: Path) -> None:
    """If a save equals the one before, it stores nothing, also after saves without common bytes."""
    store = LocalStore(tmp_path)
    attempt = Attempt.begin(store, "run")
    attempt.make_smaller(Compact())
    for step, seed in enumerate([1, 2, 3, 3]):
        saved(attempt, step, {"weights": noise(4, seed)})
    assert new_megabytes(Run(store, "run")) == [4.0, 4.0, 4.0, 0.0]


def test_chunks_of_an_older_save_are_not_stored_again(tmp_path: Path) -> None:
    """A tensor that returns to an earlier value is shared with that save while it is live.

    Otherwise the tensor is stored.
    """
    store = LocalStore(tmp_path)
    attempt = Attempt.begin(store, "run")
    attempt.make_smaller(Compact())
    seeds = [1, 2, 1, 3, 1]
    for step, seed in enumerate(seeds):
        saved(attempt, step, {"weights": noise(4, seed)})
    run = Run(store, "run")
    assert new_megabytes(run) == [4.0, 4.0, 0.0, 4.0, 0.0]
    for checkpoint, seed in zip(run.history().live, seeds, strict=True):
        assert tensors(run, checkpoint)["weights"] == noise(4, seed)
    for step in range(OLDER_SAVES + 1):
        saved(attempt, 10 + step, {"weights": noise(4, 100 + step)})
    saved(attempt, 30, {"weights": noise(4, 1)})
    assert new_megabytes(run)[-1] == 4.0, "what so old a save has is not remembered"


def test_full_every_bounds_how_long_an_older_save_is_needed(tmp_path: Path) -> None:
    """With full_every=3 no save needs bytes of one that is three or more saves older."""
    store = LocalStore(tmp_path)
    attempt = Attempt.begin(store, "run")
    attempt.make_smaller(Compact(full_every=3))
    for step in range(12):
        saved(attempt, step, {"frozen": noise(2, 0), "turns": noise(1, step % 2), "trained": noise(1, step + 10)})
    live = Run(store, "run").history().live
    place = {checkpoint.id: number for number, checkpoint in enumerate(live)}
    assert all(number - place[needed] < 3 for number, checkpoint in enumerate(live) for needed in checkpoint.requires)
    assert any(checkpoint.requires for checkpoint in live)


@pytest.mark.parametrize(("codecs", "differences"), [("auto", True), ("always", True), ("never", False)])
def test_differences_do_not_depend_on_what_codecs_gain(codecs: str, differences: bool) -> None:
    """full_every asks for differences: a coder that is too slow for the rest does not switch them off."""
    seen = Experience(samples=SLOW_CODER, lane_s_per_byte=1 / 2e9, since_full=1)
    assert choose(Compact(codecs=codecs, full_every=8), seen, Conditions(2)).differences is differences
    assert not choose(Compact(codecs=codecs), seen, Conditions(2)).differences


def test_rows_that_did_not_change_are_not_stored_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If few rows of an embedding change, a background save stores the differences, and every checkpoint restores exactly."""
    monkeypatch.setenv("RELIGHT_BACKGROUND", "1")
    torch.manual_seed(0)
    embedding, states = torch.nn.Embedding(2048, 512), []
    with relight.Checkpointer(
        tmp_path / "s" / "run",
        embedding=embedding,
        save=relight.every(steps=1),
        signals=False,
        compact=Compact(full_every=8),
        limits=relight.Limits(when_busy="queue", nice=0),
    ) as ckpt:
        for step in range(3):
            with torch.no_grad():
                embedding.weight[torch.randint(0, 2048, (8,))] += 0.01
            handle = ckpt.step(step)
            assert handle is not None and handle.wait()
            states.append(embedding.weight.detach().clone())
    run = Run(LocalStore(str(tmp_path / "s")), "run")
    first, *later = run.history().live
    assert first.body.new_bytes > 3e6 and all(checkpoint.body.new_bytes < 0.2e6 for checkpoint in later), new_megabytes(
        run
    )
    for checkpoint, state in zip(run.history().live, states, strict=True):
        assert tensors(run, checkpoint)["embedding/weight"] == state.numpy().tobytes()
    opened = run.open(later[-1])
    rows = stored_as(opened)
    assert sum(row.new_bytes for row in rows) < 0.2e6 < sum(row.stored_bytes for row in rows)
    ways = stored_of(opened)
    assert all(0 <= ratio <= 1 for _, ratio in ways.values()) and ways["embedding/weight"][1] < 0.05
    assert "difference" in ways["embedding/weight"][0]


def floats(attempt: Attempt, values: dict[str, Any]) -> None:
    items = [Item(name, "float32", data.shape, "param", Bytes(data.tobytes())) for name, data in values.items()]
    attempt.save(SaveRequest(SaveInfo(step=0), tree=encode_tree({}), items=items))


def test_an_exact_tensor_is_not_displayed_as_lossy(tmp_path: Path) -> None:
    """A small exact tensor that shares a chunk with a lossy one is exact, and displayed so."""
    store = LocalStore(tmp_path)
    attempt = Attempt.begin(store, "run")
    attempt.make_smaller(Compact(lossy={"moments/*": "bfloat16"}))
    exact = np.arange(100, dtype="<f4") / 7
    floats(attempt, {"moments/a": np.linspace(0, 1, 50_000, dtype="<f4"), "model/b": exact})
    run = Run(store, "run")
    newest = run.history().live[-1]
    ways = stored_of(run.open(newest))
    assert "lossy" in ways["moments/a"][0] and "lossy" not in ways.get("model/b", ("", 1.0))[0]
    assert tensors(run, newest)["model/b"] == exact.tobytes()


def test_a_rule_that_fits_no_tensor_makes_nothing_inexact(tmp_path: Path) -> None:
    """If no tensor matches a lossy pattern, the checkpoint is exact: its listing has neither an error bound nor a reason."""
    store = LocalStore(tmp_path)
    attempt = Attempt.begin(store, "run")
    attempt.make_smaller(Compact(lossy={"moments/*": "bfloat16"}))
    floats(attempt, {"model/b": np.arange(100, dtype="<f4")})
    run = Run(store, "run")
    newest = run.history().live[-1]
    root = run.open(newest).root
    assert newest.body.lossy == 0 and root.exact == [] and LOSSY.name not in root.user
