"""Valid uses of the installed wheel. ``make package`` runs mypy and pyright on them, never the code. Unused ignores are errors."""

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
    handle: relight.Save = ckpt.save(9, tag="end", metrics={"accuracy": 0.3}, block=False)
    handle.wait(10)
    identity: str | None = handle.id

state: dict[str, object] = relight.load("runs/typed", only="model/*")
tensors: dict[str, object] = relight.load("runs/typed", device="cpu", mmap=False)
with relight.load("runs/typed", lazy=True, device=torch.device("cpu")) as lazy:
    names: list[str] = lazy.keys()
    checkpoint_of_one_tensor: relight.LazyCheckpoint = lazy
    tensor: torch.Tensor = lazy.get_tensor(names[0])
    rows: torch.Tensor = lazy.get_slice(names[0])[1:3, ...]
store: relight.Store = relight.open("runs")
for checkpoint in store.checkpoints("typed"):
    number: int = checkpoint.step
    metrics: dict[str, int | float | bool | str] = dict(checkpoint.body.metrics)
try:
    relight.load("runs/none")
except relight.CheckpointNotFound as error:
    text: tuple[str, str, str] = (error.what, error.where, error.hint)

wrong: str = relight.__version__ + 1  # type: ignore[operator]
relight.every(steps="many")  # type: ignore[arg-type]
relight.load("runs/typed", lazy=True, mmap=True)  # type: ignore[call-overload]
relight.nothing_of_that_name  # type: ignore[attr-defined]
