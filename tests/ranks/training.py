"""A rank that trains: ``python training.py RANK WORLD PORT JSON``, with ``layout``, ``run``, ``steps``, and what should go wrong."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from layouts import Net, flatten, mesh, shard, tensor_parallel
from torch.nn.parallel import DistributedDataParallel

import relight
from relight.ranks.gather import HeldPieces


def build(layout: str) -> torch.nn.Module:
    torch.manual_seed(0)
    net: Any = Net(odd=0)  # tensor parallelism trains even shards alone
    size = dist.get_world_size()
    if layout == "ddp":
        return DistributedDataParallel(net)
    if layout == "fsdp":
        shard(net, mesh(size))
    elif layout in ("flat", "flat_whole"):
        return flatten(net, mesh(size), "FULL_SHARD", keep=layout == "flat")
    elif layout == "tensor_fsdp":
        grid = mesh(size // 2, 2)
        tensor_parallel(net, grid["b"])
        shard(net, grid["a"])
    return net  # type: ignore[no-any-return]


def main() -> None:
    rank, world, port = map(int, sys.argv[1:4])
    options = json.loads(sys.argv[4])
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    net = build(options["layout"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    torch.manual_seed(100 + rank)  # each rank draws its own data
    every = relight.every(steps=options.get("every", 2))
    limits = relight.Limits(deadline_s=options.get("deadline_s", 60.0))
    writer = options.get("writer", "every rank")
    run = options["run"] if writer == "every rank" or not rank else "nowhere://run"
    compact = relight.Compact(**options["compact"]) if "compact" in options else None
    ckpt = relight.Checkpointer(
        run, model=net, optimizer=optimizer, scheduler=scheduler, save=every, keep=relight.keep(last=3), limits=limits, writer=writer,
        compact=compact,
    )  # fmt: skip
    start = ckpt.restore()
    print(json.dumps({"start": start}), flush=True)
    data_ranks = {"tensor_fsdp": world // 2, "same": 1}.get(options["layout"], world)
    for step in range(start, options["steps"]):
        generator = torch.Generator().manual_seed(1000 * step + (rank * data_ranks // world))
        tokens = torch.randint(0, 50, (4, 8), generator=generator)
        noise = torch.randn(()) * 1e-3  # of this rank's own generator: a restore must continue it
        out = net(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(out.reshape(-1, 50), tokens[:, 1:].reshape(-1)) * (
            1 + (0 if data_ranks < world else noise)
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        print(json.dumps({"step": step, "loss": float(loss)}), flush=True)
        if options.get("die_giving", [None, None])[:2] == [rank, step]:
            HeldPieces.source = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        if options.get("kill", [None, None])[:2] == [rank, step]:
            os.kill(os.getpid(), getattr(signal, options["kill"][2]))
        save = ckpt.step(step, loss=float(loss))
        if save is not None and options.get("wait"):
            with contextlib.suppress(relight.RelightError):
                save.wait(60)
            error = save.error
            print(
                json.dumps({"saved": step, "error": error and error.kind, "late": list(getattr(error, "ranks", ()))}),
                flush=True,
            )
        time.sleep(options.get("pause_s", 0.0))
    ckpt.close()
    print(json.dumps({"end": True}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
