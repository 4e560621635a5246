"""A rank of a job in which rank 0 writes slowly for all: ``slow_ranks.py RANK WORLD PORT JSON``.

JSON: ``run``, ``background`` and ``silent`` (whether rank 0 gives no sign while its agent writes). Prints the error of each save, and
the seconds until its outcome was known.
"""

from __future__ import annotations

import contextlib
import json
import os
import time

import rank_script
import torch
import torch.distributed as dist

import relight
from relight.checkpointer.rank_0 import BackgroundForAll

DEADLINE_S = 3.0
SAVE_S = 8.0


def main() -> None:
    """Save twice, report."""
    rank, options = rank_script.begin()
    if options["silent"]:
        BackgroundForAll._still_writes = lambda self: None  # type: ignore[method-assign]
    state = {"tensor": torch.rand(1_000_000)}  # 4 MB
    ckpt = relight.Checkpointer(
        options["run"] if not rank else "nowhere://run", state=state, signals=False, writer="rank 0",
        background=options["background"], limits=relight.Limits(deadline_s=DEADLINE_S, bytes_per_second=4e6 / SAVE_S),
    )  # fmt: skip
    ckpt.restore()
    for step in range(1 if options["silent"] else 2):
        began = time.monotonic()
        save = ckpt.save(step, block=False)
        with contextlib.suppress(relight.RelightError):
            save.wait(60)
        kind = "" if save.error is None else save.error.kind
        print(json.dumps({"step": step, "kind": kind, "took_s": time.monotonic() - began}), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
