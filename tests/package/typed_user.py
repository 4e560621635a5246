"""Valid uses of the installed wheel. ``make package`` runs mypy and pyright on them, never the code. Unused ignores are errors."""

from datetime import timedelta
from pathlib import Path

import torch

import relight

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
checkpointer = relight.Checkpointer(
    Path("runs") / "typed",
    model=model,
    optimizer=optimizer,
    save=relight.every(steps=5) | relight.every(minutes=10),
    keep=relight.keep(last=3),
    compact=relight.Compact(),
    config={"lr": 0.1},
)
with checkpointer as ckpt:
    start: int = ckpt.restore()
    for step in range(start, 10):
        with relight.phase("evaluate"):
            pass
        taken: relight.Save | None = ckpt.step(step, loss=0.5)
        ckpt.step(step, metrics={"val/loss": 0.3}, samples=[1, 2], epoch=1)
    handle: relight.Save = ckpt.save(9, tag="end", metrics={"accuracy": 0.3}, block=False)
    handle.wait(10).wait("10m", until="drained").wait(timedelta(minutes=1), "sealed")
    ckpt.save(9, accuracy=0.3, priority="high")
    identity: str | None = handle.id

state: dict[str, object] = relight.load("runs/typed", only="model/*")
tensors: dict[str, object] = relight.load("runs/typed", device="cpu", mmap=False)
half: dict[str, object] = relight.load("runs/typed", dtype="bfloat16")
with relight.load("runs/typed", lazy=True, dtype=torch.float16, device=torch.device("cpu")) as lazy:
    names: list[str] = lazy.keys()
    checkpoint_of_one_tensor: relight.LazyCheckpoint = lazy
    tensor: torch.Tensor = lazy.get_tensor(names[0])
    rows: torch.Tensor = lazy.get_slice(names[0])[1:3, ...]
store: relight.Store = relight.open("runs")
for checkpoint in store.checkpoints("typed"):
    number: int = checkpoint.step
    metrics: dict[str, int | float | bool | str] = dict(checkpoint.metrics)
    facts: tuple[tuple[str, ...], int, str] = (checkpoint.tags, checkpoint.bytes, checkpoint.time)
    same: relight.Checkpoint = checkpoint
size: relight.Size = "16GB"
rate: relight.Rate = "200MB/s"
time: relight.Duration = timedelta(hours=2)
limits = relight.Limits(
    memory=size, bytes_per_second=rate, deadline_s=time, when_busy="queue", read_bytes_per_second=1e9
)
cold = relight.tier("s3://bucket/runs/typed", capacity="2TB", lag="10m", bytes_per_second="1GB/s")
tiers = relight.Tiers(hot="/nvme/runs/typed", cold=cold)
rules = relight.keep(last=3, best=1, metric="loss", mode="min", within=time, budget=size)
often = relight.adaptive(at_least="30s", mtbf=3600, bytes_per_second=rate) | relight.best("loss", "min")
peers = relight.Peers(copies=1, memory=size, plane="tcp")
try:
    relight.load("runs/none")
except (relight.CheckpointNotFound, relight.RunRemoved) as error:
    text: tuple[str, str, str] = (error.what, error.where, error.hint)

wrong: str = relight.__version__ + 1  # type: ignore[operator]
relight.every(steps="many")  # type: ignore[arg-type]
relight.load("runs/typed", lazy=True, mmap=True)  # type: ignore[call-overload]
relight.Checkpointer("runs/typed", model=model, writer="rank 1")  # type: ignore[arg-type]
relight.Checkpointer("runs/typed", model=model, on_failure="ignore")  # type: ignore[arg-type]
relight.Limits(when_busy="oldest")  # type: ignore[arg-type]
relight.Compact(codecs="sometimes")  # type: ignore[arg-type]
relight.best("loss", "smallest")  # type: ignore[arg-type]
checkpointer.save(9, priority="urgent")  # type: ignore[arg-type]
handle.wait(until="done")  # type: ignore[arg-type]
relight.nothing_of_that_name  # type: ignore[attr-defined]
