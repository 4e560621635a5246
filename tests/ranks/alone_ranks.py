"""A rank whose launcher, metrics or settings differ: ``python alone_ranks.py RANK WORLD PORT JSON``.

JSON: ``run``, ``save`` (``every`` or ``best``), ``steps``, and optionally ``fresh``, ``environment`` (of each rank), ``writer``, ``seen``
(a rank, and the step at which it reports ``val_loss``), ``limits`` (constants of ``checkpointer.awaited``). Prints where it began and how
it ended.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

import relight
from relight.checkpointer import awaited


def main() -> None:
    """Restore, train, report."""
    rank, world, port = map(int, sys.argv[1:4])
    options = json.loads(sys.argv[4])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(options.get("environment", [{}] * world)[rank])
    for name, value in options.get("limits", {}).items():
        setattr(awaited, name, value)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    save = relight.every(steps=2) if options["save"] == "every" else relight.best("val_loss")
    seen = options.get("seen", [-1, -1])
    report = {"start": -1, "step": -1, "error": "", "kind": ""}
    try:
        with relight.Checkpointer(
            options["run"], model=torch.nn.Linear(2, 2), save=save, fresh=options.get("fresh", [False] * world)[rank], signals=False,
            background=False, limits=relight.Limits(deadline_s=15), writer=options.get("writer", "every rank"),
        ) as ckpt:  # fmt: skip
            report["start"] = ckpt.restore()
            for step in range(report["start"], options["steps"]):
                dist.all_reduce(torch.zeros(1))
                report["step"] = step
                ckpt.step(step, loss=1.0, **({"val_loss": 1.0} if [rank, step] == seen else {}))
    except Exception as error:
        report.update(error=str(error), kind=type(error).__name__)
    print(json.dumps(report), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
