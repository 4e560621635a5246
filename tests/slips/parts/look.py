"""Write what the run of ``SLIP_RUN`` contains to ``look.json``: each checkpoint's step, weight and damage, and what the
next start gets."""

from __future__ import annotations

import json
import os

from ordinary import Checkpointer, made, relight

run = os.environ["SLIP_RUN"]
content: dict[str, object] = {"checkpoints": {}, "next": None, "why": ""}
try:
    for checkpoint, findings in relight.open(run).verify():
        weight = None
        if not findings:
            model = relight.load(run, checkpoint.id).get("model") or {}
            weight = float(model["w"][0]) if "w" in model else None
        content["checkpoints"][checkpoint.id] = [checkpoint.step, weight, [str(each) for each in findings]]
except relight.RelightError as error:
    content["why"] = f"{type(error).__name__}: {error}"
try:
    model, optimizer = made(origin=7)
    ckpt = Checkpointer(run, model=model, optimizer=optimizer, save=None, signals=False)
    start = ckpt.restore(strict=False)
    content["next"] = [start, float(model.w[0])]
except relight.RelightError as error:
    content["why"] = f"{type(error).__name__}: {error}"
with open("look.json", "w", encoding="utf-8") as file:
    json.dump(content, file)
