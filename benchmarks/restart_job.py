"""The job of ``benchmarks.restart``, ``restart_job.py WAY FOLDER PARAMETERS``: two ranks and a state of that size.

Each line of FOLDER/out: step, life, the monotonic clock. FOLDER/pid-RANK has each rank's process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

EVERY = int(os.environ.get("EVERY", "10"))


def main() -> None:
    """Train, for ever."""
    way, folder, parameters = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = 1024
    model = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(max(1, parameters // width**2)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    for parameter in model.parameters():  # all of them have moments
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    if "standby" in way:
        import relight

        relight.standby()
    rank = int(os.environ["RANK"])
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    dist.init_process_group("gloo")
    start, save = WAYS[way.split(",")[0]](folder, rank, model, optimizer)
    for step in range(start, 1_000_000):
        loss = model[step % len(model)](torch.randn(4, width)).square().mean()
        loss.backward()
        gradient = model[step % len(model)].weight.grad
        dist.all_reduce(gradient)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
        if rank == 0:
            with (folder / "out").open("a") as file:
                file.write(f"{step} {os.environ['TORCHELASTIC_RESTART_COUNT']} {time.monotonic()}\n")
        save(step)


Start = tuple[int, Callable[[int], object]]


def with_torch(folder: Path, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Start:
    """Save with ``torch.save`` on rank 0, renamed into place. All ranks load."""
    path, start = folder / "checkpoint.pt", 0
    if path.exists():
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"] + 1

    def save(step: int) -> None:
        if step % EVERY == 0:
            if rank == 0:
                torch.save(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{path}.new"
                )
                os.replace(f"{path}.new", path)
            dist.barrier()

    return start, save


def with_dcp(folder: Path, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Start:
    """``torch.distributed.checkpoint``, each save in a directory of its own."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    folders = sorted(
        (path for path in folder.glob("dcp-*") if (path / ".metadata").exists()), key=lambda path: int(path.name[4:])
    )
    start = 0
    if folders:
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=folders[-1])
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        start = int(folders[-1].name[4:]) + 1

    def save(step: int) -> None:
        if step % EVERY == 0:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"dcp-{step}")

    return start, save


def with_relight(folder: Path, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Start:
    """Save with Relight's defaults."""
    import relight

    ckpt = relight.Checkpointer(
        folder / "store" / "run",
        model=model,
        optimizer=optimizer,
        save=relight.every(steps=EVERY),
        keep=relight.keep(last=2),
    )
    return ckpt.restore(), ckpt.step


WAYS: dict[str, Callable[[Path, int, nn.Module, torch.optim.Optimizer], Start]] = {
    "torch.save": with_torch,
    "DCP": with_dcp,
    "Relight": with_relight,
}

if __name__ == "__main__":
    main()
