"""Write what is in the run of ``SLIP_RUN`` to ``look.json``: each checkpoint's step, weight and damage, and what the next start gets."""

from __future__ import annotations

import json
import os

from ordinary import Checkpointer, made, relight

run = os.environ["SLIP_RUN"]
found: dict[str, object] = {"checkpoints": {}, "next": None, "why": ""}
try:
    for one, findings in relight.open(run).verify():
        weight = None
        if not findings:
            model = relight.load(run, one.id).get("model") or {}
            weight = float(model["w"][0]) if "w" in model else None
        found["checkpoints"][one.id] = [one.step, weight, [str(each) for each in findings]]
except relight.RelightError as error:
    found["why"] = f"{type(error).__name__}: {error}"
try:
    model, optimizer = made(origin=7)
    ckpt = Checkpointer(run, model=model, optimizer=optimizer, save=None, signals=False)
    start = ckpt.restore(strict=False)
    found["next"] = [start, float(model.w[0])]
except relight.RelightError as error:
    found["why"] = f"{type(error).__name__}: {error}"
with open("look.json", "w", encoding="utf-8") as file:
    json.dump(found, file)
