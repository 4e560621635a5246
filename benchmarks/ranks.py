"""``python -m benchmarks.ranks``: two ranks under ``fully_shard``, Relight against DCP, in the same job, the same steps, in turns.

For each rival and round: steps without a save, steps from the call of a save until it is durable on all ranks, as many
without again: *lost* is the difference of their wall times. *durable* is from the call; *idle* the same without
training. *load* goes into the live objects, cold; *reshard* into the same model with every parameter cut along its
second dimension, cold as well; *read* is what all ranks together read from the device for that, over the state's size.
DCP's async save has a gloo group of its own and one stager for all saves, which is its best.
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
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import relight
from benchmarks.files import drop_cache
from benchmarks.machine import describe
from benchmarks.workloads import SHAPES
from relight.demo.gpt import GPT

STEPS = 4
RIVALS = ("Relight", "DCP", "DCP async")


def gpt(size: str) -> GPT:
    shape = SHAPES[size]
    torch.manual_seed(0)
    return GPT(
        vocabulary=shape.vocabulary,
        context=shape.context,
        width=shape.width,
        layers=shape.layers,
        heads=shape.heads,
        dropout=0.0,
    )


def sharded(size: str, columns: bool) -> tuple[GPT, torch.optim.Optimizer]:
    """Return the model and AdamW with its state, under ``fully_shard`` or with parameters cut along their last
    dimension."""
    model, mesh = gpt(size), init_device_mesh("cpu", (dist.get_world_size(),))
    if not columns:
        for block in model.children():
            if isinstance(block, nn.ModuleList):
                for layer in block:
                    fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        made: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for key, parameter in list(module._parameters.items()):
                if parameter is not None:
                    if id(parameter) not in made:
                        place = Shard(1) if parameter.ndim > 1 else Replicate()
                        made[id(parameter)] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [place]))
                    module._parameters[key] = made[id(parameter)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def device_bytes() -> int:
    """Return the bytes that this process has had read from devices so far."""
    text = Path("/proc/self/io").read_text(encoding="ascii")
    return int(next(line for line in text.splitlines() if line.startswith("read_bytes")).split()[1])


class Rank:
    """The measurements of one rank."""

    def __init__(self, size: str, folder: Path) -> None:
        self.size, self.folder = size, folder
        self.model, self.optimizer = sharded(size, columns=False)
        self.shape = SHAPES[size]
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.ckpt = relight.Checkpointer(
            folder / "relight" / "run",
            model=self.model,
            optimizer=self.optimizer,
            keep=relight.keep(last=2),
            signals=False,
        )
        self.ckpt.restore()
        self.group = dist.new_group(backend="gloo")
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
            )
        )
        self.number = 0

    def train(self) -> None:
        tokens = torch.randint(self.shape.vocabulary, (1, self.shape.context + 1), generator=self.generator)
        out = self.model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def save(self, rival: str) -> Callable[[], bool]:
        """Begin a save. Return a function that reports whether it is durable here, or waits for it."""
        self.number += 1
        if rival == "Relight":
            save = self.ckpt.save(self.number, block=False)
            return lambda: save.done or save.error is not None
        path = self.folder / "dcp" / f"{self.number}"
        if rival == "DCP":
            dcp.save(self.state(), checkpoint_id=path)
            return lambda: True
        pending: Any = dcp.async_save(
            self.state(), checkpoint_id=path, process_group=self.group, async_stager=self.stager
        )
        future = getattr(pending, "upload_completion", pending)
        return lambda: bool(future.done())

    def all_done(self, done: bool) -> bool:
        word = torch.tensor([int(done)])
        dist.all_reduce(word, op=dist.ReduceOp.MIN)
        return bool(word)

    def timed(self, action: Callable[[], Any]) -> float:
        dist.barrier()
        started = time.perf_counter()
        action()
        dist.barrier()
        return time.perf_counter() - started

    def steps(self, count: int) -> float:
        return self.timed(lambda: [self.train() for _ in range(count)])

    def lost(self, rival: str) -> dict[str, float]:
        self.train()
        before = self.steps(STEPS)
        dist.barrier()
        started = time.perf_counter()
        done = self.save(rival)
        blocked = time.perf_counter() - started
        count, durable = 0, 0.0
        while not durable or count < STEPS:
            self.train()
            count += 1
            if not durable and self.all_done(done()):
                durable = time.perf_counter() - started
        dist.barrier()
        took = time.perf_counter() - started
        usual = (before + self.steps(STEPS)) / 2 / STEPS
        return {"blocks": blocked, "lost": took - count * usual, "durable": durable, "step": usual}

    def idle(self, rival: str) -> dict[str, float]:
        def wait() -> None:
            done = self.save(rival)
            while not done():
                time.sleep(0.002)

        return {"idle": self.timed(wait)}

    def load(self, rival: str) -> dict[str, float]:
        """Load the last save, cold, into the live objects, then into a model with another sharding."""
        dist.barrier()
        if dist.get_rank() == 0:
            # Under another name, so that no agent serves the load from its memory.
            shutil.rmtree(self.folder / "apart", ignore_errors=True)
            shutil.copytree(self.folder / "relight", self.folder / "apart", copy_function=os.link)
            drop_cache(self.folder)
        seconds = {"load": self.timed(lambda: self.read(rival, self.model, self.optimizer))}
        model, optimizer = sharded(self.size, columns=True)
        if dist.get_rank() == 0:
            drop_cache(self.folder)
        before = device_bytes()
        seconds["reshard"] = self.timed(lambda: self.read(rival, model, optimizer))
        amount = torch.tensor([device_bytes() - before])
        dist.all_reduce(amount)
        return {
            **seconds,
            "read": int(amount)
            / (3 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())),
        }

    def read(self, rival: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if rival == "Relight":
            place = self.folder / "apart" / "run"
            reader = relight.Checkpointer(place, model=model, optimizer=optimizer, signals=False, background=False)
            reader.restore()
            reader.close(save=False)
            return
        parts = get_state_dict(model, optimizer)
        state = {"model": parts[0], "optim": parts[1]}
        newest = max((self.folder / "dcp").iterdir(), key=lambda path: int(path.name))
        dcp.load(state, checkpoint_id=newest)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

    def tidy(self) -> None:
        dist.barrier()
        if dist.get_rank() == 0 and (self.folder / "dcp").exists():
            for path in sorted((self.folder / "dcp").iterdir(), key=lambda path: int(path.name))[:-1]:
                shutil.rmtree(path, ignore_errors=True)
        dist.barrier()


def rank_main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = Rank(options.size, options.folder)
    shuffle = random.Random(options.seed)
    rank.steps(2)
    for rival in RIVALS:  # the first save of each makes memory and plans
        rank.idle(rival)
        rank.tidy()
    for number in range(options.rounds):
        order = shuffle.sample(RIVALS, len(RIVALS))
        for rival in order:
            row = {"round": number, "rival": rival, **rank.lost(rival), **rank.idle(rival), **rank.load(rival)}
            rank.tidy()
            if dist.get_rank() == 0:
                print(json.dumps(row), flush=True)
    rank.ckpt.close(save=False)
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["S", "M"], default="M")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path("build"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        rank_main(options)
        return
    options.dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=options.dir, prefix="relight-ranks-"))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks), "--master-port", "29611", "-m",
        "benchmarks.ranks",
        "--size", options.size, "--rounds", str(options.rounds), "--seed", str(options.seed), "--folder", str(folder),
    ]  # fmt: skip
    rows: list[dict[str, Any]] = []
    try:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith("{"):
                    rows.append(json.loads(line))
                    print(line, end="", flush=True)
            if child.wait():
                sys.exit(child.returncode)
        report = {
            "size": options.size,
            "ranks": options.ranks,
            "machine": describe(folder),
            "torch": torch.__version__,
            "rows": rows,
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / f"ranks-{options.size}.json"
    kept.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    text = table(report)
    kept.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


def table(found: dict[str, Any]) -> str:
    """Medians, and Relight over each of the others, round by round."""
    figures = ("blocks", "lost", "durable", "idle", "load", "reshard", "read")
    rows = found["rows"]
    by_rival = {rival: {row["round"]: row for row in rows if row["rival"] == rival} for rival in RIVALS}
    lines = [
        f"# {found['ranks']} ranks, {found['size']}, fully_shard, {len(by_rival['Relight'])} rounds", "",
        ", ".join(f"{key} {value}" for key, value in found["machine"].items()) + f"; torch {found['torch']}", "",
        "Seconds: median (least–most). " + (__doc__ or "").split("\n\n")[1].replace("\n", " "), "",
        "| | " + " | ".join(figures) + " |", "|" + "---|" * (len(figures) + 1),
    ]  # fmt: skip
    for rival, by_round in by_rival.items():
        cells = []
        for figure in figures:
            values = [row[figure] for row in by_round.values()]
            cells.append(f"{statistics.median(values):.3g} ({min(values):.3g}–{max(values):.3g})")
        lines.append(f"| {rival} | " + " | ".join(cells) + " |")
    lines += ["", "**Relight / rival**, medians of same-round ratios", "", *lines[6:8]]
    for rival in RIVALS[1:]:
        ratios = [
            statistics.median(
                by_rival["Relight"][number][figure] / row[figure] for number, row in by_rival[rival].items()
            )
            for figure in figures
        ]
        lines.append(f"| {rival} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
