"""Lossy storage: the error stays within the stated bound, only for the chosen tensors, and is shown wherever it matters."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import relight
from relight.catalog.run import Run
from relight.errors import ConfigError, CorruptCheckpoint
from relight.format.lossy import BLOCK, BOUNDS, WAYS, LossyRange, decode_lossy, encode_lossy
from relight.policy.compact import LOSSY_BOUNDS, Compact, lossy_ways
from relight.reader.storage_stats import stored_as
from relight.store import open_bytes
from relight.testing.store_suite import refuses

FLOATS = st.one_of(
    st.floats(width=32, allow_nan=True, allow_infinity=True),
    st.floats(-1, 1, width=32),
    st.just(0.0),
    st.sampled_from([1e-40, -1e-42, 3e-39, 6e-8, -7e4]),
)


def checked(values: np.ndarray, way: str) -> bool:
    """Encode values and check the promised error. Return whether they were encoded."""
    encoded = encode_lossy(memoryview(values.tobytes()), [LossyRange(values.nbytes, (way,))])
    if encoded is None:
        return False
    stored, data = encoded
    again = memoryview(bytearray(len(data)))
    decode_lossy(memoryview(stored), again)
    assert again == data and len(stored) < len(data)
    near = np.frombuffer(data, "<f4").astype("f8")
    exact = values.astype("f8")
    scale = np.abs(exact)
    if way == "int8":
        blocks = [scale[start : start + BLOCK].max() for start in range(0, len(scale), BLOCK)]
        scale = np.repeat(blocks, BLOCK)[: len(scale)]
    least = {"float16": 2.0**-25, "bfloat16": 2.0**-133}.get(way, 0.0)
    assert (np.abs(near - exact) <= np.maximum(scale * BOUNDS[way] * (1 + 1e-5), least)).all()
    return True


@given(values=st.lists(FLOATS, min_size=1, max_size=700), way=st.sampled_from(sorted(WAYS)))
def test_no_value_exceeds_the_stated_error(values: list[float], way: str) -> None:
    """The bound holds for infinite, NaN, denormal and equal values, and for values beyond the range of 16 bits."""
    checked(np.array(values, "<f4"), way)


@pytest.mark.parametrize("way", WAYS)
def test_values_of_training_are_stored_lossily(way: str) -> None:
    """Values of normal distributions, and blocks of zeros between them."""
    draw = np.random.default_rng(0)
    values = (draw.standard_normal(100_000) * 1e-2).astype("<f4")
    values[5000:9000] = 0
    assert checked(values, way)
    assert BOUNDS == LOSSY_BOUNDS
    assert not checked(np.array([1.0, np.nan] * 500, "<f4"), way)
    assert checked(np.array([1e30] * 500, "<f4"), way) == (way != "float16")


@pytest.mark.parametrize("way", WAYS)
def test_invalid_lossy_chunks(way: str) -> None:
    """Invalid chunks are refused. Those that still decode have the right length, and their hash differs."""
    values = np.random.default_rng(1).standard_normal(1000).astype("<f4")
    encoded = encode_lossy(memoryview(values.tobytes()), [LossyRange(3000, (way,)), LossyRange(1000)])
    assert encoded is not None and encoded[1][3000:] == memoryview(values.tobytes())[3000:]
    stored, draw = encoded[0], random.Random(0)
    into = memoryview(bytearray(4000))
    bads = [
        b"",
        stored[:2],
        stored[:-1],
        stored + b"x",
        b"\1" + stored[1:],
        bytes([3, 0, 0]) + stored[3:],
        bytes([3, 3, 0]) + stored[3:],
    ]
    bads += [stored[:3] + b"\x2f" + stored[4:], stored[:3] + b"\x05" + stored[4:], stored[:4] + b"\xff" + stored[5:]]
    for bad in bads:
        refuses(CorruptCheckpoint, lambda bad=bad: decode_lossy(memoryview(bad), into))  # type: ignore[misc]
    for _ in range(300):
        try:
            decode_lossy(memoryview(draw.randbytes(draw.randrange(80))), into)
        except CorruptCheckpoint:
            continue


def test_rules() -> None:
    """The first matching pattern decides. Only float32 tensors are lossy. Second moments never take 8 bits."""
    rules = Compact(lossy={"optimizer/*": "int8", "model/*": "bfloat16"})
    assert lossy_ways(rules, "optimizer/state/x/exp_avg", "float32") == ("int8",)
    assert lossy_ways(rules, "optimizer/state/x/exp_avg_sq", "float32") == ()
    assert lossy_ways(rules, "model/w", "float32") == ("bfloat16",) and lossy_ways(rules, "model/w", "float64") == ()
    assert lossy_ways(rules, "other", "float32") == ()
    refuses(ConfigError, lambda: Compact(lossy={"*exp_avg_sq": "int8"}))
    refuses(ConfigError, lambda: Compact(lossy={"*": "int4"}))


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 800), nn.Linear(800, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(url: str, until: int, **options: Any) -> list[float]:
    model, optimizer = parts()
    losses = []
    with relight.Checkpointer(url, model=model, optimizer=optimizer, save=relight.every(steps=1), **options) as ckpt:
        for step in range(ckpt.restore(), until):
            torch.manual_seed(step)
            loss = (model(torch.randn(16, 600)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            ckpt.step(step)
    return losses


@pytest.mark.parametrize("background", [False, True])
def test_moments_in_8_and_16_bits(tmp_path: Path, background: bool) -> None:
    """Weights restore exactly, moments nearly.

    The listing, the root and the reasons for an inexact resume report that.
    """
    url = str(tmp_path / "s" / "run")
    rules = relight.Compact(codecs="never", lossy={"optimizer/*/exp_avg": "int8", "optimizer/*/exp_avg_sq": "bfloat16"})
    straight = train(str(tmp_path / "exact" / "run"), 8, background=False)
    losses = train(url, 5, compact=rules, background=background, limits=relight.Limits(when_busy="queue"))
    assert losses == straight[:5]
    exact, near = relight.load(tmp_path / "exact" / "run", 4), relight.load(url, 4)
    for name, value in exact["model"].items():
        assert torch.equal(value, near["model"][name])
    for name, state in exact["optimizer"]["state"].items():
        other = near["optimizer"]["state"][name]
        assert torch.equal(state["step"], other["step"])
        first, second = state["exp_avg"], state["exp_avg_sq"]
        assert (other["exp_avg"] - first).abs().max() <= first.abs().max() / 254 * 1.001
        assert ((other["exp_avg_sq"] - second).abs() <= second / 256 * 1.001).all()
    more = train(url, 8, compact=rules, background=background, limits=relight.Limits(when_busy="queue"))
    assert (
        more != straight[5:] and max(abs(loss - other) for loss, other in zip(more, straight[5:], strict=True)) < 0.02
    )
    run = Run(open_bytes(Path(url).parent), "run")
    opened = run.open(run.history().live[-1])
    assert opened.root.exact and "exp_avg" in opened.root.exact[-1]
    rows = {(row.dtype, row.role): row for row in stored_as(opened)}
    assert rows["float32", "optim"].stored_bytes < 0.7 * rows["float32", "optim"].bytes
    assert not any(findings for _, findings in relight.open(url).verify())
    done = subprocess.run([sys.executable, "-m", "relight", "ls", url], capture_output=True, text=True, check=True)
    assert "lossy, ±0.39" in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "relight", "ls", url, "--json"], capture_output=True, text=True, check=True
    )
    assert {checkpoint["lossy"] for checkpoint in json.loads(done.stdout)} == {1 / 254}


def test_nothing_is_derived_from_lossy_tensors(tmp_path: Path) -> None:
    """16-bit weights with lossy masters are stored themselves and restore exactly."""
    model = nn.Linear(900, 900).to(torch.bfloat16)
    master = nn.ParameterList([nn.Parameter(parameter.detach().float() * 1.0001) for parameter in model.parameters()])
    with torch.no_grad():
        for narrow, wide in zip(model.parameters(), master, strict=True):
            narrow.copy_(wide)
    compact = relight.Compact(codecs="always", lossy={"master/*": "float16"})
    with relight.Checkpointer(
        tmp_path / "s" / "run", save=None, model=model, master=master, compact=compact, background=True
    ) as ckpt:
        ckpt.restore()
        ckpt.save(0)
    loaded = relight.load(tmp_path / "s" / "run")
    assert all(
        torch.equal(tensor, other) for tensor, other in zip(model.parameters(), loaded["model"].values(), strict=True)
    )
    assert not all(torch.equal(tensor, other) for tensor, other in zip(master, loaded["master"].values(), strict=True))


def test_urgent_saves_are_exact(tmp_path: Path) -> None:
    """Values of exceptions are stored unchanged."""
    model, _ = parts()
    compact = relight.Compact(lossy={"*": "bfloat16"})
    with (
        pytest.raises(ZeroDivisionError),
        relight.Checkpointer(
            tmp_path / "s" / "run", model=model, compact=compact, background=False, save=relight.every(steps=100)
        ) as ckpt,
    ):
        ckpt.restore()
        ckpt.step(0)
        raise ZeroDivisionError
    loaded = relight.load(tmp_path / "s" / "run")["model"]
    assert all(
        torch.equal(tensor, other) for tensor, other in zip(model.state_dict().values(), loaded.values(), strict=True)
    )
