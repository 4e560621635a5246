"""Saves that are due while no snapshot slot is free. As ``Limits(when_busy=)`` specifies, they are taken at the next
step with a free slot."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import relight
from relight.checkpointer.background import Background
from relight.comm.ports import free_port
from relight.observe import Event

SLOW = {"memory": 4 << 20, "bytes_per_second": 3e6}
"""Room for one slot, which is written in about 0.5 s."""


@pytest.fixture(autouse=True)
def _background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELIGHT_BACKGROUND", "1")


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 1))
    return model, torch.optim.AdamW(model.parameters())


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()


def test_a_postponed_save_is_taken_at_the_first_step_with_a_slot(tmp_path: Path, events: list[Event]) -> None:
    """Report the postponement once with the due step. The checkpoint names that step, and counts as its milestone."""
    model, optimizer = make()
    free: dict[int, bool] = {}
    due: dict[int, bool] = {}
    with relight.Checkpointer(
        tmp_path / "s" / "run",
        model=model,
        optimizer=optimizer,
        save=relight.every(steps=20),
        limits=relight.Limits(**SLOW),
        keep=relight.keep(last=1, every=20),
    ) as ckpt:
        one_step(model, optimizer)
        ckpt.save(0)
        for step in range(1, 120):
            one_step(model, optimizer)
            if step == 18:
                ckpt.save(18, block=False)
            due[step] = ckpt._progress.due is not None
            free[step] = bool(ckpt._saves.writer.free_slots)  # type: ignore[union-attr]
            ckpt.step(step)
            if ckpt._progress.due is not None:
                time.sleep(0.1)
    postponed = [event.fields["step"] for event in events if event.name == "save.coalesced"]
    assert postponed and postponed[0] == 19 and len(set(postponed)) == len(postponed)
    requested = {event.fields["step"]: event.fields["reason"] for event in events if event.name == "save.requested"}
    for step in postponed:
        late = [
            due_step
            for due_step, reason in requested.items()
            if reason == f"every 20 steps (postponed from step {step})"
        ]
        assert len(late) == 1 or step >= 99, (step, requested)
        if late:
            assert all(due[due_step] and not free[due_step] for due_step in range(step + 1, late[0])), (
                "a step with a free slot was left out"
            )
    live = [checkpoint.step + 1 for checkpoint in relight.open(tmp_path / "s" / "run").checkpoints()]
    for multiple in range(20, 120, 20):
        saved = [step + 1 for step in requested if multiple <= step + 1 < multiple + 20]
        assert not saved or min(saved) in live, (multiple, saved, live)
    assert any(count % 20 for count in live[:-1]), "no late checkpoint stands for a multiple"


TRAIN = """
import os, sys, time, torch, torch.distributed as dist, relight
from relight.observe import counters
folder, when_busy = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 1))
limits = relight.Limits(memory=2 << 20, bytes_per_second=1e6, when_busy=when_busy)
with relight.Checkpointer(folder, model=model, save=relight.every(steps=1), limits=limits) as ckpt:
    for step in range(ckpt.restore(), 12):
        with torch.no_grad():
            model[0].bias += 1
        ckpt.step(step)
        time.sleep(0.05)
    dist.barrier()
    os.write(1, f"POSTPONED {dist.get_rank()} {counters['save.coalesced']}\\n".encode())  # one write: the ranks share the pipe
dist.destroy_process_group()
"""


@pytest.mark.parametrize("when_busy", ["newest", "queue"])
def test_several_ranks_do_as_limits_state(tmp_path: Path, when_busy: str) -> None:
    """With "queue", save every due step on two ranks. With "newest", postpone some saves, and save the last step.

    The ranks are started by torch's own launcher, as in no other test of the suite.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
        "--no-python", sys.executable, "-c", TRAIN, str(tmp_path / "s" / "run"), when_busy,
    ]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "RELIGHT_BACKGROUND": "1"}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    postponed = [int(line.split()[2]) for line in done.stdout.splitlines() if line.startswith("POSTPONED")]
    steps = [checkpoint.step for checkpoint in relight.open(tmp_path / "s" / "run").checkpoints()]
    assert steps[-1] == 11 and len(postponed) == 2
    if when_busy == "queue":
        assert steps == list(range(12)) and postponed == [0, 0]
    else:
        assert len(steps) < 12 and min(postponed) > 0


def test_a_save_before_the_agent_is_ready_states_that(
    tmp_path: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first save of a process was reported to lack a slot while the agent was still starting."""
    prepare, begun = Background._prepare, threading.Event()

    def slow(self: Background, *args: Any) -> Any:
        begun.wait(60)
        return prepare(self, *args)

    monkeypatch.setattr(Background, "_prepare", slow)
    model, optimizer = make()
    with relight.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer, save=relight.every(steps=1)) as ckpt:
        one_step(model, optimizer)
        ckpt.step(0)
        begun.set()
    messages = [str(event.fields["message"]) for event in events if event.name == "save.coalesced"]
    assert len(messages) == 1 and "save postponed, the agent is not ready yet; " in messages[0]


@pytest.mark.parametrize("when_busy", ["newest", "queue"])
def test_a_best_state_that_is_not_saved_is_reported(
    tmp_path: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch, when_busy: Any
) -> None:
    """The best evaluation came while the agent was starting, and no message stated that ``@best`` lacks its weights. With
    ``when_busy="queue"``, the first save is awaited, and ``best`` has these weights."""
    prepare, begun = Background._prepare, threading.Event()

    def slow(self: Background, *args: Any) -> Any:
        begun.wait(60)
        return prepare(self, *args)

    monkeypatch.setattr(Background, "_prepare", slow)
    if when_busy == "queue":
        threading.Timer(0.3, begun.set).start()
    model, optimizer = make()
    save, limits = relight.best("eval_loss") | relight.every(steps=2), relight.Limits(when_busy=when_busy)
    with relight.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer, save=save, limits=limits) as ckpt:
        for step, loss in enumerate([None, None, 4.0, 3.0, 3.5]):
            one_step(model, optimizer)
            ckpt.step(step, metrics={} if loss is None else {"eval_loss": torch.tensor(loss)})
            if step == 3:
                best = {name: value.clone() for name, value in model.state_dict().items()}
        begun.set()
    warnings = [str(event.fields["message"]) for event in events if "best so far" in str(event.fields.get("message"))]
    assert len(warnings) == (when_busy == "newest")
    if warnings:
        assert warnings[0].startswith("eval_loss 4 is the best so far, and the weights")
    else:
        stored = relight.load(tmp_path / "run", "best:eval_loss:min", only=["model/*"])["model"]
        assert all(torch.equal(stored[name], best[name]) for name in best)
