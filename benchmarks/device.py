"""``python -m benchmarks.device``: saves and restores of a GPT that trains on an accelerator, and the floors of its link.

One process; in each round every system saves once, in a random order, while training continues. ``blocked`` are the seconds
of the call, ``lost`` those by which the steps around the save took longer than as many steps without one, ``durable``
those from the call until all bytes are fsynced. ``torch.accelerator`` finds the device, so any accelerator will do.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.optim import Optimizer

from benchmarks.machine import describe
from benchmarks.rivals.base import Base, Handle
from benchmarks.rivals.dcp import Dcp
from benchmarks.rivals.relight_checkpointer import RelightBackground
from benchmarks.rivals.torch_save import TorchSave
from relight.demo.gpt import GPT

clock = time.perf_counter
STEPS_MIN, STEPS_MAX, FLOOR_BYTES = 10, 2000, 1 << 30


class DcpPinned(Dcp):
    """``async_save`` as its tutorial advises: staged in page-locked memory, and the next optimizer step waits for the staging."""

    name = "DCP async, pinned"
    how = "dcp.async_save in a thread; a new DefaultStager with page-locked memory for each save, as torch 2.11 closes the one it is given"

    def prepare(self, folder: Path, model: torch.nn.Module, optimizer: Optimizer) -> None:
        super().prepare(folder, model, optimizer)
        self.group = dist.new_group([0], backend="gloo")
        self.staged: Any = None
        optimizer.register_step_pre_hook(lambda *_: self.wait_for_staging())

    def wait_for_staging(self) -> None:
        """Wait until the copies are in host memory."""
        if self.staged is not None:
            self.staged.result()
            self.staged = None

    def save(self, step: int) -> Handle:
        path = self.step_folder(step)
        stager = DefaultStager(StagingOptions(True, True, True, True))
        response: Any = dcp.async_save(self.state(), checkpoint_id=path, process_group=self.group, async_stager=stager)
        self.staged = response.staging_completion
        return Handle(finish=response.upload_completion.result, path=path)


class Training:
    """A GPT with AdamW on the device, and the seconds of its steps."""

    def __init__(self, layers: int, width: int, batch: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = GPT(vocabulary=50257, context=512, width=width, layers=layers, heads=width // 64, dropout=0.0).to(
            device
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = batch

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the state."""
        moments = [
            value
            for entry in self.optimizer.state.values()
            for value in entry.values()
            if isinstance(value, torch.Tensor)
        ]
        return [*self.model.parameters(), *moments]

    @property
    def bytes(self) -> int:
        """Bytes of the state."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def steps(self, count: int) -> float:
        """Train, and return the seconds with the device idle before and after."""
        torch.accelerator.synchronize()
        began = clock()
        for _ in range(count):
            tokens = torch.randint(0, 50257, (self.batch, 513), device=self.device)
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self.model.loss(tokens[:, :-1], tokens[:, 1:])
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
        torch.accelerator.synchronize()
        return clock() - began

    def sums(self) -> list[int]:
        """A checksum of each tensor's bits, to compare restored state with. Computed on the device."""
        return [
            int(tensor.detach().reshape(-1).view(torch.int32).sum(dtype=torch.int64).item()) for tensor in self.tensors
        ]

    def scramble(self) -> None:
        """Zero all of it, so that what a restore leaves out is noticed."""
        with torch.no_grad():
            for tensor in self.tensors:
                tensor.zero_()


def link_floors(device: torch.device, size: int, folder: Path) -> dict[str, float]:
    """Gigabytes per second, medians of five: copies over the link from page-locked and other memory, in host memory, and to the disk."""
    away = torch.empty(size, dtype=torch.uint8, device=device)
    pinned, plain = torch.zeros(size, dtype=torch.uint8, pin_memory=True), torch.ones(size, dtype=torch.uint8)
    other = torch.zeros(size, dtype=torch.uint8)

    def write() -> None:
        with (folder / "floor").open("wb", buffering=0) as file:
            file.write(plain.numpy().data)
            os.fsync(file.fileno())

    actions: dict[str, Callable[[], object]] = {
        "device to page-locked": lambda: pinned.copy_(away, non_blocking=True),
        "page-locked to device": lambda: away.copy_(pinned, non_blocking=True),
        "device to pageable": lambda: plain.copy_(away),
        "pageable to device": lambda: away.copy_(plain),
        "host memory, one thread": lambda: torch.frombuffer(other.numpy().data, dtype=torch.uint8).copy_(plain),
        "write and fsync": write,
    }
    speeds = {}
    for name, action in actions.items():
        seconds = []
        for _ in range(3 if name == "write and fsync" else 6):
            torch.accelerator.synchronize()
            began = clock()
            action()
            torch.accelerator.synchronize()
            seconds.append(clock() - began)
        speeds[name] = size / statistics.median(seconds[1:]) / 1e9
    (folder / "floor").unlink()
    return speeds


def one_save(system: Base, training: Training, step: int, plain_s: float) -> dict[str, float]:
    """One save while training continues, until it is durable."""
    module: Any = torch.get_device_module(training.device)
    torch.accelerator.synchronize()
    module.reset_peak_memory_stats()
    training.steps(1)
    before = module.max_memory_allocated()
    began = clock()
    handle = system.save(step)
    blocked = clock() - began
    handle.start()
    steps: list[float] = []
    while len(steps) < STEPS_MIN or (not handle.done() and len(steps) < STEPS_MAX):
        steps.append(training.steps(1))
    wall = clock() - began
    handle.wait()
    print(
        f"{system.name}: a step {plain_s * 1e3:.1f} ms, then",
        *(f"{each * 1e3:.1f}" for each in steps[:40]),
        file=sys.stderr,
        flush=True,
    )
    after = torch.accelerator.max_memory_allocated() if hasattr(torch.accelerator, "max_memory_allocated") else 0
    return {
        "blocked": blocked,
        "lost": wall - len(steps) * plain_s,
        "durable": handle.durable_at - began,
        "memory": float(max(0, after - before)),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything within ``budget_s``, with fewer rounds if time is short."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        raise SystemExit("there is no accelerator here")
    args.folder.mkdir(parents=True, exist_ok=True)
    deadline = clock() + args.budget_s
    training = Training(args.layers, args.width, args.batch, device)
    training.steps(5)
    figures: dict[str, Any] = {
        "machine": describe(args.folder) | card(), "state_bytes": training.bytes, "tensors": len(training.tensors),
        "floors": link_floors(device, min(FLOOR_BYTES, training.bytes), args.folder),
    }  # fmt: skip
    figures["plain_step_s"] = statistics.median(training.steps(1) for _ in range(20))
    print(json.dumps(figures), file=sys.stderr, flush=True)
    systems: list[Base] = [RelightBackground(), TorchSave(), Dcp(), DcpPinned()]
    for number, system in enumerate(systems):
        folder = args.folder / f"{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        system.prepare(folder, training.model, training.optimizer)
    rows: dict[str, dict[str, list[float]]] = {system.name: {} for system in systems}
    rng, step, rounds = random.Random(0), 0, 0
    for turn in range(args.rounds + 1):
        if turn > 2 and clock() > deadline:
            break
        for system in rng.sample(systems, len(systems)):
            step += 1
            training.steps(2)
            plain = statistics.median(training.steps(1) for _ in range(7))
            try:
                numbers = one_save(system, training, step, plain)
            except Exception as error:
                rows[system.name].setdefault("failed", []).append(1.0)
                print(f"{system.name}: {''.join(traceback.format_exception(error)[-6:])}", file=sys.stderr, flush=True)
                continue
            for old in sorted((args.folder / f"{systems.index(system)}").glob("step-*"))[:-1]:
                shutil.rmtree(old)
            prefix = "first_" if turn == 0 else ""
            for key, value in numbers.items():
                rows[system.name].setdefault(prefix + key, []).append(value)
            print(
                system.name, turn, {key: round(value, 4) for key, value in numbers.items()}, file=sys.stderr, flush=True
            )
        rounds = turn
    loads(systems, training, rows, deadline)
    figures |= {
        "rounds": rounds,
        "systems": {name: {key: statistics.median(each) for key, each in row.items()} for name, row in rows.items()},
    }
    figures["samples"] = rows
    for system in systems:
        if isinstance(system, RelightBackground):
            system.settle()
    return figures


def loads(systems: list[Base], training: Training, rows: dict[str, dict[str, list[float]]], deadline: float) -> None:
    """Restores into the live tensors on the device, each compared with the state at the save."""
    for system in systems:
        ways = [("load", system.load)]
        if system.load_near is not None:
            ways = [("near_load", system.load_near)]
        if isinstance(system, RelightBackground):
            ways.append(("load", system.load))
        try:
            handle = system.save(100_000)
            handle.start()
            handle.wait()
            expected = training.sums()
            for name, action in ways:
                if name == "load" and isinstance(system, RelightBackground):
                    system.settle()
                for turn in range(6 if clock() < deadline else 3):
                    training.scramble()
                    torch.accelerator.synchronize()
                    began = clock()
                    action(training.model, training.optimizer)
                    torch.accelerator.synchronize()
                    seconds = clock() - began
                    if training.sums() != expected:
                        raise RuntimeError(f"{name}: other bits than were saved")
                    if turn:
                        rows[system.name].setdefault(name, []).append(seconds)
                print(system.name, name, rows[system.name].get(name), file=sys.stderr, flush=True)
        except Exception as error:
            print(f"{system.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def card() -> dict[str, Any]:
    """The card, its driver, and the runtime's version."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        line = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False).stdout.splitlines()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        line = ""
    name, driver, memory = [*(part.strip() for part in line.split(",")), "", "", ""][:3]
    return {"card": name, "driver": driver, "card_memory": memory, "cuda": torch.version.cuda, "hip": torch.version.hip}


def table(figures: dict[str, Any]) -> str:
    """Return the figures as a table."""
    gigabytes = figures["state_bytes"] / 1e9
    lines = [
        f"{figures['machine']['card']}: {gigabytes:.2f} GB in {figures['tensors']} tensors, step {figures['plain_step_s'] * 1e3:.1f} ms"
    ]
    lines += [f"  {name:26} {speed:7.2f} GB/s" for name, speed in figures["floors"].items()]
    lines.append(
        f"{'':22}{'blocked ms':>11}{'lost ms':>10}{'durable s':>11}{'restore s':>11}{'near s':>8}{'device MiB':>11}"
    )
    for name, row in figures["systems"].items():
        milliseconds = [row.get(key, 0.0) * 1e3 for key in ("blocked", "lost")]
        seconds = [row.get(key, 0.0) for key in ("durable", "load", "near_load")]
        memory = row.get("memory", 0.0) / (1 << 20)
        lines.append(
            f"{name:22}{milliseconds[0]:11.1f}{milliseconds[1]:10.1f}{seconds[0]:11.2f}{seconds[1]:11.2f}{seconds[2]:8.2f}{memory:11.0f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=600.0, help="seconds after which no further round begins")
    parser.add_argument("--folder", type=Path, default=Path("out/device"))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    figures = measure(args)
    print(table(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
