"""``python -m benchmarks.followers``: how fast another process has new weights, and what that costs the training.

A trainer changes its model in three ways (adapters, half of the layers, everything) and saves. A follower on the same node takes the
checkpoint. In the same rounds, the trainer writes the same weights into a safetensors file and a directory of DCP, and another process
loads them, from the page cache, into a model of its own. Then steps are timed with a follower that checks four times a second, and
without one, in turns.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

KINDS = ("adapters", "half", "all")
MODEL = """
import json, sys, time
import torch
from torch import nn

torch.set_num_threads(1)
LAYERS, WIDTH = 24, int(sys.argv[2])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        for number in range(LAYERS):
            self.register_parameter(f"layer{number}", nn.Parameter(torch.zeros(WIDTH)))
            self.register_parameter(f"adapter{number}", nn.Parameter(torch.zeros(16_000)))


net = Net()


def changed(kind):
    for name, parameter in net.named_parameters():
        number = int(name.removeprefix("layer").removeprefix("adapter"))
        if name.startswith("adapter") or kind == "all" or (kind == "half" and number % 2):
            yield parameter


def answer(**words):
    print(json.dumps(words), flush=True)


def commands():
    for line in sys.stdin:
        yield line.split()
"""
TRAINER = (
    MODEL
    + """
import os, shutil
import relight
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

folder = sys.argv[1]
weights = torch.randn(384, 384)
with torch.no_grad(), relight.Checkpointer(f"{folder}/s/run", model=net, keep=relight.keep(last=2)) as ckpt:
    step = ckpt.restore()
    for words in commands():
        if words[0] == "save":
            for parameter in changed(words[1]):
                parameter.add_(1)
            size = sum(parameter.nbytes for parameter in changed(words[1]))
            began = time.monotonic()
            handle = ckpt.save(step, block=False)
            handle.wait()
            answer(seconds=time.monotonic() - began, changed=size, step=step)
            step += 1
        elif words[0] == "export":
            began = time.monotonic()
            save_file(net.state_dict(), f"{folder}/weights.safetensors")
            safetensors_s = time.monotonic() - began
            shutil.rmtree(f"{folder}/dcp", ignore_errors=True)
            began = time.monotonic()
            dcp.save({"model": net.state_dict()}, checkpoint_id=f"{folder}/dcp")
            answer(safetensors_save=safetensors_s, dcp_save=time.monotonic() - began)
        else:  # train for some seconds, with a save of adapters each second
            ends, times, saved = time.monotonic() + float(words[1]), [], time.monotonic()
            handle = None
            while (began := time.monotonic()) < ends:
                for _ in range(10):
                    weights @ weights
                if began - saved > 1 and (handle is None or handle.done):
                    for parameter in changed(words[2]):
                        parameter.add_(1)
                    handle, saved = ckpt.save(step, block=False), began
                    step += 1
                times.append(time.monotonic() - began)
            if handle is not None:
                handle.wait()
            answer(steps=len(times), seconds=sum(times))
"""
)
FOLLOWER = (
    MODEL
    + """
import glob, os
import relight
every_s = float(sys.argv[3])
with relight.follow(f"{sys.argv[1]}/s/run", net, every=every_s) as follower:
    while True:
        switched = follower.poll()
        if switched is not None:
            # the log's own times have whole seconds
            now, record = time.time(), glob.glob(f"{sys.argv[1]}/s/run/log/*{follower.checkpoint.seq:012d}*")[0]
            lag_s = now - os.stat(record).st_mtime
            answer(step=switched.step, lag_s=lag_s, bytes=switched.bytes, seconds=switched.seconds, source=switched.source)
        time.sleep(every_s / 10)
"""
)
LOADER = (
    MODEL
    + """
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

folder = sys.argv[1]
for words in commands():
    began = time.monotonic()
    if words[0] == "safetensors":
        net.load_state_dict(load_file(f"{folder}/weights.safetensors"))
    else:
        dcp.load({"model": net.state_dict()}, checkpoint_id=f"{folder}/dcp")
    answer(seconds=time.monotonic() - began)
"""
)


class Process:
    """A script that answers each line with a line of JSON."""

    def __init__(self, text: str, folder: Path, width: int, *more: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", text, str(folder), str(width), *map(str, more)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def send(self, *words: object) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of the benchmark ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, *words: object) -> dict[str, Any]:
        """Send a command, and return its answer."""
        self.send(*words)
        return self.answer()

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def measure(folder: Path, width: int, rounds: int, train_s: float) -> dict[str, Any]:
    """Measure all rows. Return the medians, and the values of each round."""
    trainer, loader = Process(TRAINER, folder, width), Process(LOADER, folder, width)
    values: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    cost: dict[str, list[float]] = {"alone": [], "followed": []}
    try:
        trainer.ask("save", "all")
        follower = Process(FOLLOWER, folder, width, 0.01)
        follower.answer()
        for number in range(rounds):
            for kind in KINDS:
                saved = trainer.ask("save", kind)
                switched = follower.answer()
                assert switched["step"] == saved["step"], (switched, saved)
                exports = trainer.ask("export")
                loads = {how: loader.ask(how)["seconds"] for how in ("safetensors", "dcp")}
                values[kind].append(
                    {**switched, "changed": saved["changed"], "save_s": saved["seconds"], **exports, **loads}
                )
                print(f"round {number + 1}, {kind}: {values[kind][-1]}", file=sys.stderr, flush=True)
        follower.end()
        for number in range(2 * rounds):
            for how in random.Random(number).sample(sorted(cost), 2):
                process = Process(FOLLOWER, folder, width, 0.25) if how == "followed" else None
                if process is not None:
                    process.answer()
                done = trainer.ask("train", train_s, "adapters")
                cost[how].append(done["seconds"] / done["steps"])
                if process is not None:
                    process.end()
            print(f"turn {number + 1}: {cost['followed'][-1] / cost['alone'][-1]:.4f}", file=sys.stderr, flush=True)
    finally:
        trainer.end()
        loader.end()
    rows = {}
    for kind, rounds_of_kind in values.items():
        median = {
            name: statistics.median(row[name] for row in rounds_of_kind)
            for name in (
                "lag_s",
                "seconds",
                "bytes",
                "changed",
                "save_s",
                "safetensors",
                "dcp",
                "safetensors_save",
                "dcp_save",
            )
        }
        rows[kind] = {
            **median,
            "read_over_changed": median["bytes"] / median["changed"],
            "source": rounds_of_kind[-1]["source"],
        }
    ratios = [followed / alone for followed, alone in zip(cost["followed"], cost["alone"])]
    return {
        "bytes": 24 * (width + 16_000) * 4,
        "rounds": rounds,
        "rows": rows,
        "step_with_follower": statistics.median(ratios),
        "step_with_follower_spread": statistics.quantiles(ratios, n=4)[::2],
        "values": values,
        "cost": cost,
    }


def table(result: dict[str, Any]) -> str:
    """Return the table of the docs."""
    head = (
        "| Changed | Commit to switched weights | of it the switch | Bytes read over changed | From | safetensors: save; load "
        "| DCP: save; load |\n|---|---:|---:|---:|---|---:|---:|\n"
    )
    lines = [
        f"| {kind} ({row['changed'] / 1e6:.0f} MB) | {row['lag_s']:.3f} s | {row['seconds']:.3f} s | {row['read_over_changed']:.3f} "
        f"| {row['source']} | {row['safetensors_save']:.2f}; {row['safetensors']:.2f} s | {row['dcp_save']:.2f}; {row['dcp']:.2f} s |"
        for kind, row in result["rows"].items()
    ]
    low, high = result["step_with_follower_spread"]
    return (
        f"{result['bytes'] / 1e9:.2f} GB, {result['rounds']} rounds\n\n{head}"
        + "\n".join(lines)
        + f"\n\nA step with a follower takes {result['step_with_follower']:.4f} × as long as without; quartiles {low:.4f} to {high:.4f}."
    )


def main() -> int:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train-s", type=float, default=8.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="followers-", dir=options.folder))
    try:
        result = measure(folder, options.megabytes * 1_000_000 // 24 // 4, options.rounds, options.train_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(result))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
