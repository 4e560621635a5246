"""``relight repack`` makes a checkpoint independent of others, also if it is killed on the way.

The others may then be deleted.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import relight
from relight.catalog.run import Run
from relight.errors import CheckpointNotFound
from relight.log import fold
from relight.policy import Keep
from relight.reader import verify_checkpoint
from relight.reclaim import execute, plan_prune
from relight.store import ByteStore, open_bytes
from relight.testing.killable_store import Killed, Mortal
from relight.testing.store_suite import refuses
from relight.transfer.repack import execute_repack, plan_repack


@pytest.fixture
def run(tmp_path: Path) -> str:
    """Six saves that share a frozen megabyte, and are differences of each other's rest."""
    frozen, moving = torch.arange(300_000.0), torch.zeros(300_000)
    url = str(tmp_path / "s" / "run")
    options: dict[str, Any] = {"background": True, "limits": relight.Limits(when_busy="queue")}
    compact = relight.Compact(codecs="always", full_every=50)
    with relight.Checkpointer(
        url, frozen=frozen, moving=moving, save=relight.every(steps=1), compact=compact, **options
    ) as ckpt:
        ckpt.restore()
        for step in range(6):
            moving[step * 1000 : step * 1000 + 500] += 1.5
            ckpt.save(step)
    return url


def opened(url: str, store: ByteStore | None = None) -> Run:
    return Run(store or open_bytes(Path(url).parent), "run")


def sound(run: Run) -> list[int]:
    """The steps of all that is live, each whole."""
    view = run.view()
    live = fold(view).live
    assert not any(verify_checkpoint(run.store, view, checkpoint) for checkpoint in live)
    return [checkpoint.step for checkpoint in live]


def test_sizes_and_donors_are_those_after_the_repack(run: str) -> None:
    """``new_bytes`` is the size of the files, and ``relight show`` names no donor."""
    execute_repack(plan_repack(opened(run)))
    newest = fold(opened(run).view()).live[-1]
    folder = Path(run) / newest.body.dir
    assert newest.new_bytes == pytest.approx(
        sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()), rel=0.02
    )
    shown = subprocess.run(
        [sys.executable, "-m", "relight", "show", f"{run}@latest"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert "  needs " not in shown and "a restore reads" not in shown


def state(url: str, step: int) -> tuple[Any, ...]:
    loaded = relight.load(url, step)
    return loaded["frozen"], loaded["moving"]


def test_donors_of_a_repacked_checkpoint_may_go(run: str) -> None:
    """A repacked checkpoint has the same bits, needs no other checkpoint, and survives the deletion of all others."""
    repacked = opened(run)
    before = [state(run, step) for step in range(6)]
    newest = repacked.history().live[-1]
    assert len(newest.requires) >= 2
    report = execute_repack(plan_repack(repacked, {newest.id}))
    assert report.repacked == [newest.id] and set(report.freed) < set(newest.requires) | {newest.id}
    assert repacked.history().live[-1].requires == [] and repacked.history().live[-2].requires
    assert not plan_repack(repacked, {newest.id}).chosen
    report = execute_repack(plan_repack(repacked))
    assert not any(checkpoint.requires for checkpoint in repacked.history().live) and report.freed
    assert sound(repacked) == list(range(6))
    execute(plan_prune(repacked.store, "run", Keep(last=1)), repacked.store)
    assert sound(repacked) == [5]
    assert all(torch.equal(tensor, other) for tensor, other in zip(before[5], state(run, 5), strict=True))


def test_killed_anywhere(run: str, tmp_path: Path) -> None:
    """At each change of the store: what is live is whole, and doing it again ends it."""
    for left in range(100):
        copy = tmp_path / f"{left}" / "run"
        shutil.copytree(Path(run).parent, copy.parent)
        store = Mortal(open_bytes(copy.parent), left)
        try:
            execute_repack(plan_repack(opened(str(copy), store)))
        except Killed:
            assert sound(opened(str(copy))) == list(range(6))
            execute_repack(plan_repack(opened(str(copy))))
            assert not any(checkpoint.requires for checkpoint in opened(str(copy)).history().live)
            continue
        break
    assert left > 12


def test_a_checkpoint_that_is_retired_during_repacking(run: str) -> None:
    """A plan with a checkpoint that was retired meanwhile is refused."""
    repacked = opened(run)
    plan = plan_repack(repacked)
    execute(plan_prune(repacked.store, "run", Keep(last=1)), repacked.store)  # keeps all donors of the last one
    execute_repack(plan_repack(repacked))
    execute(plan_prune(repacked.store, "run", Keep(last=1)), repacked.store)
    refuses((CheckpointNotFound, relight.CorruptCheckpoint), lambda: execute_repack(plan))


def test_later_saves_go_by_what_was_repacked(run: str) -> None:
    """A run continues after a repack, shares chunks again, and restores."""
    execute_repack(plan_repack(opened(run)))
    frozen, moving = torch.zeros(300_000), torch.zeros(300_000)
    with relight.Checkpointer(
        run, frozen=frozen, moving=moving, save=relight.every(steps=1), compact=True, background=False
    ) as ckpt:
        start = ckpt.restore()
        assert start == 6 and torch.equal(ckpt["frozen"], torch.arange(300_000.0))
        for step in range(start, start + 4):
            ckpt.save(step)
    assert sound(opened(run)) == list(range(10))


def test_the_command(run: str) -> None:
    """The command prints its plan, executes it, and has nothing to do the next time.

    ``ls`` shows that nothing is needed.
    """

    def relight_(*arguments: str) -> Any:
        done = subprocess.run([sys.executable, "-m", "relight", *arguments], capture_output=True, text=True, check=True)
        return json.loads(done.stdout) if "--json" in arguments else done.stdout

    assert "would be written out" in relight_("repack", run, "--dry-run")
    assert len(relight_("repack", run, "latest", "--json")["repacked"]) == 1
    assert relight_("ls", run, "--json")[-1]["requires"] == []
    assert " now, " in relight_("repack", run)
    assert "nothing to do" in relight_("repack", run)
    assert "repacked" in relight_("log", run)
