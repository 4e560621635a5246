"""Train a small GPT, and evaluate it and generate text with its newest weights at the same time, in three processes.

    python examples/follow.py --out build/follow

The trainer saves every 25 steps and waits for no other process. The evaluator follows, and reports its loss as a metric of each
checkpoint. The rollout worker follows in place, and generates text all the time: its weights change between two texts.
All end by themselves in about a minute. Then a table is printed, and ``followers-lag.png`` is drawn: the lag of both followers, and the
losses. On two cores the three processes share the cores, so a text that is being generated delays its worker's switch.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import relight

TEXT = Path(__file__).parents[1] / "docs" / "guarantees.md"
CONTEXT, WIDTH, SAVE_STEPS = 64, 64, 25


class GPT(nn.Module):
    """Predicts each next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of each next byte."""
        length = x.shape[1]
        hidden = self.embed(x) + self.places.weight[:length]
        return self.head(self.blocks(hidden, nn.Transformer.generate_square_subsequent_mask(length), is_causal=True))


def loss_of(model: GPT, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of rows of bytes."""
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def rows_of_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the text in rows: for training, and the last tenth for the evaluation."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    rows = text.unfold(0, CONTEXT + 1, CONTEXT // 2)
    return rows[: -len(rows) // 10], rows[-len(rows) // 10 :]


def train(run: Path, steps: int) -> Iterator[dict[str, Any]]:
    """Train, and yield the loss of each step."""
    rows, _ = rows_of_text()
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with relight.Checkpointer(
        run, model=model, optimizer=optimizer, save=relight.every(steps=SAVE_STEPS), keep=relight.keep(last=10)
    ) as ckpt:
        for step in range(ckpt.restore(), steps):
            loss = loss_of(model, rows[torch.randint(len(rows), (16,))])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.step(step, loss=loss)
            yield {"step": step, "loss": loss.item()}


def lag_s(run: Path, follower: relight.Follower) -> float:
    """Return the seconds since the commit of the live checkpoint."""
    assert follower.checkpoint is not None
    (record,) = (run / "log").glob(f"*{follower.checkpoint.seq:012d}*")  # its own time has whole seconds
    return time.time() - record.stat().st_mtime


def evaluate(run: Path, steps: int) -> Iterator[dict[str, Any]]:
    """Follow, report the loss of each checkpoint as its metric, and yield it."""
    _, rows = rows_of_text()
    model = GPT().eval()
    with relight.follow(run, model) as follower, torch.no_grad():
        step = -1
        while step < steps - 1:
            switched = follower.wait()
            assert switched is not None  # it waits without limit: the main process ends it if the trainer fails
            step, lag = switched.step, lag_s(run, follower)
            loss = loss_of(model, rows).item()
            relight.open(run).report({"val_loss": loss}, switched.id, name="val")
            yield {"step": step, "lag_s": lag, "bytes": switched.bytes, "val_loss": loss}


def roll_out(run: Path, steps: int) -> Iterator[dict[str, Any]]:
    """Follow in place with a thread that reads ahead, generate text after text, and yield the first one of each checkpoint."""
    model = GPT().eval()
    with relight.follow(run, model, every=0.2) as follower, torch.no_grad():
        while follower.checkpoint is None or follower.checkpoint.step < steps - 1:
            switched = follower.poll()  # between two texts: only here the weights change
            if switched is None and follower.checkpoint is None:
                time.sleep(0.05)
                continue
            lag = lag_s(run, follower) if switched is not None else 0.0
            text = torch.tensor([list(b"A checkpoint ")])
            for _ in range(40):
                chances = torch.softmax(model(text[:, -CONTEXT:])[:, -1] / 0.6, -1)
                text = torch.cat([text, torch.multinomial(chances, 1)], 1)
            if switched is not None:
                words = bytes(text[0].tolist()).decode(errors="replace")
                yield {"step": switched.step, "lag_s": lag, "bytes": switched.bytes, "text": words}


PARTS = {"train": train, "evaluate": evaluate, "roll_out": roll_out}


def table(lines: dict[str, list[dict[str, Any]]]) -> str:
    """Return the rows of both followers, and the first and last texts."""
    rows = [f"{'':<10}{'switches':>9}{'lag, median':>13}{'lag, most':>11}{'bytes a switch':>16}"]
    for name in ("evaluate", "roll_out"):
        lags = sorted(line["lag_s"] for line in lines[name])
        size = max(line["bytes"] for line in lines[name])
        rows.append(f"{name:<10}{len(lags):>9}{lags[len(lags) // 2]:>11.2f} s{lags[-1]:>9.2f} s{size:>16,}")
    first, last = lines["evaluate"][0], lines["evaluate"][-1]
    rows.append(
        f"val_loss {first['val_loss']:.3f} at step {first['step']}, {last['val_loss']:.3f} at step {last['step']}"
    )
    rows += [f"step {line['step']:>4}: {line['text']!r}" for line in (lines["roll_out"][0], lines["roll_out"][-1])]
    return "\n".join(rows)


def draw(lines: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw the lag of both followers and the losses, over the time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    began = lines["train"][0]["time"]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    for name, label, colour in (("evaluate", "evaluator", "#0f766e"), ("roll_out", "rollout worker", "#c2410c")):
        times = [line["time"] - began for line in lines[name]]
        top.plot(times, [line["lag_s"] for line in lines[name]], ".-", color=colour, label=label)
    for name, key, label, colour in (
        ("train", "loss", "training loss", "#94a3b8"),
        ("evaluate", "val_loss", "loss of the evaluator", "#0f766e"),
    ):
        times = [line["time"] - began for line in lines[name]]
        bottom.plot(times, [line[key] for line in lines[name]], color=colour, label=label)
    top.set(title="Seconds from a commit to the weights in the follower", ylabel="seconds", ylim=(0, None))
    bottom.set(xlabel="seconds", ylabel="loss")
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> int:
    """Start the three processes, wait for their ends, print the table, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/follow"), help="a new directory")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    run = options.out / "store" / "gpt"
    if options.part:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        with (options.out / f"{options.part}.jsonl").open("w", encoding="utf-8", buffering=1) as file:
            for line in PARTS[options.part](run, options.steps):
                file.write(json.dumps({"time": time.time(), **line}) + "\n")
        return 0
    options.out.mkdir(parents=True)
    words = [sys.executable, __file__, f"--out={options.out}", f"--steps={options.steps}"]
    processes = [
        subprocess.Popen([*words, f"--part={part}"], env={**os.environ, "OMP_NUM_THREADS": "1"}) for part in PARTS
    ]
    try:
        while any(process.poll() is None for process in processes) and not any(
            process.returncode for process in processes
        ):
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
    if any(process.wait() for process in processes):
        return 1
    lines = {
        part: [json.loads(line) for line in (options.out / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()]
        for part in PARTS
    }
    print(table(lines))
    draw(lines, options.out / "followers-lag.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
