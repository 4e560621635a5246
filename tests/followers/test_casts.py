"""Live tensors of another dtype than the stored ones: cast on the way, and still read by what changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import relight

WIDTH = 9 << 18  # three chunks of 4 MiB, the last one shorter
FLOATS = [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, WIDTH, bias=False), nn.Linear(1, 5, bias=False))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_another_dtype_is_cast_and_stays_incremental(dtype: torch.dtype, tmp_path: Path) -> None:
    """Only changed chunks are read, and their elements arrive where the whole tensor's cast would put them."""
    model, live = make(), make().to(dtype)
    ckpt = relight.Checkpointer(tmp_path / "s/run", model=model, background=False, save=relight.every(steps=1))
    with ckpt, relight.follow(tmp_path / "s/run", live) as follower:
        for step in range(3):
            if step:
                place = 600_003 * step  # within the first chunk, then within the second
                model[0].weight.data[place : place + 3] = torch.randn(3, 1)
            ckpt.step(step)
            switched = follower.poll()
            assert switched is not None
            for ours, theirs in zip(live.parameters(), model.parameters(), strict=True):
                assert torch.equal(ours.detach().float(), theirs.detach().to(dtype).float())
            if step:
                assert switched.changed[0] == "model/0.weight" and switched.bytes == 4 << 20
            else:
                assert switched.bytes == (WIDTH + 5) * 4


def test_what_is_not_a_float_is_refused(tmp_path: Path) -> None:
    """The error names both dtypes, and nothing has changed."""
    model, live = nn.Linear(4, 4), nn.Linear(4, 4)
    with relight.Checkpointer(tmp_path / "s/run", model=model, background=False, save=relight.every(steps=1)) as ckpt:
        ckpt.step(0)
    for parameter in live.parameters():
        parameter.requires_grad_(False)
        parameter.data = torch.zeros_like(parameter, dtype=torch.int8)
    with relight.follow(tmp_path / "s/run", live) as follower:
        with pytest.raises(relight.IncompatibleState, match="does not fit") as error:
            follower.poll()
        assert "stored float32" in str(error.value) and "live int8" in str(error.value)
        assert all(not parameter.any() for parameter in live.parameters())


def test_a_dtype_that_torch_cannot_cast_to_is_refused(tmp_path: Path) -> None:
    """Packed dtypes have no conversion: the check fails before any tensor is written."""
    packed = getattr(torch, "float4_e2m1fn_x2", None)
    if packed is None:
        pytest.skip("this torch has no packed floating-point dtype")
    model, live = nn.Linear(4, 4), {"weight": torch.zeros(4, 4, dtype=torch.uint8).view(packed)}
    with relight.Checkpointer(
        tmp_path / "s/run", model={"weight": model.weight}, background=False, save=relight.every(steps=1)
    ) as ckpt:
        ckpt.step(0)
    with relight.follow(tmp_path / "s/run", {"model": live}) as follower, pytest.raises(relight.IncompatibleState):
        follower.poll()


def test_a_restore_still_requires_the_stored_dtype(tmp_path: Path) -> None:
    """Only a follower casts without ``strict=False``."""
    model = nn.Linear(4, 4)
    with relight.Checkpointer(tmp_path / "s/run", model=model, background=False, save=relight.every(steps=1)) as ckpt:
        ckpt.step(0)
    with (
        relight.Checkpointer(tmp_path / "s/run", model=nn.Linear(4, 4).bfloat16(), background=False) as ckpt,
        pytest.raises(relight.IncompatibleState),
    ):
        ckpt.restore()
