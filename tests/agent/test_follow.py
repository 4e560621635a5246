"""The agent writes copied bytes during the copy. They must never be visible unless the save is sealed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import relight
from relight.agent import slot_follower as following
from relight.agent.slot_follower import Abandoned, SlotFollower
from relight.arena import SharedMapping, Slot, allocate
from relight.errors import RelightError
from relight.snapshot import Copier, GuardedTensors, Snapshot

WIDTH = 2048


@pytest.fixture(autouse=True)
def _background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELIGHT_BACKGROUND", "1")


@pytest.fixture
def slot() -> Iterator[Slot]:
    memory = SharedMapping(allocate(1 << 20), 1 << 20, writable=True)
    yield Slot(memory)
    memory.close()


def waiting(action, *args) -> tuple[threading.Thread, list[object]]:
    """Run ``action`` in a thread. Return the thread and its result."""
    came: list[object] = []

    def run() -> None:
        try:
            came.append(action(*args))
        except Abandoned as error:
            came.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, came


def test_the_writer_never_overtakes_the_copy(slot: Slot) -> None:
    """A follower waits for bytes that are not copied yet, and for the seal."""
    slot.begin(7)
    follower = SlotFollower(slot, 7, lambda: True)
    thread, came = waiting(follower.until, 5000)
    slot.set_copied(4999)
    time.sleep(0.02)
    assert not came
    slot.set_copied(6000)
    thread.join(5)
    assert came == [6000]
    thread, came = waiting(follower.sealed)
    slot.set_copied(1 << 20)
    time.sleep(0.02)
    assert not came, "filled is not sealed"
    slot.seal(7, 4096, 1)
    thread.join(5)
    assert came == [None]
    assert follower.until(123) == 1 << 20


@pytest.mark.parametrize("end", ["cleared", "begun again", "sealed again", "its filler died", "it stands still"])
def test_a_save_with_a_stopped_copy_is_abandoned(slot: Slot, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower's waiting callers return, however the copy ends."""
    monkeypatch.setattr(following, "PATIENCE_S", 0.2 if end == "it stands still" else 30.0)
    slot.begin(7)
    lives = [True]
    thread, came = waiting(SlotFollower(slot, 7, lambda: lives[0]).sealed)
    if end == "cleared":
        slot.clear()
    elif end == "begun again":
        slot.begin(8)
    elif end == "sealed again":
        slot.begin(8)
        slot.seal(8, 4096, 1)
    elif end == "its filler died":
        lives[0] = False
    thread.join(5)
    assert isinstance(came[0], Abandoned)


class Held:
    """Lets a snapshot copy its first half at once, and the rest on request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.go.set()
        usual = Snapshot.help

        def help(snapshot: Snapshot) -> bool:
            if snapshot.copied >= 0.5:
                self.go.wait()
            return usual(snapshot)

        monkeypatch.setattr(Snapshot, "help", help)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    return model, optimizer


def files(run: str) -> set[str]:
    """Return the files of committed and other checkpoints in the store."""
    return {path.name for path in Path(run).glob("0*-e*/*")}


def wait_for(condition, seconds: float = 10.0) -> bool:
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        time.sleep(0.005)
    return condition()


def test_copied_bytes_are_written_while_the_rest_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While half is copied, at most half is written and nothing is committed.

    After the copy there is a checkpoint of the state at the call.
    """
    run = str(tmp_path / "store" / "run")
    copy_gate = Held(monkeypatch)
    model, optimizer = make()
    with relight.Checkpointer(run, model=model, optimizer=optimizer) as ckpt:
        ckpt.save(0)
        copy_gate.go.clear()
        expected = model.weight.detach().clone()
        save = ckpt.save(1, block=False)
        assert wait_for(lambda: 0.1 < save.progress.written)
        time.sleep(0.3)
        assert save.progress.written <= 0.6 and not save.sealed and not save.done
        assert [checkpoint.step for checkpoint in relight.open(run).checkpoints()] == [0]
        copy_gate.go.set()
        assert save.wait(20).done
        optimizer.step()
    assert torch.equal(relight.load(run, 1)["model"]["weight"], expected)


def test_a_touched_state_leaves_nothing_of_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a half-written snapshot turns out to be touched, the save fails once and its files are removed.

    The next save is right.
    """
    run = str(tmp_path / "store" / "run")
    copy_gate = Held(monkeypatch)
    model, optimizer = make()
    ckpt = relight.Checkpointer(run, model=model, optimizer=optimizer)
    ckpt.save(0)
    before = files(run)
    copy_gate.go.clear()
    save = ckpt.save(1, block=False)
    assert wait_for(lambda: save.progress.written > 0.1)
    assert len(set(Path(run).glob("0*-e*"))) == 2
    model.weight.data.mul_(2)
    copy_gate.go.set()
    with pytest.raises(RelightError, match="training wrote"):
        save.wait(20)
    assert wait_for(lambda: len(set(Path(run).glob("0*-e*"))) == 1)
    assert files(run) == before
    assert ckpt.save(2).done
    ckpt.close(save=False)
    assert [checkpoint.step for checkpoint in relight.open(run).checkpoints()] == [0, 2]
    assert torch.equal(relight.load(run, 2)["model"]["weight"], model.weight)


SCRIPT = """
import os, sys, threading, time, torch, relight
from relight.snapshot import Snapshot
usual, hold = Snapshot.help, [False]
def help(snapshot):
    if hold[0] and snapshot.copied >= 0.5:
        print("half", flush=True)
        while hold[0]:
            time.sleep(0.01)
    return usual(snapshot)
Snapshot.help = help
model = torch.nn.Linear(2048, 2048, bias=False)
optimizer = torch.optim.AdamW(model.parameters())
model.weight.grad = torch.ones_like(model.weight)
optimizer.step()
ckpt = relight.Checkpointer(sys.argv[1], model=model, optimizer=optimizer, signals=False)
ckpt.save(0)
hold[0] = True
save = ckpt.save(1, block=False)
if sys.argv[2] == "wait":
    threading.Thread(target=lambda: (sys.stdin.readline(), hold.__setitem__(0, False)), daemon=True).start()
    save.wait(60)
    print("durable", flush=True)
    ckpt.close(save=False)
else:
    time.sleep(60)
"""


def start(run: str, how: str) -> subprocess.Popen[str]:
    """Start a trainer with a half-copied and partly written second save."""
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, run, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "half\n"
    assert wait_for(lambda: len(list(Path(run).glob("0*-e*"))) == 2)
    return child


def test_a_trainer_killed_before_the_seal_leaves_nothing(tmp_path: Path) -> None:
    """The agent removes the bytes of the trainer's last, incomplete save."""
    run = str(tmp_path / "store" / "run")
    child = start(run, "die")
    child.kill()
    child.wait()
    assert wait_for(lambda: len(list(Path(run).glob("0*-e*"))) == 1)
    model, optimizer = make()
    with relight.Checkpointer(run, model=model, optimizer=optimizer) as ckpt:
        assert ckpt.restore() == 1
        assert ckpt.save(1).done
    assert [checkpoint.step for checkpoint in relight.open(run).checkpoints()] == [0, 1]


def test_a_trainer_that_is_stopped_does_not_hold_the_agent(tmp_path: Path) -> None:
    """If a trainer is stopped during a copy for longer than the agent's patience, the written bytes are removed.

    After SIGCONT the save becomes durable.
    """
    run = str(tmp_path / "store" / "run")
    child = start(run, "wait")
    os.kill(child.pid, signal.SIGSTOP)
    assert wait_for(lambda: len(list(Path(run).glob("0*-e*"))) == 1, 2 * following.PATIENCE_S)
    os.kill(child.pid, signal.SIGCONT)
    out, _ = child.communicate("go\n", timeout=60)
    assert out.endswith("durable\n") and child.returncode == 0
    assert [checkpoint.step for checkpoint in relight.open(run).checkpoints()] == [0, 1]


def test_slices_are_reported_in_order() -> None:
    """For any order of copying threads, reported bytes are copied.

    The reports grow, unless the first slice is copied last.
    """
    assert any(reported_in_order() for _ in range(20))


def reported_in_order() -> bool:
    """Copy once. Return whether bytes were reported before the end."""
    source = torch.arange(9 << 18, dtype=torch.int32)
    target = torch.full_like(source, -1)
    seen: list[int] = []

    def copied(offset: int) -> None:
        seen.append(offset)
        count = (offset - target.data_ptr()) // 4
        assert torch.equal(target[:count], source[:count])

    done = threading.Event()
    snapshot = Snapshot(
        GuardedTensors([("t", source, target.data_ptr())]).begin(), 0, lambda touched: done.set(), copied
    )
    copier = Copier(3)
    copier.start(snapshot)
    snapshot.wait()
    copier.close()
    assert done.wait(5) and torch.equal(source, target)
    assert len(seen) == 8 and seen == sorted(seen)
    return max(seen) > target.data_ptr()
