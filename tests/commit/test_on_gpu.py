"""Coding on a GPU: the result is readable without a GPU, and an error on the GPU fails no save."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.commit import fake_nvcomp
from torch import nn

import relight
from relight.catalog import Run
from relight.commit.nvcomp import PIECE_BYTES, PLANE_BYTES_MIN, on_gpu
from relight.format.codecs import ElementKind, choose, decode, encode
from relight.format.entropy import FRAME_MIN, compress, decompress, zstd
from relight.format.root_keys import COMPACT
from relight.store import LocalStore


@pytest.fixture
def nvcomp(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with nvCOMP and a GPU, as far as the interface goes."""
    package = ModuleType("nvidia")
    package.nvcomp = fake_nvcomp  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvidia", package)
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", fake_nvcomp)
    fake_nvcomp.CODED.clear()
    return fake_nvcomp


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia", None)  # type: ignore[arg-type]


def plane(length: int, seed: int = 0) -> memoryview:
    """Return a plane of exponents."""
    values = np.random.default_rng(seed).standard_normal(length).astype("<f4")
    return memoryview(((values.view("<u4") >> 23) & 0xFF).astype("u1")).cast("B")


@pytest.mark.parametrize("length", [PLANE_BYTES_MIN, PLANE_BYTES_MIN + 1, 5 * PIECE_BYTES - 1, 1 << 21])
def test_chunks_coded_on_a_gpu_decode_on_the_processor(nvcomp: Any, length: int) -> None:
    """A chunk is a sequence of frames. Each frame but the last decodes to one full piece."""
    coder, why = on_gpu()
    assert coder is not None and not why
    frames = coder.compress(plane(length), "entropy")
    assert not coder.why_not and nvcomp.CODED[-1] == length
    into = memoryview(bytearray(length))
    decompress(memoryview(frames), into)
    assert into == plane(length)


def test_a_chunk_of_it(nvcomp: Any) -> None:
    """A whole chunk is, too."""
    coder, _ = on_gpu()
    assert coder is not None
    values = (np.random.default_rng(3).standard_normal(1 << 20) * 0.02).astype("<f4")
    data = memoryview(values).cast("B")
    way = choose(data, ElementKind(4, True))
    assert way is not None
    stored, into = encode(data, way, by=coder.compress), memoryview(bytearray(len(data)))
    assert stored is not None and nvcomp.CODED[-1] == 1 << 20
    decode(memoryview(stored), into)
    assert into == data


def test_short_planes_stay_here(nvcomp: Any) -> None:
    """Bringing them there takes longer."""
    coder, _ = on_gpu()
    assert coder is not None
    nvcomp.CODED.clear()
    assert coder.compress(plane(PLANE_BYTES_MIN - 1), "entropy") == compress(plane(PLANE_BYTES_MIN - 1), "entropy")
    assert not nvcomp.CODED


@pytest.mark.parametrize("wrong", ["other bytes", "an error", "fewer"])
def test_a_failing_gpu_is_replaced_by_the_processor(nvcomp: Any, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """Wrong results of the GPU are detected before use. The processor then codes, and the GPU is not tried again."""
    coder, _ = on_gpu()
    assert coder is not None

    def decoded(self: Any, batch: Any) -> Any:
        if wrong == "an error":
            raise RuntimeError("CUDA error 700: an illegal memory access")
        zeros = fake_nvcomp.BatchArray([fake_nvcomp.Array(np.zeros(PIECE_BYTES, "u1")) for _ in batch])
        return zeros if wrong == "other bytes" else fake_nvcomp.BatchArray(zeros.held[1:])

    monkeypatch.setattr(fake_nvcomp.Codec, "decode", decoded)
    assert coder.compress(plane(1 << 20), "entropy") == compress(plane(1 << 20), "entropy")
    assert coder.why_not.startswith("nvCOMP: ") and "\n" not in coder.why_not
    nvcomp.CODED.clear()
    assert coder.compress(plane(1 << 20), "entropy") == compress(plane(1 << 20), "entropy")
    assert not nvcomp.CODED


def test_without_nvcomp(without: None) -> None:
    """The reason is stated."""
    assert on_gpu()[0] is None and "not here" in on_gpu()[1]


def test_frames_that_are_wrong() -> None:
    """Cut off, too short to be so many, more than a plane: refused, whatever their number, in time that grows with their length alone."""
    data = plane(3 * FRAME_MIN)
    frames = [zstd.compress(data[start : start + FRAME_MIN]) for start in range(0, len(data), FRAME_MIN)]
    into = memoryview(bytearray(len(data)))
    decompress(memoryview(b"".join(frames)), into)
    assert into == data
    for wrong in (
        frames[:2], [*frames, frames[0]], [*frames[:2], frames[2][:-1]], [*frames, b"x"], [frames[1], zstd.compress(b""), *frames[1:]],
        [zstd.compress(b"")] * 100_000, [zstd.compress(b"x")] * len(data),
    ):  # fmt: skip
        with pytest.raises(relight.CorruptCheckpoint):
            decompress(memoryview(b"".join(wrong)), into)
    with pytest.raises(relight.CorruptCheckpoint):
        decompress(memoryview(frames[0]), memoryview(b""))
    decompress(memoryview(b""), memoryview(b""))


@pytest.mark.parametrize("available", [True, False])
def test_a_run_records_which_device_coded(available: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The save uses nvCOMP, or reports why not. Every reader gets the same checkpoint."""
    request.getfixturevalue("nvcomp" if available else "without")
    model = nn.Linear(1024, 1024)
    rules = relight.Compact(codecs="always", coder="gpu")
    with relight.Checkpointer(tmp_path / "run", model=model, compact=rules, background=False) as ckpt:
        ckpt.restore()
        for step in (1, 2):
            with torch.no_grad():
                model.weight.add_(0.01 * torch.randn_like(model.weight))
            ckpt.save(step)
    expected = model.weight.detach().clone()
    run = Run(LocalStore(tmp_path), "run")
    reason = str(run.open(run.history().live[-1]).root.user[COMPACT.name])
    assert ("by nvCOMP, on the GPU" in reason) is available
    assert ("nvCOMP is not here" in reason) is not available
    assert bool(fake_nvcomp.CODED) is available or not available
    again = nn.Linear(1024, 1024)
    with relight.Checkpointer(tmp_path / "run", model=again, background=False) as ckpt:
        ckpt.restore()
    assert torch.equal(again.weight, expected)


def test_another_coder_is_refused() -> None:
    """The error for an unknown coder lists the known ones."""
    with pytest.raises(relight.ConfigError, match="cpu.*gpu"):
        relight.Compact(coder="tpu")
