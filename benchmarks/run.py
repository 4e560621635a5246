"""``make bench``: Relight against torch.save and torch.load, the same state, interleaved in one run, durability counted for both.

GPT-2 small with AdamW by default: 124 M parameters, 1.49 GB. Prints machine, versions, medians of the rounds and spread; writes
``benchmarks/results/<name>.json`` and a table. Ratios are what to read: machines are shared and noisy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import relight
from relight.capture import capture


def make_state(layers: int, width: int, vocabulary: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The shapes of GPT-2, and an AdamW that has made one step."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(
        nn.ModuleDict(
            {
                "ln1": nn.LayerNorm(width),
                "qkv": nn.Linear(width, 3 * width),
                "proj": nn.Linear(width, width),
                "ln2": nn.LayerNorm(width),
                "up": nn.Linear(width, 4 * width),
                "down": nn.Linear(4 * width, width),
            }
        )
        for _ in range(layers)
    )
    embeddings = {"wte": nn.Embedding(vocabulary, width), "wpe": nn.Embedding(1024, width)}
    model = nn.ModuleDict({**embeddings, "h": blocks, "ln": nn.LayerNorm(width)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def timed(action: Any) -> float:
    """Seconds."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def save_torch(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """torch.save, with the fsyncs of file and directory it leaves out."""
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    for target in (path, path.parent):
        fd = os.open(target, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def load_torch(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """torch.load into the live objects, as a script does."""
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def drop_cache(folder: Path) -> None:
    """Ask the kernel to forget the files' pages, so that a load is cold."""
    for file in folder.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def load_memory(store: Path, sizes: tuple[int, int, int]) -> dict[str, float]:
    """Peak memory beyond the state while restoring, measured in a process of its own."""
    code = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from run import make_state, relight
model, optimizer = make_state(*{sizes!r})
ckpt = relight.Checkpointer({str(store / "gpt")!r}, model=model, optimizer=optimizer, signals=False)
ckpt.captured()
open('/proc/self/clear_refs', 'w').write('5')
def status(key):
    return int(next(l for l in open('/proc/self/status') if l.startswith(key)).split()[1]) * 1024
before = status('VmRSS')
ckpt.restore()
print(status('VmHWM') - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {"load_extra_bytes": float(done.stdout.split()[-1])}


def main() -> None:
    """Run the rounds, print and store the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--dir", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "save_load.json")
    options = parser.parse_args()
    sizes = (options.layers, options.width, options.vocabulary)
    model, optimizer = make_state(*sizes)
    state_bytes = capture({"model": model, "optimizer": optimizer}).logical_bytes
    folder = Path(tempfile.mkdtemp(dir=options.dir or Path.cwd(), prefix="relight-bench-"))
    figures: dict[str, list[float]] = {}
    try:
        ckpt = relight.Checkpointer(folder / "store" / "gpt", model=model, optimizer=optimizer, keep=relight.keep(last=1), signals=False)
        file = folder / "rival.pt"
        for turn in range(options.rounds + 1):
            row = {"torch.save + fsync": timed(lambda: save_torch(file, model, optimizer))}
            row["relight save (durable)"] = ckpt.save(turn).timings["blocked"]
            drop_cache(folder)
            row["torch.load, cold"] = timed(lambda: load_torch(file, model, optimizer))
            row["torch.load, warm"] = timed(lambda: load_torch(file, model, optimizer))
            drop_cache(folder)
            row["relight restore, cold, verified"] = timed(ckpt.restore)
            row["relight restore, warm, verified"] = timed(ckpt.restore)
            if turn:  # the first round warms memory up
                for name, value in row.items():
                    figures.setdefault(name, []).append(value)
                print(f"round {turn}: " + ", ".join(f"{name} {value:.2f}" for name, value in row.items()), flush=True)
        memory = load_memory(folder / "store", sizes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report(figures, memory, state_bytes, options.out)


def report(figures: dict[str, list[float]], memory: dict[str, float], state_bytes: int, out: Path) -> None:
    """Medians, spread, ratios: printed and stored."""
    medians = {name: statistics.median(values) for name, values in figures.items()}
    pairs = [
        ("relight save (durable)", "torch.save + fsync"),
        ("relight restore, cold, verified", "torch.load, cold"),
        ("relight restore, warm, verified", "torch.load, warm"),
    ]
    ratios = {ours: statistics.median(a / b for a, b in zip(figures[ours], figures[theirs], strict=True)) for ours, theirs in pairs}
    rounds = len(next(iter(figures.values())))
    versions = f"torch {torch.__version__}, relight {relight.__version__}, Python {platform.python_version()}"
    lines = [
        f"{state_bytes / 1e9:.2f} GB of state, {rounds} rounds, {os.cpu_count()} cores, {versions}",
        "",
        "| | median s | min–max s | GB/s | ratio, round by round |",
        "|---|---|---|---|---|",
    ]
    for name, values in figures.items():
        ratio = f"{ratios[name]:.2f}" if name in ratios else "1"
        spread, speed = f"{min(values):.2f}–{max(values):.2f}", state_bytes / medians[name] / 1e9
        lines.append(f"| {name} | {medians[name]:.2f} | {spread} | {speed:.2f} | {ratio} |")
    lines += ["", f"restore: {memory['load_extra_bytes'] / 1e6:.0f} MB beyond the live state at its peak"]
    print("\n".join(lines))
    out.parent.mkdir(parents=True, exist_ok=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    facts = {"state_bytes": state_bytes, "figures_s": figures, "ratios": ratios, **memory, "peak_rss_kib": peak}
    out.write_text(json.dumps(facts, indent=1))
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
