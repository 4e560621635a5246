"""A follower's live tensors on an accelerator: cast, as views of fused weights, and as slices. ``make device``, ``make gpu``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.device.kind import KIND, keep_busy, marks
from tests.followers.small_decoder import HEADS, PADDED, Decoder, engine, expected, fill

import relight
from relight.integrations.engines import engine_views

pytestmark = marks


@pytest.mark.parametrize("trained_on", ["cpu", KIND])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("tp_rank", "tp_size"), [(0, 1), (1, 2)])
def test_an_engines_weights_are_filled(
    tp_rank: int, tp_size: int, dtype: torch.dtype, trained_on: str, tmp_path: Path
) -> None:
    """All values are there when ``poll`` returns, whatever the device still computes."""
    model = Decoder().to(trained_on)
    live = {name: tensor.to(KIND) for name, tensor in engine(tp_size, dtype).items()}
    views = engine_views(live, heads=HEADS, padded=PADDED, tp_rank=tp_rank, tp_size=tp_size)
    with (
        relight.Checkpointer(tmp_path / "s/run", model=model, background=False, save=relight.every(steps=1)) as ckpt,
        relight.follow(tmp_path / "s/run", views) as follower,
    ):
        for step in range(2):
            fill(model, step)
            ckpt.step(step)
            keep_busy()
            assert follower.poll() is not None
            wanted = expected(model.cpu(), tp_rank, tp_size)
            for name, tensor in live.items():
                assert torch.equal(tensor.cpu().float(), wanted[name].to(dtype).float()), name
            model.to(trained_on)
