"""Kills at random moments and in each phase of the hand-over: the trainer, its agent, or both, from a seed. ``make storm``; a slice is in
the suite.

Each trial forks a trainer from a process that has imported torch once. It saves a state with the step's number in every element, as fast
as it can, and writes into shared memory what it was promised: which steps were sealed, which durable. After a random time SIGKILL comes; in
every other trial the trainer itself sends it, at a certain point of a certain save. What must hold then:

- the trainer alone was killed: every save that was sealed is a checkpoint once the agent has ended;
- the agent was killed: training continues with another agent, and a later save becomes durable;
- always: a save that was reported as durable is a checkpoint; every checkpoint verifies, and holds its own step's values in every element;
  the next trainer resumes from the newest; in the end there is no agent, and nothing in the store but what was committed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from pathlib import Path

os.environ["RELIGHT_BACKGROUND"] = "1"

import logging

import psutil
import torch

import relight
from proofs.report import Report, engine_parser, run_engine
from relight.agent import Agent, reach
from relight.arena import Slot
from relight.checkpointer import background
from relight.checkpointer.background import Background
from relight.snapshot import Snapshot

KEPT = 3
WAIT_S = 30.0
VICTIMS = ("trainer", "agent", "both")
PHASES: dict[str, tuple[type, str, bool, bool]] = {
    "slot begun": (Slot, "begin", True, False),
    "request there": (Slot, "announce", True, False),
    "agent follows": (Agent, "begin", True, False),
    "half copied": (Snapshot, "help", True, False),
    "all copied": (Slot, "seal", False, False),
    "sealed": (Slot, "seal", True, True),
    "agent notified": (Agent, "save", True, True),
    "trainer notified": (Background, "_finished", False, True),
}
"""Class and method, whether the kill comes after it (else before it), and whether the save is sealed by then."""
FOLLOWED_WIDTH = 1500


def state(step: int, width: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer with moments, with one number in all elements."""
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    fill(model, optimizer, step)
    return model, optimizer


def fill(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set every element to the step's number, as an optimizer would: in place, after the hook."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
            optimizer.state[parameter]["exp_avg"].fill_(step)
            optimizer.state[parameter]["exp_avg_sq"].fill_(step)


def arm(phase: str, victim: str, saves: int, promises: Promises, first: int) -> None:
    """Let this process kill ``victim`` at that point of its ``saves``-th save. The first save is of step ``first``.

    Training may be one step further by then, but the sealed save is that one.
    """
    kind, name, after, sealed = PHASES[phase]
    usual = getattr(kind, name)
    calls = saves * 15 if name == "help" else saves
    left = [calls]

    def at_last(self: object, *args: object) -> object:
        left[0] -= 1
        if left[0] == 0 and not after:
            kill()
        result = usual(self, *args)
        if left[0] == 0 and after:
            kill()
        return result

    def kill() -> None:
        if sealed:
            promises.put(0, max(first + saves - 1, promises.get()[0]))
        promises.put(3, promises.get()[1])
        if victim in ("agent", "both"):
            for agent in agents_of(os.getpid()):
                agent.kill()
        if victim in ("trainer", "both"):
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(kind, name, at_last)


class Promises:
    """Shared memory with the newest sealed, durable and begun steps, and the durable step at the kill."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 4096)
        self._map[:32] = struct.pack("4q", -1, -1, -1, -1)

    def put(self, index: int, value: int) -> None:
        struct.pack_into("q", self._map, 8 * index, value)

    def get(self) -> tuple[int, int, int, int]:
        return struct.unpack("4q", self._map[:32])  # type: ignore[return-value]


def trainer(run: str, promises: Promises, width: int, budget_s: float, ambush: tuple[str, str, int] | None) -> None:
    """Save until killed or out of time. ``ambush``: phase, victim, number of the save."""
    torch.set_num_threads(1)
    model, optimizer = state(0, width)
    ckpt = relight.Checkpointer(run, model=model, optimizer=optimizer, keep=relight.keep(last=KEPT), signals=False)
    step = ckpt.restore()
    if step:
        weight = model.weight.detach()
        assert float(weight.min()) == float(weight.max()) == step - 1, "the restored state mixes steps"
    if ambush is not None:
        arm(*ambush, promises, step)
    # counted from here: the start takes seconds on a busy machine, and the kill waits for the first save
    ends = time.monotonic() + budget_s
    while time.monotonic() < ends:
        optimizer.step()  # its hook finishes the current copy first; the gradients are zeros
        fill(model, optimizer, step)
        save = ckpt.save(step, block=False)
        with contextlib.suppress(relight.RelightError):
            save.wait(WAIT_S, until="sealed")
            promises.put(0, step)
            if step % 3 == 0:
                save.wait(WAIT_S)
                promises.put(1, step)
        promises.put(2, step)
        step += 1
    for _ in range(3):  # on a busy machine the kill may hit this save; its handle then has an error
        ckpt.barrier()
        fill(model, optimizer, step)
        if ckpt.save(step).done:
            promises.put(1, step)
            break
        step += 1
    ckpt.close(save=False)


def fork(run: str, promises: Promises, width: int, budget_s: float, ambush: tuple[str, str, int] | None = None) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    faulthandler.dump_traceback_later(2 * WAIT_S, exit=True)
    try:
        logging.disable(logging.CRITICAL)
        trainer(run, promises, width, budget_s, ambush)
        status = 0
    except BaseException as error:
        print(f"trainer: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(status)


def agents_of(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [child for child in psutil.Process(pid).children() if "relight.agent.server" in child.cmdline()]
    return []


def settle(store: str, run: str) -> bool:
    """Wait until the run's agent has written all its saves. Return whether it did in time."""
    agent = reach(store, run)
    if agent is None:
        return True
    try:
        for memory_slot in agent.held(WAIT_S):
            memory_slot.memory.close()
        agent.bye()
        return True
    except relight.RelightError:
        return True  # it died meanwhile, so nothing is being written
    finally:
        agent.close()


def check(url: str, run: str, promises: Promises, victim: str) -> list[str]:
    """Return the violations."""
    wrong: list[str] = []
    sealed, durable, *_ = promises.get()
    ids: dict[int, str] = {}
    with contextlib.suppress(relight.CheckpointNotFound):
        ids = {checkpoint.step: checkpoint.id for checkpoint in relight.open(f"{url}/{run}").checkpoints()}
    newest = max(ids, default=-1)
    if durable > newest:
        wrong.append(f"step {durable} was reported as durable, the newest checkpoint is step {newest}")
    if victim == "trainer" and sealed > newest:
        wrong.append(f"step {sealed} was sealed and the trainer killed, the newest checkpoint is step {newest}")
    for step in ids:
        try:
            tree = relight.load(f"{url}/{run}", step)
        except relight.RelightError as error:
            if is_retired(
                url, run, step
            ):  # since the list was made: an agent that outlives its trainer applies the retention
                continue
            wrong.append(f"step {step} does not load: {error}")
            continue
        moments = tree["optimizer"]["state"].values()
        tensors = [*tree["model"].values(), *(moment[key] for moment in moments for key in ("exp_avg", "exp_avg_sq"))]
        if any(float(tensor.min()) != step or float(tensor.max()) != step for tensor in tensors):
            wrong.append(f"step {step} holds values of another step")
    return wrong


def is_retired(url: str, run: str, step: int) -> bool:
    """Return whether the run has ``KEPT`` newer checkpoints, and not this one any more."""
    steps = {checkpoint.step for checkpoint in relight.open(f"{url}/{run}").checkpoints()}
    return step not in steps and len([other for other in steps if other > step]) >= KEPT


def trial(seed: int, base: str) -> tuple[str, list[str]]:
    """Run one kill and the attempt after it. Return the victim, the time and the violations."""
    rng = random.Random(seed)
    victim = VICTIMS[seed % 3]
    phase = [*PHASES][seed // 6 % len(PHASES)] if seed // 3 % 2 else ""
    url, run = str(Path(base) / f"s{seed}"), "run"
    promises, width = Promises(), FOLLOWED_WIDTH if phase else rng.choice((64, 300, FOLLOWED_WIDTH))
    ambush = (phase, victim, rng.randint(1, 4)) if phase else None
    one_slot = random.Random(f"slots {seed}").random() < 0.5
    background.ONE_SLOT_FROM = (
        0 if one_slot else 1 << 62
    )  # the trainers are forked; a save that is due too soon adds the second
    pid = fork(f"{url}/{run}", promises, width, WAIT_S if victim != "agent" else 6.0, ambush)
    wrong: list[str] = []
    if not phase:
        kill_at_random(rng, pid, victim, promises)
    _, status = os.waitpid(pid, 0)
    if phase and victim != "agent" and status != signal.SIGKILL:
        wrong.append(f"the trainer did not die as it should: status {status}")
    if victim == "agent":
        if status != 0:
            wrong.append(f"training did not continue after its agent was killed: status {status}")
        elif promises.get()[1] <= promises.get()[3]:
            wrong.append("no save became durable after the agent was killed")
    settle(url, run)
    wrong += check(url, run, promises, victim)
    second = Promises()
    _, status = os.waitpid(fork(f"{url}/{run}", second, width, 0.15), 0)
    if status != 0:
        wrong.append(f"the next trainer failed: status {status}")
    settle(url, run)
    wrong += check(url, run, second, "none")
    left = [
        str(path.relative_to(url)) for path in Path(url).rglob("*") if ".tmp-" in path.name or ".probe-" in path.name
    ]
    if left:
        wrong.append(f"files left: {left[:3]}")
    ends = time.monotonic() + 10
    while (agent := reach(url, run)) is not None and time.monotonic() < ends:
        agent.bye()
        agent.close()
        time.sleep(0.05)
    if agent is not None:
        wrong.append("an agent is left")
    shutil.rmtree(url, ignore_errors=True)
    return f"{victim}, {phase or 'at random'}, {'one slot first' if one_slot else 'two slots'}", wrong


def kill_at_random(rng: random.Random, pid: int, victim: str, promises: Promises) -> None:
    """Draw the time of a kill: mostly during saves, otherwise while the agent is starting."""
    begun = time.monotonic()
    if rng.random() < 0.8:
        while promises.get()[2] < 0 and time.monotonic() - begun < WAIT_S:
            time.sleep(0.002)
    time.sleep(rng.random() ** 2 * 0.3)
    promises.put(3, promises.get()[1])
    agents = agents_of(pid)
    if victim in ("agent", "both"):
        for agent in agents:
            with contextlib.suppress(psutil.Error):
                agent.kill()
    if victim in ("trainer", "both"):
        os.kill(pid, signal.SIGKILL)


def storm(count: int, seed: int) -> Report:
    """Run ``count`` trials."""
    torch.set_num_threads(1)  # a thread pool would not survive the forks
    report = Report("kills", seed, "--seed {} --count 1", expected=count)
    with report.timed(), tempfile.TemporaryDirectory(prefix="relight-storm-") as base:
        for number in range(seed, seed + count):
            kind, wrong = trial(number, base)
            report.add(str(number), kind, wrong, kind)
    return report


if __name__ == "__main__":
    command = engine_parser("tests.agent.storm", __doc__, 500)
    sys.exit(run_engine(command, lambda options: storm(options.count, options.seed)))
