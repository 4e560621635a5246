"""One rank of several is killed, stopped, or has a full disk, at a random point of a random save. ``make ranks``; some runs are in the suite.

Each trial forks the ranks of a job from a process that has imported torch once. They train without exchanges of their own, so that only
Relight could hold them up, and save every other step. What must hold for the others:

- they do all their steps, and no call of the Checkpointer takes longer than the deadline and what a busy machine adds;
- if a save waited for the lost rank, its error names the rank;
- every checkpoint verifies, and holds its own step's values in every element, from every rank;
- every save that was reported as durable exists; a new job of another size restores the newest one, and saves.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import logging
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import relight
from proofs.report import Report, engine_parser, run_engine
from relight.agent import reach
from relight.checkpointer.background import Background
from relight.commit import multi_rank
from relight.ranks.several import SeveralRanks
from relight.snapshot import Snapshot
from relight.store.durable import NewFile

DEADLINE_S, SLACK_S = 2.0, 6.0
STARTS = 3
AFTERWARDS_S = 20.0
"""Seconds that the next job has for each save.

It proves that saves succeed, not how fast they are on a busy machine.
"""
STEPS, WIDTH = 12, 64
WAYS = ("killed", "stopped", "disk full")
PHASES: dict[str, tuple[Any, str]] = {
    "before the snapshot": (SeveralRanks, "capture"),
    "during the copy": (Snapshot, "help"),
    "before the part": (multi_rank, "write_part"),
    "during the write": (NewFile, "write_at"),
    "after the part": (multi_rank, "_proven"),
    "during the commit": (multi_rank, "_complete"),
    "at the record": (multi_rank, "_append"),
    "while another commits": (multi_rank, "_committed"),
    "at the report": (Background, "_finished"),
}
IN_TRAINER = frozenset(("before the snapshot", "during the copy", "at the report"))
"""Points that a trainer passes while an agent writes."""


class Board:
    """Shared memory with these of each rank: its last step, its longest call in milliseconds, the last durable step that it
    knows, and the numbers of errors that named the odd rank and of other errors."""

    FIELDS = 5

    def __init__(self, world: int) -> None:
        self._map = mmap.mmap(-1, 4096)
        for rank in range(world):
            for field in range(self.FIELDS):
                self.put(rank, field, -1 if field in (0, 2) else 0)

    def put(self, rank: int, field: int, value: int) -> None:
        struct.pack_into("q", self._map, 8 * (rank * self.FIELDS + field), value)

    def get(self, rank: int, field: int) -> int:
        return int(struct.unpack_from("q", self._map, 8 * (rank * self.FIELDS + field))[0])


def fill(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
            optimizer.state[parameter]["exp_avg"].fill_(step)


def ambush(way: str, phase: str, saves: int) -> None:
    """Inject the failure when this rank passes that point for the ``saves``-th time."""
    home, name = PHASES[phase]
    usual: Callable[..., Any] = getattr(home, name)
    left = [saves]

    def at_last(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            if way == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif way == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                raise (
                    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    if name == "write_at"
                    else relight.NoSpace("the disk is full")
                )
        return usual(*args, **options)

    setattr(home, name, at_last)


def rank_main(
    url: str, rank: int, world: int, meeting: str, board: Board, odd: tuple[int, str, str, int] | None, background: bool
) -> None:
    """Train and save. ``odd``: the rank, its failure, the point and the number of the save."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(meeting, world), rank=rank, world_size=world)
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    noticed: list[str] = []
    relight.observe.subscribe(
        lambda event: noticed.append(str(event.fields)) if event.name in ("save.failed", "ranks.late") else None
    )
    limits = relight.Limits(deadline_s=DEADLINE_S if odd is not None else AFTERWARDS_S)
    ckpt = relight.Checkpointer(
        url, model=model, optimizer=optimizer, save=relight.every(steps=2), keep=relight.keep(last=3), signals=False, limits=limits,
        background=background,
    )  # fmt: skip
    start = ckpt.restore()
    if start:
        value = float(model.weight.detach().min())
        assert value == float(model.weight.detach().max()) == start - 1, (value, start)
    for step in range(start, start + STEPS):
        if odd is not None and odd[0] == rank and step == start + 1:  # errors at the start are reported to the caller
            ambush(*odd[1:])
        optimizer.step()
        fill(model, optimizer, step)
        before = time.monotonic()
        save = ckpt.step(step)
        if save is not None and background:
            with contextlib.suppress(relight.RelightError):
                save.wait(2 * DEADLINE_S)
        took = time.monotonic() - before
        board.put(rank, 1, max(board.get(rank, 1), int(took * 1000)))
        if save is not None and save.done:
            board.put(rank, 2, step)
        if save is not None and save.error is not None:
            named = odd is not None and f"rank {odd[0]}" in str(save.error)
            board.put(rank, 3 if named else 4, board.get(rank, 3 if named else 4) + 1)
        board.put(rank, 0, step)
    if odd is None:
        fill(model, optimizer, start + STEPS)
        save = ckpt.save(start + STEPS)
        board.put(rank, 2, start + STEPS if save.done else -1)
        if not save.done:
            print(f"rank {rank}: step {start + STEPS} is not durable: {save.error}", file=sys.stderr, flush=True)
    before = time.monotonic()
    ckpt.close(save=False)
    board.put(rank, 1, max(board.get(rank, 1), int((time.monotonic() - before) * 1000)))


def fork(*args: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    faulthandler.dump_traceback_later(60, exit=True)
    try:
        logging.disable(logging.CRITICAL)
        rank_main(*args)
        status = 0
    except BaseException as error:
        print(f"rank {args[1]}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(status)


def job(url: str, world: int, odd: tuple[int, str, str, int] | None, background: bool) -> tuple[Board, list[int]]:
    """Run the ranks. Return their records and exit statuses. The odd rank is killed after the others have ended."""
    board, meeting = Board(world), f"{url}-{time.monotonic_ns()}.meeting"
    Path(url).parent.mkdir(parents=True, exist_ok=True)
    pids = [fork(url, rank, world, meeting, board, odd, background) for rank in range(world)]
    statuses = [0] * world
    for rank in sorted(range(world), key=lambda rank: odd is not None and rank == odd[0]):
        if odd is not None and rank == odd[0] and odd[1] == "stopped":
            os.kill(pids[rank], signal.SIGKILL)
        statuses[rank] = os.waitpid(pids[rank], 0)[1]
    with contextlib.suppress(FileNotFoundError):
        os.unlink(meeting)
    return board, statuses


def settle(url: str) -> None:
    """Wait until the run's agent has written all its saves."""
    store, _, run = url.rpartition("/")
    agent = reach(store, run)
    if agent is not None:
        with contextlib.suppress(relight.RelightError):
            for snapshot in agent.held(20):
                snapshot.memory.close()
        agent.bye()
        agent.close()


def check(url: str, durable: int) -> list[str]:
    """Return the violations in the store."""
    wrong = []
    try:
        store = relight.open(url)
        checkpoints = {checkpoint.step: checkpoint.id for checkpoint in store.checkpoints()}
    except relight.CheckpointNotFound:
        checkpoints = {}
    if durable > max(checkpoints, default=-1):
        wrong.append(
            f"step {durable} was reported as durable, the newest checkpoint is step {max(checkpoints, default=-1)}"
        )
    for step, checkpoint_id in checkpoints.items():
        try:
            tree = relight.load(url, checkpoint_id)
        except relight.RelightError as error:
            wrong.append(f"step {step} does not load: {error}")
            continue
        tensors = [*tree["model"].values(), *(moments["exp_avg"] for moments in tree["optimizer"]["state"].values())]
        if any(float(tensor.min()) != step or float(tensor.max()) != step for tensor in tensors):
            wrong.append(f"step {step} holds values of another step")
    return wrong


def trial(seed: int, base: str) -> tuple[str, list[str]]:
    rng = random.Random(seed)
    world = (2, 4)[seed % 2]
    way = WAYS[seed // 2 % 3]
    background = bool(seed // 6 % 2)
    phases = [phase for phase in PHASES if not background or phase in IN_TRAINER]
    phases = [phase for phase in phases if background or phase not in ("during the copy", "at the report")]
    phases = [phase for phase in phases if way != "disk full" or phase in ("before the part", "during the write")] or [
        "before the snapshot"
    ]
    phase = phases[seed // 12 % len(phases)]
    way = "killed" if background and way == "disk full" else way
    odd = (rng.randrange(world), way, phase, rng.randint(1, 4))
    url = f"{base}/s{seed}/run"
    wrong: list[str] = []
    for _ in range(STARTS):
        board, statuses = job(url, world, odd, background)
        if any(board.get(rank, 0) >= 0 for rank in range(world)):
            break
        # the machine was too slow for a job to begin, so nothing was tested
        shutil.rmtree(f"{base}/s{seed}", ignore_errors=True)
    for rank in range(world):
        if rank == odd[0] and way != "disk full":
            continue
        if statuses[rank] != 0 or board.get(rank, 0) != STEPS - 1:
            wrong.append(f"rank {rank} ended with {statuses[rank]} after step {board.get(rank, 0)}")
        if board.get(rank, 1) > (2 * DEADLINE_S + SLACK_S) * 1000:
            wrong.append(f"rank {rank} was held up for {board.get(rank, 1)} ms")
    settle(url)
    durable = max(board.get(rank, 2) for rank in range(world))
    wrong += check(url, durable)
    second, statuses = job(url, 3 if world == 2 else 1, None, background)
    if any(statuses):
        wrong.append(f"the next job failed: {statuses}")
    settle(url)
    wrong += check(url, second.get(0, 2))
    if second.get(0, 2) <= durable:
        wrong.append("the next job saved nothing")
    shutil.rmtree(f"{base}/s{seed}", ignore_errors=True)
    where = "agent" if background else "trainer"
    return f"{way} {phase}, 1 of {world}, {where} writes", wrong


def storm(count: int, seed: int) -> Report:
    """Run ``count`` trials."""
    torch.set_num_threads(1)  # a thread pool would not survive the forks
    report = Report("trials", seed, "--seed {} --count 1", expected=count)
    with report.timed(), tempfile.TemporaryDirectory(prefix="relight-storm-") as base:
        for number in range(seed, seed + count):
            kind, wrong = trial(number, base)
            report.add(str(number), kind, wrong, kind)
    return report


if __name__ == "__main__":
    command = engine_parser("tests.ranks.storm", __doc__, 500)
    sys.exit(run_engine(command, lambda options: storm(options.count, options.seed)))
