"""Valid uses of the installed wheel. ``make package`` runs mypy on them, never the code. Unused ignores are errors."""

import torch

import relight

model = torch.nn.Linear(2, 2)
checkpointer = relight.Checkpointer("runs/typed", model=model, save=relight.every(steps=5) | relight.every(minutes=10))
start: int = checkpointer.restore()
checkpointer.step(start, loss=0.5)
wrong: str = relight.__version__ + 1  # type: ignore[operator]
relight.every(steps="many")  # type: ignore[arg-type]
relight.nothing_of_that_name  # type: ignore[attr-defined]
