"""Exact resume over the grid of kills and configurations: real processes, real SIGKILL."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
import signal
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from exact_training import DEVICE, SAMPLES, Cell, Kill, train  # noqa: E402

CELLS = [
    Cell(workers, accumulation, autocast, stateful)
    for workers, accumulation, autocast, stateful in itertools.product((0, 2), (1, 4), (False, True), (True, False))
]
WHERE = ("random step", "epoch edge", "step 1", "twice in one epoch", "inside a save")
SLICE = [
    (CELLS[i % len(CELLS)], where)
    for i, where in zip((0, 3, 6, 9, 14, 5, 12, 15), itertools.cycle(WHERE), strict=False)
]

_context = multiprocessing.get_context("forkserver")
if DEVICE == "cpu":  # an accelerator cannot be used in a process that is forked after it was initialized
    _context.set_forkserver_preload(["torch", "torch._dynamo", "torchdata.stateful_dataloader", "relight.checkpointer"])


def start(folder: Path, run: str, cell: Cell, kill: Kill | None, every: int) -> int:
    """Run one process to its end and give its exit code."""
    process = _context.Process(target=train, args=(str(folder), run, cell, kill, every))
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
        raise AssertionError("the run hangs")
    return process.exitcode


def read_ledger(folder: Path, run: str) -> list[dict]:
    """Return the last entry of each step, in order."""
    entries = {}
    for line in (folder / f"{run}.ledger").read_text().splitlines():
        entry = json.loads(line)
        entries[entry["step"]] = entry
    return [entries[step] for step in sorted(entries)]


def kills_for(cell: Cell, where: str, seed: int) -> list[Kill]:
    """The kills that ``where`` means for this configuration."""
    rng = random.Random(seed)
    epoch = cell.steps_an_epoch
    if where == "random step":
        return [Kill(rng.randrange(1, cell.steps - 1))]
    if where == "epoch edge":
        return [Kill(epoch - 1)]
    if where == "step 1":
        return [Kill(0)]
    if where == "twice in one epoch":
        first = epoch + rng.randrange(0, max(1, epoch // 3))
        return [Kill(first), Kill(min(first + max(1, epoch // 3), 2 * epoch - 1))]
    return [Kill(rng.randrange(2, cell.steps - 1), call=rng.randrange(0, 220))]


@cache
def straight(folder: Path, cell: Cell) -> list[dict]:
    """The uninterrupted run's ledger."""
    run = f"straight-{cell.workers}-{cell.accumulation}-{cell.autocast}-{cell.stateful}-{cell.persistent}"
    assert start(folder, run, cell, None, every=2) == 0
    return read_ledger(folder, run)


def check(folder: Path, cell: Cell, where: str, seed: int) -> None:
    """Kill, resume to the end, compare bit by bit; the ledger shows every sample once an epoch."""
    expected = straight(folder, cell)
    run = f"killed-{abs(hash((cell, where, seed)))}"
    every = 1 if where in ("epoch edge", "step 1", "inside a save") else 2
    for kill in kills_for(cell, where, seed):
        assert start(folder, run, cell, kill, every) == -signal.SIGKILL
        assert not (folder / f"{run}.done").exists()
    assert start(folder, run, cell, None, every) == 0
    ledger = read_ledger(folder, run)
    assert ledger == expected, next((a, b) for a, b in zip(ledger, expected, strict=False) if a != b)
    ids = [index for entry in ledger for index in entry["ids"]]
    for epoch in range(2):
        assert sorted(ids[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all, so that straight runs are shared."""
    return tmp_path_factory.mktemp("exact")


@pytest.mark.parametrize(("cell", "where"), SLICE, ids=lambda value: str(value).replace(" ", "-"))
def test_resume_is_exact_on_a_slice_of_the_grid(folder: Path, cell: Cell, where: str) -> None:
    """A killed and resumed run equals the uninterrupted one to the bit, sample by sample."""
    check(folder, cell, where, seed=1)


@pytest.mark.grid
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("cell", CELLS + [Cell(2, 1, False, s, persistent=True) for s in (True, False)], ids=str)
def test_resume_is_exact_over_the_grid(folder: Path, cell: Cell, where: str) -> None:
    """Every cell of {kill} × {workers} × {accumulation} × {precision} × {loader} resumes to the bit, three seeds each."""
    for seed in range(1 if where in ("epoch edge", "step 1") else 3):
        check(folder, cell, where, seed)
