"""One of the ranks that save a decoder sharded by FSDP: ``python sharded_decoder.py RANK WORLD PORT RUN STEP…``."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from small_decoder import Decoder, fill
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import relight


def main() -> None:
    """Save the values of each step."""
    rank, world, port, run, *steps = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=int(world))
    model = Decoder()
    grid = init_device_mesh("cpu", (int(world),))
    for layer in model.layers:
        fully_shard(layer, mesh=grid)
    fully_shard(model, mesh=grid)
    with relight.Checkpointer(run, model=model, background=False, save=relight.every(steps=1)) as ckpt:
        ckpt.restore()
        for step in map(int, steps):
            with torch.no_grad():
                fill(model, step)
            ckpt.step(step)
    dist.destroy_process_group()


main()
