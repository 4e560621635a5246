"""Compress planes with nvCOMP on a GPU, as zstd frames that any reader can decompress, with or without a GPU.

A plane is copied to the device, and compressed there in pieces, in parallel, one frame each. The frames are decompressed again and compared
with the plane on the host, as no other check runs before a restore. After the first error, the CPU compresses. nvCOMP codecs are per
thread.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from relight.format.entropy import compress

PIECE_BYTES = 64 << 10
"""Bytes per frame: small, so that a GPU compresses many in parallel. Not less than ``entropy.FRAME_MIN``."""
PLANE_BYTES_MIN = 256 << 10
"""Shorter planes are compressed by the CPU: the copies to and from the device take longer."""


class _Codec(threading.local):
    """The calling thread's codec: nvCOMP's are not thread-safe."""

    codec: Any = None


class OnGpu:
    """``compress`` works like ``entropy.compress``, on the current device. ``why_not``: the first error, "" before any."""

    def __init__(self, nvcomp: Any) -> None:
        self._nvcomp = nvcomp
        self._own = _Codec()
        self.why_not = ""

    def compress(self, raw: memoryview, method: str) -> bytes:
        """Return frames, compressed by the CPU if the device cannot."""
        if self.why_not or len(raw) < PLANE_BYTES_MIN:
            return compress(raw, method)
        try:
            return self._coded(raw)
        except Exception as error:  # noqa: BLE001 - error of driver, library, or out of device memory: save without the GPU
            self.why_not = f"nvCOMP: {type(error).__name__}: {error}".splitlines()[0][:200]
            return compress(raw, method)

    def _coded(self, raw: memoryview) -> bytes:
        codec = self._own.codec
        if codec is None:
            raw_frames = self._nvcomp.BitstreamKind.RAW
            codec = self._own.codec = self._nvcomp.Codec(
                algorithm="Zstd", bitstream_kind=raw_frames, uncomp_chunk_size=PIECE_BYTES
            )
        plane = np.frombuffer(raw, np.uint8)
        begins = range(0, len(plane), PIECE_BYTES)
        lengths = [min(PIECE_BYTES, len(plane) - begin) for begin in begins]
        on_device = self._nvcomp.as_array(plane).cuda()
        frames = codec.encode(self._nvcomp.as_arrays(on_device, list(begins), lengths))
        for begin, length, piece in zip(begins, lengths, codec.decode(frames).cpu(), strict=True):
            if not np.array_equal(np.asarray(piece).view(np.uint8).reshape(-1), plane[begin : begin + length]):
                raise ValueError(f"byte {begin} and what follows came back as something else")
        return b"".join(np.asarray(frame).tobytes() for frame in frames.cpu())


def on_gpu() -> tuple[OnGpu | None, str]:
    """Return the GPU compressor, or None and the reason. Cost: a context on the device, the first time."""
    try:
        from nvidia import nvcomp
    except (ImportError, OSError) as error:  # not installed, or its library cannot be loaded
        return None, f"nvCOMP is not here: {error}"
    coder = OnGpu(nvcomp)
    coder.compress(memoryview(bytes(PLANE_BYTES_MIN)), "entropy")
    return (None, coder.why_not) if coder.why_not else (coder, "")
