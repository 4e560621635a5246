"""A small training on two or more ranks that fails according to a plan, each failure once.

``job.py STORE STEPS PLAN OUT``.

The plan is a JSON list of ``{"rank", "step", "what"}``: at the step's begin, or with ``behind`` after its update. OUT
gets a line a step from rank 0, and ``OUT.end`` a hash of the weights at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import math
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import relight


def fail(what: str, model: nn.Module) -> None:
    """Fail in the given way."""
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "abort":
        os.abort()
    elif what == "segv":
        ctypes.string_at(0)
    elif what == "exit":
        os._exit(3)
    elif what == "type":
        len(5)  # type: ignore[arg-type]
    elif what == "value":
        raise ValueError("an invalid value")
    elif what == "memory":
        raise MemoryError
    elif what == "device memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    elif what == "full":
        raise OSError(28, "No space left on device")
    elif what == "lock":
        threading.Event().wait()
    elif what == "loader":
        raise RuntimeError("DataLoader worker (pid 4711) exited unexpectedly with exit code 1")
    elif what == "slow":
        time.sleep(8)
    elif what == "evaluate":
        with relight.phase("evaluating", expected_s=10):
            time.sleep(12)
    elif what == "flip":
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1e-3
    elif what == "jump":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(30.0)
    else:
        raise AssertionError(what)


def main() -> None:
    """Train, and fail according to the plan."""
    store, steps, plan_file, out = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    plan = json.loads(plan_file.read_text())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    every = int(os.environ.get("JOB_EVERY", "5"))
    if standby := os.environ.get("JOB_STANDBY", ""):
        print(f"built {'as a rank' if 'RANK' in os.environ else 'ahead'}", flush=True)
        if standby == "unfit":
            print("for rank", os.environ["RANK"])
        relight.standby()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    random.seed(rank)
    torch.manual_seed(rank)
    speed = os.environ.get("JOB_BYTES_PER_SECOND")
    ckpt = relight.Checkpointer(
        store / "run",
        model=model,
        optimizer=optimizer,
        ballast=torch.ones(int(os.environ.get("JOB_BALLAST", "1"))),
        limits=relight.Limits(bytes_per_second=float(speed) if speed else None),
        save=relight.every(steps=every),
        background=os.environ.get("JOB_BACKGROUND", "1") == "1",
    )

    def fail_as_planned(step: int, updated: bool) -> None:
        for number, failure in enumerate(plan):
            here = (failure["step"], failure["rank"], failure.get("behind", False)) == (step, rank, updated)
            mark = plan_file.with_name(f"{plan_file.name}.{number}")
            if here and failure["what"] != "poison" and not mark.exists():
                mark.touch()
                fail(failure["what"], model)

    with contextlib.nullcontext() if os.environ.get("JOB_PLAIN") else ckpt:
        start = ckpt.restore()
        for step in range(start, steps):
            fail_as_planned(step, False)
            generator = torch.Generator().manual_seed(1000 * step + rank)
            x = torch.randn(8, 16, generator=generator)
            if any(
                failure["what"] == "poison" and failure["step"] == step and failure["rank"] == rank for failure in plan
            ):
                x = x * math.inf
            if os.environ.get("JOB_NOISE"):  # of the rank's own generators, which a resume must continue
                x = x + 0.01 * torch.randn(8, 16) * random.random()
            if ckpt.should_skip(step):
                continue
            if os.environ.get("JOB_STEP_S"):
                time.sleep(float(os.environ["JOB_STEP_S"]))
            optimizer.zero_grad()
            loss = (model(x) - x.sin()).square().mean()
            loss.backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            if not os.environ.get("JOB_OWN_LOSS"):
                dist.all_reduce(loss.detach())
            optimizer.step()
            fail_as_planned(step, True)
            if rank == 0:
                with out.open("a") as file:
                    file.write(f"{step} {loss.item():.9g} {os.environ['TORCHELASTIC_RESTART_COUNT']}\n")
            ckpt.step(step, loss=loss)
    if rank == 0:
        data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        Path(f"{out}.end").write_text(hashlib.sha256(data).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
