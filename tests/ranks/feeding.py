"""A rank that trains on its share of a data set: ``python feeding.py RANK WORLD PORT JSON``, with ``run``, and when to die."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import relight

SAMPLES, EPOCHS = 61, 2


class Numbers(Dataset):
    """Samples that have their own number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, place: int) -> tuple[int, torch.Tensor]:
        return place, torch.sin(torch.arange(4.0) + place)


def make_loader(world: int) -> tuple[Any, DistributedSampler]:
    """Return a loader and its sampler. A step has the same number of samples with any number of ranks."""
    data = Numbers()
    sampler = DistributedSampler(data, seed=3)
    return StatefulDataLoader(
        data, batch_size=12 // world, sampler=sampler, num_workers=1, persistent_workers=True
    ), sampler


def main() -> None:
    rank, world, port = map(int, sys.argv[1:4])
    options = json.loads(sys.argv[4])
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    net = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(net.parameters())
    loader, sampler = make_loader(world)
    progress = {"epoch": 0}
    ckpt = relight.Checkpointer(
        options["run"], model=net, optimizer=optimizer, data=loader, progress=progress, save=relight.every(steps=1)
    )
    step = ckpt.restore()
    print(json.dumps({"start": step}), flush=True)
    for epoch in range(progress["epoch"], EPOCHS):
        progress["epoch"] = epoch
        sampler.set_epoch(epoch)
        for places, values in loader:
            print(json.dumps({"step": step, "epoch": epoch, "places": places.tolist()}), flush=True)
            net(values).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if options.get("kill") == [rank, step]:
                os.kill(os.getpid(), signal.SIGKILL)
            ckpt.step(step)
            step += 1
    ckpt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
