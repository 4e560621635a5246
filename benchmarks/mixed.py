"""``python -m benchmarks.mixed``: stored size of real checkpoints of training in mixed precision.

A GPT with bfloat16 weights, float32 masters and AdamW is saved by a ``Checkpointer`` in the background, with codecs on
and nothing else special: at first by itself, then after a number of further steps, as differences from the save before.
The result is all stored bytes over the state's bytes, in total and by kind of tensor. Each checkpoint is restored to
the bit before it counts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

import relight
from benchmarks.codecs import APART, Training
from benchmarks.machine import describe
from relight.catalog import Run
from relight.reader.storage_stats import stored_as
from relight.store import LocalStore


def measure(folder: Path, size: str, warm: int, apart: int) -> list[dict[str, Any]]:
    """Three saves, so many steps apart."""
    training = Training(size, mixed=True)
    rows = []
    with relight.Checkpointer(
        folder / "run",
        model=training.model,
        optimizer=training.optimizer,
        state={"masters": training.masters},
        background=True,
        compact=relight.Compact(codecs="always", full_every=8),
    ) as ckpt:
        ckpt.restore()
        for step in range(1, warm + 2 * apart + 1):
            training.step()
            if step in (warm, warm + apart, warm + 2 * apart):
                ckpt.save(step).wait(600)
                rows.append({"step": step, **stored(folder, training)})
    return rows


def stored(folder: Path, training: Training) -> dict[str, Any]:
    """Return what the newest checkpoint stores, in total and by kind, after a bit-exact restore."""
    run = Run(LocalStore(folder), "run")
    newest = run.history().live[-1]
    loaded = relight.load(folder / "run")
    again = [loaded["model"][name] for name, _ in training.model.named_parameters()], loaded["masters"]
    for wanted, restored in zip((training.live, training.masters), again, strict=True):
        for before, after in zip(wanted, restored, strict=True):
            if not torch.equal(before.detach().view(torch.uint8), after.view(torch.uint8)):
                raise AssertionError("what was stored is not what was there")
    kinds = stored_as(run.open(newest))
    return {
        "logical_bytes": newest.body.logical_bytes, "of_it": newest.body.new_bytes / newest.body.logical_bytes,
        "differences": sum(kind.differences for kind in kinds), "chunks": sum(kind.chunks for kind in kinds),
        "kinds": {f"{kind.dtype} {kind.role}": kind.stored_bytes / kind.bytes for kind in kinds if kind.bytes > 1 << 20},
    }  # fmt: skip


def main() -> None:
    """Train, save, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["S", "M"], default="S")
    parser.add_argument("--warm", type=int, default=200)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {"size": options.size, "warm": options.warm, "machine": describe(options.dir), "apart": {}}
    for apart in APART:
        folder = Path(tempfile.mkdtemp(prefix="mixed-", dir=options.dir))
        try:
            report["apart"][apart] = rows = measure(folder, options.size, options.warm, apart)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for row in rows:
            kinds = ", ".join(f"{kind} {share:.3f}" for kind, share in row["kinds"].items())
            of = f"{row['differences']} of {row['chunks']} chunks are differences"
            print(f"{apart:4} steps apart, step {row['step']}: {row['of_it']:.3f} stored ({kinds}; {of})", flush=True)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
