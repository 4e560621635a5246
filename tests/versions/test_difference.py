"""Differences between two checkpoints, compared with numpy, and the bytes that are read for them."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relight
from relight.catalog.run import Run
from relight.cli.diff import _show
from relight.errors import CorruptCheckpoint
from relight.reader.opened import Opened
from relight.store import open_bytes
from relight.testing.counting import CountingStore
from relight.versions.difference import diff, layer_of
from relight.versions.numbers import compare


def saved(url: Path, step: int = 1, **state: Any) -> Opened:
    """Save the values as a checkpoint of a new run."""
    relight.save(url, state, step=step)
    return opened(url)


def opened(url: Path) -> Opened:
    """Open the newest checkpoint of a run."""
    run = Run(open_bytes(url.parent), url.name)
    return run.open(run.history().live[-1])


def expected(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """Compute the same numbers with numpy."""
    x, y = a.astype("f8").ravel(), b.astype("f8").ravel()
    apart = y - x
    return {
        "changed": int((apart != 0).sum()), "max_abs": float(abs(apart).max()), "mean_abs": float(abs(apart).mean()),
        "relative": float(np.linalg.norm(apart) / np.linalg.norm(x)), "cosine": float(x @ y / np.linalg.norm(x) / np.linalg.norm(y)),
        "norm": float(np.linalg.norm(apart)), "norm_a": float(np.linalg.norm(x)), "norm_b": float(np.linalg.norm(y)),
    }  # fmt: skip


@pytest.mark.parametrize("elements", [1, 7, 32 << 10, 100_001])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "int8", "uint8"])
def test_the_numbers_are_numpys(dtype: str, elements: int) -> None:
    """Numbers are right for every usual dtype, across blocks."""
    rng = np.random.default_rng(elements)
    a = (rng.normal(size=elements) * 20 + 40).astype(dtype)
    b = a.copy()
    b[:: max(1, elements // 9)] += np.array(3, dtype)
    result = compare(memoryview(a.tobytes()), dtype, memoryview(b.tobytes()), dtype).to_dict()
    for name, value in expected(a, b).items():
        assert result[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_of_two_dtypes_the_values_count() -> None:
    """A float32 tensor and its nearest bfloat16 differ by the rounding only."""
    a = np.linspace(1, 2, 1000, dtype="f4")
    b = torch.from_numpy(a).bfloat16()
    result = compare(memoryview(a.tobytes()), "float32", memoryview(b.view(torch.uint8).numpy().tobytes()), "bfloat16")
    assert 0 < result.largest <= 2**-8 and result.relative is not None and result.relative < 2**-8


def test_nan_and_infinity_are_counted_and_harm_no_sum() -> None:
    """NaN on both sides is no change, NaN on one side is one. Infinities, and numbers with overflowing squares, are
    compared."""
    a = np.array([1, np.nan, np.inf, 2, np.nan, 5], "f4")
    b = np.array([1, np.nan, np.inf, np.nan, 3, 7], "f4")
    result = compare(memoryview(a.tobytes()), "float32", memoryview(b.tobytes()), "float32")
    assert (result.changed, result.odd_a, result.odd_b, result.largest, result.finite) == (3, 3, 3, 2.0, 2)
    assert result.relative == pytest.approx(2 / math.sqrt(26))
    huge = np.array([1e200, -1e200], "f8")
    assert compare(memoryview(huge.tobytes()), "float64", memoryview((-huge).tobytes()), "float64").changed == 2


def both_ways(a: np.ndarray, b: np.ndarray) -> None:
    """Check ``compare`` against numpy."""
    result = compare(memoryview(a.tobytes()), str(a.dtype), memoryview(b.tobytes()), str(b.dtype)).to_dict()
    for name, value in expected(a, b).items():
        assert result[name] == pytest.approx(value, rel=1e-12, abs=1e-14), name


@pytest.mark.parametrize("factor", [1.0001, -1.0, 3.9, 4.1, 1e-3, 1e9, 0.0])
def test_lengths_and_angles_far_apart_lose_no_digit(factor: float) -> None:
    """A product that is derived from three sums is exact to the last digits. Otherwise it is computed directly."""
    rng = np.random.default_rng(1)
    a = rng.normal(size=70_001)
    b = a * factor
    b[::1000] += 1e-6 * rng.normal(size=len(b[::1000]))
    both_ways(a, b)
    both_ways(a, rng.normal(size=len(a)) * factor + 1e-30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_kinds_that_numpy_lacks_are_compared_by_value(dtype: torch.dtype) -> None:
    """Block by block, over the end of a block."""
    a = torch.linspace(-3, 3, 40_001).to(dtype)
    b = (a.float() * 1.5).to(dtype)
    raw = [memoryview(tensor.view(torch.uint8).numpy().tobytes()) for tensor in (a, b)]
    name = str(dtype).removeprefix("torch.")
    result = compare(raw[0], name, raw[1], name).to_dict()
    for key, value in expected(a.double().numpy(), b.double().numpy()).items():
        assert result[key] == pytest.approx(value, rel=1e-12), key


def test_zeros_of_two_signs_are_equal() -> None:
    """Zeros compare as numbers."""
    a = np.array([0.0, -0.0, 0.0, -0.0], "f4")
    assert compare(memoryview(a.tobytes()), "float32", memoryview((-a).tobytes()), "float32").changed == 0
    assert compare(memoryview(a.tobytes()), "float32", memoryview((a * 0 - 0.0).tobytes()), "float32").changed == 0


def test_a_nan_costs_its_own_place_alone() -> None:
    """With a NaN and an infinity in one block the sums are those of all other elements."""
    rng = np.random.default_rng(3)
    a = rng.normal(size=100_000)
    b = a + rng.normal(size=a.size)
    fine = np.ones(a.size, bool)
    fine[[5, 40_000, 40_001]] = False
    want = expected(a[fine], b[fine])
    a[5], b[40_000], a[40_001], b[40_001] = np.nan, -np.inf, np.inf, np.inf
    result = compare(memoryview(a.tobytes()), "float64", memoryview(b.tobytes()), "float64")
    assert (result.odd_a, result.odd_b, result.finite, result.changed) == (2, 2, a.size - 3, want.pop("changed") + 2)
    values = result.to_dict()
    assert {name: values[name] for name in want} == pytest.approx(want, rel=1e-12)


def test_of_complex_and_real_numbers_all_are_changed() -> None:
    """Such tensors have no numeric difference."""
    result = compare(
        memoryview(np.ones(10, "c8").tobytes()), "complex64", memoryview(np.ones(10, "f4").tobytes()), "float32"
    )
    assert (result.elements, result.changed) == (20, 20)


def test_nothing_is_read_of_what_is_the_same(tmp_path: Path) -> None:
    """For two saves of one state equal chunk hashes suffice, and no pack is opened."""
    state = {"model": torch.nn.Linear(64, 64), "big": torch.arange(1_000_000.0)}
    a = saved(tmp_path / "s" / "a", **state)
    saved(tmp_path / "s" / "b", **state)
    store = CountingStore(open_bytes(tmp_path / "s"))
    run = Run(store, "b")
    b = run.open(run.history().live[-1])
    before = store.through
    result = diff(a, b)
    assert result.is_none and not result.bytes_read and store.through == before
    assert {tensor.state for tensor in result.tensors} == {"same"}


def test_of_a_large_tensor_all_is_compared_and_little_is_held(tmp_path: Path) -> None:
    """One changed element in 24 MB is found, in slabs of 4 MiB. Numbers are exact, and each byte is read once."""
    weights = torch.arange(6_000_000.0)
    a = saved(tmp_path / "a" / "run", weights=weights)
    weights[4_321_000] += 0.5
    b = saved(tmp_path / "b" / "run", step=2, weights=weights)
    (change,) = diff(a, b, slab_bytes=4 << 20).tensors
    assert change.apart is not None
    assert (change.state, change.apart.changed, change.apart.largest, change.apart.elements) == (
        "changed",
        1,
        0.5,
        6_000_000,
    )
    assert diff(a, b).bytes_read == 2 * 24_000_000


def test_structure_values_and_facts(tmp_path: Path) -> None:
    """New, removed and reshaped tensors, a plain value, a metric and the step are reported."""
    shared = torch.ones(10)
    a = saved(tmp_path / "a" / "run", one=shared, gone=torch.ones(3), shaped=torch.ones(4), rate=0.1, kept="x")
    relight.save(
        tmp_path / "b" / "run",
        {"one": shared, "new": torch.ones(3), "shaped": torch.ones(2, 2), "rate": 0.2, "kept": "x"},
        step=5,
        metrics={"loss": 2.0},
    )
    result = diff(a, opened(tmp_path / "b" / "run"))
    assert {tensor.name: tensor.state for tensor in result.tensors} == {
        "one": "same",
        "gone": "only in a",
        "shaped": "other shape",
        "new": "only in b",
    }
    assert [(value.path, value.a, value.b) for value in result.values] == [("rate", 0.1, 0.2)]
    facts = {fact.path: (fact.a, fact.b) for fact in result.facts}
    assert facts["step"] == (1, 5) and facts["metrics/loss"] == (None, 2.0)
    assert not result.is_none


def test_changes_by_layer(tmp_path: Path) -> None:
    """Changes of blocks are grouped by the block's number, others by their module."""
    model = torch.nn.ModuleDict(
        {"h": torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3)), "head": torch.nn.Linear(8, 2)}
    )
    a = saved(tmp_path / "a" / "run", model=model)
    with torch.no_grad():
        model["h"][1].weight += 1.0
        model["h"][1].bias *= 2.0
    result = diff(a, saved(tmp_path / "b" / "run", model=model))
    assert list(result.layers()) == ["model/h.1"] and result.layers()["model/h.1"].changed == 72
    names = {
        "model/h.3.mlp.weight": "model/h.3",
        "model/head.weight": "model/head",
        "model/weight": "model",
        "x": "x",
        "m/layers.12.a.3.w": "m/layers.12",
    }
    assert {name: layer_of(name) for name in names} == names


def test_damage_is_reported_not_compared(tmp_path: Path) -> None:
    """A flipped bit in the read bytes raises an error."""
    a = saved(tmp_path / "a" / "run", weights=torch.zeros(100_000))
    b = saved(tmp_path / "b" / "run", weights=torch.ones(100_000))
    (pack,) = (tmp_path / "b" / "run").glob("*-e1/*.safetensors")
    data = bytearray(pack.read_bytes())
    data[-1000] ^= 4
    pack.write_bytes(data)
    with pytest.raises(CorruptCheckpoint):
        diff(a, b)


def test_the_command(tmp_path: Path) -> None:
    """The command has exit codes, JSON, and a table of at most 84 columns."""
    model = torch.nn.Linear(4, 4)
    with relight.Checkpointer(tmp_path / "s" / "run", model=model, save=relight.every(steps=1)) as ckpt:
        ckpt.restore()
        for step in range(2):
            with torch.no_grad():
                model.weight += 0.5
            ckpt.step(step, loss=1.0 / (step + 1))

    def ask(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "relight", "diff", *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    done = ask("s/run@0", "s/run@1")
    assert done.returncode == 1, done.stderr
    assert (
        "model/weight" in done.stdout
        and "metrics/loss" in done.stdout
        and max(map(len, done.stdout.splitlines())) <= 84
    )
    same = ask("s/run@1", "s/run")
    assert same.returncode == 0 and "the same, to the bit" in same.stdout
    facts = json.loads(ask("s/run@0", "s/run@1", "--json").stdout)
    changed = [tensor for tensor in facts["tensors"] if tensor["state"] == "changed"]
    assert (
        [tensor["name"] for tensor in changed] == ["model/weight"]
        and changed[0]["max_abs"] == pytest.approx(0.5)
        and facts["bytes_read"] == 160
    )  # the bias is in the same chunk
    assert json.loads(ask("s/run@0", "s/run@1", "--json", "--no-tensors").stdout)["bytes_read"] == 0
    assert ask("s/run@0", "s/nothing").returncode == 1


def test_generators_that_differ_at_one_step_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs that did not seed NumPy differ in its generator, and the table alone did not state why."""
    for run, seed in (("a", 1), ("b", 2)):
        torch.manual_seed(0), random.seed(0), np.random.seed(seed)
        with relight.Checkpointer(tmp_path / run, state={"x": 1}, background=False) as ckpt:
            ckpt.save(5)
    left, right = opened(tmp_path / "a"), opened(tmp_path / "b")
    _show(left, right, diff(left, right), False, False)
    assert "generators differ at the same step (numpy): the runs did not seed them equally" in capsys.readouterr().out
