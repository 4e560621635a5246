"""A rank with its own launcher, metrics or settings: ``python alone_ranks.py RANK WORLD PORT JSON``.

JSON: ``run``, ``save`` (``every`` or ``best``), ``steps``, and optionally ``fresh``, ``environment`` (of each rank), ``writer``, ``seen``
(a rank, and the step at which it reports ``val_loss``), ``limits`` (constants of ``checkpointer.awaited``), ``every`` (each rank's steps between saves), ``odd`` (the step from which
each rank's model gives an entry that it does not take back), ``also_best`` (a rank that saves best values, too), ``exits`` (the step after which all ranks call ``sys.exit()``). Prints where it began and how it ended.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

import relight
from relight.checkpointer import awaited
from relight.observe import subscribe


class Gives(torch.nn.Linear):
    """Its state has an entry that load_state_dict does not take, once ``odd`` is set."""

    odd = False

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.odd:
            destination[f"{prefix}norm"] = self.weight.detach().norm()


def main() -> None:
    """Restore, train, report."""
    rank, world, port = map(int, sys.argv[1:4])
    options = json.loads(sys.argv[4])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(options.get("environment", [{}] * world)[rank])
    for name, value in options.get("limits", {}).items():
        setattr(awaited, name, value)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    save = (
        relight.every(steps=options.get("every", [2] * world)[rank])
        if options["save"] == "every"
        else relight.best("val_loss")
    )
    if rank == options.get("also_best"):
        save = save | relight.best("val_loss")
    seen = options.get("seen", [-1, -1])
    odd = options.get("odd", [1 << 30] * world)[rank]
    model = Gives(2, 2)
    model.odd = odd == 0
    unsaved = list[int]()
    subscribe(lambda event: unsaved.append(event.fields["step"]) if event.name == "save.failed" else None)
    report = {"start": -1, "step": -1, "error": "", "kind": ""}
    try:
        with relight.Checkpointer(
            options["run"],
            model=model,
            save=save,
            fresh=options.get("fresh", [False] * world)[rank],
            signals=False,
            background=False,
            limits=relight.Limits(deadline_s=15),
            writer=options.get("writer", "every rank"),
        ) as ckpt:
            report["start"] = ckpt.restore()
            for step in range(report["start"], options["steps"]):
                dist.all_reduce(torch.zeros(1))
                report["step"] = step
                model.odd = step >= odd
                ckpt.step(step, loss=1.0, **({"val_loss": 1.0} if [rank, step] == seen else {}))
                if step == options.get("exits"):
                    sys.exit(0)
    except (Exception, SystemExit) as error:
        report.update(error=str(error), kind=type(error).__name__)
    report["unsaved"] = unsaved
    print(json.dumps(report), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
