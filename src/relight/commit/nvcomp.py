"""Planes coded by nvCOMP on a GPU: frames of zstd that any reader reads, with or without one.

A plane goes to the device as it is, is coded there in pieces, a frame each, all at once; is decoded there again; and what that comes to is
compared with the plane here, as nobody else would before it is needed. What goes wrong once is not tried again: processors code then.
nvCOMP's codecs are a thread's own.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from relight.format.entropy import compress

PIECE_BYTES = 64 << 10
"""A frame's, as many processors of a GPU work on one each. Not less than ``entropy.FRAME_MIN``."""
PLANE_BYTES_MIN = 256 << 10
"""Shorter planes are coded here: bringing them there and back takes longer."""


class OnGpu:
    """``compress`` as ``entropy.compress`` is, on the device that is current. ``why_not``: what went wrong, "" as long as nothing has."""

    def __init__(self, nvcomp: Any) -> None:
        self._nvcomp = nvcomp
        self._own = threading.local()
        self.why_not = ""

    def compress(self, raw: memoryview, method: str) -> bytes:
        """Frames; by the processor where the device cannot."""
        if self.why_not or len(raw) < PLANE_BYTES_MIN:
            return compress(raw, method)
        try:
            return self._coded(raw)
        except Exception as error:  # noqa: BLE001 - a driver's, a library's, out of the device's memory: the save is made without it
            self.why_not = f"nvCOMP: {type(error).__name__}: {error}".splitlines()[0][:200]
            return compress(raw, method)

    def _coded(self, raw: memoryview) -> bytes:
        codec = getattr(self._own, "codec", None)
        if codec is None:
            raw_frames = self._nvcomp.BitstreamKind.RAW
            codec = self._own.codec = self._nvcomp.Codec(algorithm="Zstd", bitstream_kind=raw_frames, uncomp_chunk_size=PIECE_BYTES)
        plane = np.frombuffer(raw, np.uint8)
        begins = range(0, len(plane), PIECE_BYTES)
        lengths = [min(PIECE_BYTES, len(plane) - begin) for begin in begins]
        there = self._nvcomp.as_array(plane).cuda()
        frames = codec.encode(self._nvcomp.as_arrays(there, list(begins), lengths))
        for begin, length, piece in zip(begins, lengths, codec.decode(frames).cpu(), strict=True):
            if not np.array_equal(np.asarray(piece).view(np.uint8).reshape(-1), plane[begin : begin + length]):
                raise ValueError(f"byte {begin} and what follows came back as something else")
        return b"".join(np.asarray(frame).tobytes() for frame in frames.cpu())


def on_gpu() -> tuple[OnGpu | None, str]:
    """nvCOMP, if it is here and codes; else None, and why not. Cost: a context on the device, the first time."""
    try:
        from nvidia import nvcomp
    except (ImportError, OSError) as error:  # not installed; or a library of it that cannot be loaded
        return None, f"nvCOMP is not here: {error}"
    found = OnGpu(nvcomp)
    found.compress(memoryview(bytes(PLANE_BYTES_MIN)), "entropy")
    return (None, found.why_not) if found.why_not else (found, "")
