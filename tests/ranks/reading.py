"""A rank's program that counts what a restore reads from the store and from the device, and how long it takes.

``python reading.py RANK WORLD PORT PLAN``: the plan is a JSON list of ``[verb, layout, run, options]``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts import by_hand, full, mesh, value_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import relight
from relight.reader import node_shared_read
from relight.reader.chunk_reader import INLINE_BYTES
from relight.testing.counting import CountingStore, but_packs


class Tall(nn.Module):
    """Layers of ``width`` by ``width``, and a small one for each, so that some chunks hold several tensors."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.large = nn.ParameterList(nn.Parameter(torch.empty(width, width)) for _ in range(layers))
        self.small = nn.ParameterList(nn.Parameter(torch.empty(24, 24)) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def spread(layout: str, width: int, layers: int, zero: bool) -> nn.Module:
    """Return the model in a layout: ``rows``, ``columns``, ``fsdp``, ``ddp``, ``plain``."""
    net = Tall(width, layers)
    with torch.no_grad():
        for name, tensor in net.named_parameters():
            tensor.copy_(torch.zeros(tensor.shape) if zero else value_of(name, tuple(tensor.shape)))
    size = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "ddp":
        return DistributedDataParallel(net)
    if layout == "fsdp":
        fully_shard(net, mesh=mesh(size))
    elif layout in ("rows", "columns"):
        by_hand(net, mesh(size), [Shard(0 if layout == "rows" else 1)])  # type: ignore[arg-type]
    return net


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def device_bytes() -> int:
    """Return the bytes that this process has had read from devices so far."""
    text = Path("/proc/self/io").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("read_bytes")).split()[1])


def drop(run: str) -> None:
    """Drop the run's files from the page cache."""
    for path in Path(run).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def warm(run: str) -> None:
    """Read the run's packs into the page cache."""
    for path in Path(run).rglob("pack-*"):
        path.read_bytes()


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def save(layout: str, run: str, *, width: int, layers: int, damage: bool = False) -> dict[str, Any]:
    """Save once. With ``damage``, save a second time and damage that checkpoint's files."""
    ckpt = relight.Checkpointer(run, model=spread(layout, width, layers, zero=False), signals=False, background=False)
    ckpt.restore()
    for step in (1, 2) if damage else (1,):
        newest = ckpt.save(step).id
    ckpt.close(save=False)
    if damage and dist.get_rank() == 0:
        pack = next(Path(run).glob(f"*{newest}*/pack-00001-*"))
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 4
        pack.write_bytes(data)
    barrier()
    return {}


def load(
    layout: str, run: str, *, width: int, layers: int, cold: bool = False, times: int = 1, alone: bool = False
) -> dict[str, Any]:
    """Return what a restore reads and takes.

    ``cold``: the page cache has none of it. ``alone``: no rank lends tensors.
    """
    net = spread(layout, width, layers, zero=True)
    seconds, cpu = [], []
    node_shared_read.INLINE_BYTES = 1 << 62 if alone else INLINE_BYTES
    for _ in range(times):
        ckpt = relight.Checkpointer(run, model=net, signals=False, background=False)
        counted = ckpt._session.store = CountingStore(ckpt._session.store, apart=but_packs)  # type: ignore[assignment]
        if not dist.is_initialized() or dist.get_rank() == 0:
            (drop if cold else warm)(run)
        barrier()
        before, started, used = device_bytes(), time.perf_counter(), time.process_time()
        start = ckpt.restore()
        cpu.append(time.process_time() - used)
        barrier()
        seconds.append(time.perf_counter() - started)
        device = device_bytes() - before
        ckpt.close(save=False)
    needed = sum(local(tensor).nbytes for tensor in net.parameters())
    wrong = []
    if times == 1:
        named = {name.removeprefix("module."): tensor for name, tensor in net.named_parameters()}
        wrong = [
            name
            for name, parameter in named.items()
            if not torch.equal(full(parameter), value_of(name, tuple(parameter.shape)))
        ]
    state = sum(tensor.numel() * tensor.element_size() for tensor in net.parameters())
    return {
        "read": counted.bytes["read"], "device": device, "needed": needed, "state": state, "wrong": wrong, "seconds": seconds, "cpu": cpu,
        "reported": ckpt._progress.resumed.bytes_read, "start": start,
    }  # fmt: skip


VERBS = {"save": save, "load": load}


def main() -> None:
    rank, world, port = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=world)
    for verb, layout, run, options in json.loads(sys.argv[4]):
        print(
            json.dumps({"verb": verb, "layout": layout, "run": run, **VERBS[verb](layout, run, **options)}), flush=True
        )
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
