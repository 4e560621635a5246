"""A day's worth of saves in minutes: the resident memory of trainer and agent stays flat, and so do descriptors and threads. ``make soak``."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["RELIGHT_BACKGROUND"] = "1"

import psutil
import torch

import relight

GROWTH_BYTES = 4 << 20
"""Between the first quarter's median and the last's: allocators breathe, leaks do not stop."""


def soak(folder: Path, saves: int, *, width: int = 128, progress: bool = False) -> dict[str, Any]:
    """Save ``saves`` times. Return memory, descriptors and threads of trainer and agent."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ckpt = relight.Checkpointer(
        folder / "store" / "run", model=model, optimizer=optimizer, keep=relight.keep(last=2), signals=False
    )
    own, samples, agents = psutil.Process(), [], set()
    others = {child.pid for child in own.children()}
    began = time.monotonic()
    for step in range(saves):
        model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.save(step, block=False)
        if step % max(1, saves // 200) == 0:
            ckpt.save(step, block=True)
            agent = next(
                child
                for child in own.children()
                if child.pid not in others and "relight.agent.server" in child.cmdline()
            )
            agents.add(agent.pid)
            samples.append(
                {
                    "step": step,
                    **{
                        f"{name}_{key}": value
                        for name, process in (("trainer", own), ("agent", agent))
                        for key, value in held(process).items()
                    },
                }
            )
            if progress and step % (saves // 20 or 1) == 0:
                last = samples[-1]
                print(
                    f"{step:6} saves  trainer {last['trainer_rss'] / 1e6:.1f} MB  agent {last['agent_rss'] / 1e6:.1f} MB",
                    flush=True,
                )
    ckpt.close()
    quarter = max(1, len(samples) // 4)
    growth = {
        key: statistics.median(sample[key] for sample in samples[-quarter:])
        - statistics.median(sample[key] for sample in samples[quarter : 2 * quarter])
        for key in samples[0]
        if key != "step"
    }
    return {
        "saves": saves, "seconds": round(time.monotonic() - began, 1), "agents": len(agents), "growth": growth, "samples": samples,
        "checkpoints": len(relight.open(folder / "store" / "run").checkpoints()),
    }  # fmt: skip


def held(process: psutil.Process) -> dict[str, int]:
    """Resident bytes, descriptors, threads."""
    return {"rss": process.memory_info().rss, "files": process.num_fds(), "threads": process.num_threads()}


def faults(result: dict[str, Any]) -> list[str]:
    """Return the numbers that grew."""
    growth = result["growth"]
    failures = [
        f"{key} grew by {growth[key] / 1e6:.1f} MB"
        for key in ("trainer_rss", "agent_rss")
        if growth[key] > GROWTH_BYTES
    ]
    failures += [f"{key} grew by {growth[key]:g}" for key in growth if not key.endswith("rss") and growth[key] > 2]
    if result["agents"] != 1:
        failures.append(f"{result['agents']} agents served one trainer")
    return failures


def main() -> None:
    """Print what grew, and exit with 1 if anything did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = soak(Path(folder), options.saves, progress=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(
        f"{result['saves']} saves in {result['seconds']} s; growth from the second quarter to the last: {result['growth']}"
    )
    failures = faults(result)
    print("; ".join(failures) or "flat")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
