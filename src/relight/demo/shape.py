"""Sizes of the demo: model, data, steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DemoSize:
    """A size of the demo. ``kills_saving``: how many of the ``kills`` must interrupt a save. A window has ``context`` bytes."""

    steps: int
    save_every: int
    kills: int
    kills_saving: int
    width: int
    layers: int
    heads: int
    context: int
    batch: int
    accumulate: int
    windows: int
    workers: int


FULL = DemoSize(
    steps=120, save_every=8, kills=6, kills_saving=3,
    width=384, layers=6, heads=6, context=48, batch=4, accumulate=2, windows=500, workers=2,
)  # fmt: skip
"""10.8 million parameters."""

QUICK = DemoSize(
    steps=50, save_every=5, kills=5, kills_saving=2,
    width=128, layers=3, heads=4, context=48, batch=4, accumulate=2, windows=300, workers=1,
)  # fmt: skip

SHAPES = {"full": FULL, "quick": QUICK}
