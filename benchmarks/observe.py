"""What it costs training that events are kept: steps with and without, in turns, in one process; and what one event costs by itself.

``python -m benchmarks.observe``: a small transformer is trained, and saved in the background at a fixed interval. In
every other block of steps its events are kept in files, in the others they have no reader. The difference of two
medians of steps is usually smaller than their noise. The criterion is therefore what the step's thread pays: the cost
of an event in that thread (the call with a writer less the call without), times the events of a step, by the time of a
step. Exit status 1 if that is more than a thousandth.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["RELIGHT_EVENTS"] = "0"  # this program keeps them itself

import torch

import relight
from benchmarks.machine import describe
from relight.observe import counters, emit
from relight.observe.file import EventWriter

SHARE_MAX = 0.001


def trainer(width: int, tokens: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model, its optimizer, and a step of it."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, tokens, width)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


def of_event(folder: Path, count: int, rounds: int) -> tuple[float, float]:
    """Seconds of one ``emit`` in the thread that calls it, without a writer and with one: medians of rounds, in turns."""
    without, kept = [], []
    for number in range(2 * rounds):
        writer = keep(folder) if number % 2 else None
        time.sleep(0.05)
        started = time.thread_time()  # of this thread alone: the writer's own time is another core's
        for step in range(count):
            emit("save.span", span="write", id="x" * 10, step=step, start=1.0, end=2.0)
        (kept if number % 2 else without).append((time.thread_time() - started) / count)
        if writer is not None:
            writer.flush(10)
            writer.close()
    return statistics.median(without), statistics.median(kept)


def keep(folder: Path) -> EventWriter:
    """A writer that listens from now on."""
    writer = EventWriter(folder)
    writer.names({"store": str(folder), "run": "bench", "rank": 0, "role": "trainer"})
    return writer


def of_steps(folder: Path, blocks: int, steps: int, every: int, width: int, tokens: int) -> dict[str, Any]:
    """Return the seconds of steps in blocks with and without event files, in turns, and the mean events of a step."""
    model, optimizer, train = trainer(width, tokens)
    ckpt = relight.Checkpointer(
        folder / "runs" / "bench",
        model=model,
        optimizer=optimizer,
        save=relight.every(steps=every),
        keep=relight.keep(last=2),
    )
    seconds: dict[bool, list[float]] = {False: [], True: []}
    step = ckpt.restore()
    for _ in range(2 * every):  # memory and agent are there
        train()
        ckpt.step(step)
        step += 1
    before = sum(counters.values())
    for number in range(2 * blocks):
        writer = keep(folder / "events") if number % 2 else None
        for _ in range(steps):
            started = time.perf_counter()
            train()
            ckpt.step(step)
            seconds[bool(number % 2)].append(time.perf_counter() - started)
            step += 1
        if writer is not None:
            writer.close()
    events = (sum(counters.values()) - before) / (2 * blocks * steps)
    ckpt.close()
    return {"without": seconds[False], "kept": seconds[True], "events_per_step": events}


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description="What keeping events costs a step.")
    parser.add_argument("--blocks", type=int, default=20, help="blocks of each kind")
    parser.add_argument("--steps", type=int, default=50, help="steps of a block")
    parser.add_argument("--every", type=int, default=25, help="steps between two saves")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, help="write what was measured there, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relight-observe-") as name:
        folder = Path(name)
        machine = describe(folder)
        bare, kept = of_event(folder / "alone", 2000, 15)
        measured = of_steps(folder, options.blocks, options.steps, options.every, options.width, options.tokens)
    step_s, with_s = statistics.median(measured["without"]), statistics.median(measured["kept"])
    share = max(0.0, kept - bare) * measured["events_per_step"] / step_s
    result = {
        "machine": machine, "event_s": {"without": bare, "kept": kept},
        "events_per_step": measured["events_per_step"],
        "step_s": {"without": step_s, "kept": with_s, "ratio": with_s / step_s}, "steps_each": options.blocks * options.steps,
        "share": share,
    }  # fmt: skip
    print("  ".join(f"{name}: {value}" for name, value in machine.items()))
    print(f"an event, in the thread that emits it: {bare * 1e6:.1f} µs, kept in a file: {kept * 1e6:.1f} µs")
    times = f"{step_s * 1e3:.2f} ms without, {with_s * 1e3:.2f} ms with, {with_s / step_s:.4f} times"
    print(f"a step, medians of {result['steps_each']}: {times}")
    print(f"events a step: {measured['events_per_step']:.2f}")
    print(f"what keeping them costs the step's thread: {100 * share:.4f} % (bound: {100 * SHARE_MAX:g} %)")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(share > SHARE_MAX)


if __name__ == "__main__":
    sys.exit(main())
