"""A rank that draws: ``python seeding.py RANK WORLD PORT JSON``.

JSON: ``run``, ``writer``, and ``alike``: ranks that share one seed.

Prints what it restored, and the next draws of its generators. The script has seeded torch's and a handed one by the
share of the work that several ranks have together. Python's generator is unseeded.
"""

from __future__ import annotations

import json
import os
import random
import sys

import torch
import torch.distributed as dist

import relight


def main() -> None:
    """Restore, draw, save."""
    rank, world, port = map(int, sys.argv[1:4])
    options = json.loads(sys.argv[4])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    share = rank // options["alike"]
    torch.manual_seed(100 + share)
    mine = torch.Generator().manual_seed(200 + share)
    model = torch.nn.Linear(4, 4)
    with relight.Checkpointer(
        options["run"] if options["writer"] == "every rank" or not rank else "nowhere://run",
        model=model,
        mine=mine,
        writer=options["writer"],
    ) as ckpt:
        start = ckpt.restore()
        report = {
            "start": start,
            "torch": float(torch.rand(())),
            "mine": float(torch.rand((), generator=mine)),
            "python": random.random(),
        }
        print(json.dumps(report), flush=True)
        ckpt.save(start)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
