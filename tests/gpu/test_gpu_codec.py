"""Planes coded by nvCOMP on a device, read without it. ``make gpu``."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from relight.commit.nvcomp import on_gpu
from relight.format.entropy import compress, decompress

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")]


def test_chunks_coded_on_a_device_decode_on_the_processor() -> None:
    """Bytes coded on the device decode unchanged, and are about as small as the processor's. Speeds are printed."""
    pytest.importorskip("nvidia.nvcomp")
    compressor, why = on_gpu()
    assert compressor is not None, why
    values = np.random.default_rng(0).standard_normal(4 << 20).astype("<f4")
    plane = memoryview(((values.view("<u4") >> 23) & 0xFF).astype("u1")).cast("B")
    compressor.compress(plane, "entropy")
    began = time.perf_counter()
    frames = compressor.compress(plane, "entropy")
    there_s = time.perf_counter() - began
    assert not compressor.why_not, compressor.why_not
    into = memoryview(bytearray(len(plane)))
    decompress(memoryview(frames), into)
    assert into == plane
    began = time.perf_counter()
    here = compress(plane, "entropy")
    print(
        f"nvCOMP {len(frames) / len(plane):.3f} in {there_s:.4f} s, zstd {len(here) / len(plane):.3f} in {time.perf_counter() - began:.4f} s"
    )
    assert len(frames) < 0.6 * len(plane)
