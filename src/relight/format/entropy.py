"""Compress planes of bytes as zstd frames, and decompress them. Pure.

If a plane has no repetitions, zstd is used only as an entropy coder, which is several times as fast. A plane is one or more consecutive
frames, so that several processors can code pieces of it. Decompression writes small pieces into existing memory: zstd would return a whole
plane in newly allocated memory, and the page faults cost as much as the decompression.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from functools import cache

from relight.errors import CorruptCheckpoint

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Compress = Callable[[memoryview, str], bytes]
"""Function that compresses a plane with a method, ``entropy`` or ``repeats``, and returns frames. Thread-safe."""
PIECE_BYTES = 32 << 10
"""Largest number of bytes that are decompressed at once."""
FRAME_MIN = 32 << 10
"""Smallest decompressed length of each frame except the last. Without a minimum, a plane of very many frames would take hours."""
LEVEL_MAX = 19
"""Higher levels of zstd use windows larger than ``decompress`` allows."""
_WINDOW_LOG = 17
_NOTHING = memoryview(b"")
_LITERALS = 1002
"""zstd's parameter to compress literals at every level. zstd calls it experimental, and has it since version 1.3."""
_C, _D = zstd.CompressionParameter, zstd.DecompressionParameter
_REPEATING: Mapping[int, int] = {_C.compression_level: 1}
_ENTROPY: Mapping[int, int] = {
    _C.strategy: zstd.Strategy.fast,
    _C.hash_log: 6,
    _C.min_match: 7,
    _C.window_log: _WINDOW_LOG,
}


def compress(raw: memoryview, method: str) -> bytes:
    """Return ``raw`` as one zstd frame."""
    return zstd.compress(raw, options=_REPEATING if method == "repeats" else entropy_options())


class Leveled:
    """``compress`` with a zstd level from 1 to ``LEVEL_MAX``, which searches longer for repetitions. Thread-safe."""

    def __init__(self, level: int) -> None:
        self._options: Mapping[int, int] = {_C.compression_level: level}

    def __call__(self, raw: memoryview, method: str) -> bytes:
        """Return ``raw`` as one zstd frame."""
        return zstd.compress(raw, options=self._options) if method == "repeats" else compress(raw, method)


def trial_of(by: Compress) -> Compress:
    """Return the compressor for samples: ``by`` if it has a level, else ``compress``, because a device compresses only whole chunks."""
    return by if isinstance(by, Leveled) else compress


@cache
def entropy_options(switch: int = _LITERALS) -> Mapping[int, int]:
    """Return options that make zstd an entropy coder: without a search for repetitions, if this zstd has that parameter."""
    options: Mapping[int, int] = {**_ENTROPY, _C.target_length: 1024, switch: 1}
    with contextlib.suppress(zstd.ZstdError, ValueError):
        zstd.compress(b"", options=options)
        return options
    return _ENTROPY


def decompress(body: memoryview, into: memoryview) -> None:
    """Decompress whole frames that fill ``into`` exactly. Raise ``CorruptCheckpoint`` otherwise.

    Malicious bytes cannot make it produce more than ``into``.
    """
    filled = before = 0
    while len(body):
        decompressor = zstd.ZstdDecompressor(options={_D.window_log_max: 23})
        given = body
        try:
            while not decompressor.eof:
                piece = decompressor.decompress(given, max_length=min(PIECE_BYTES, len(into) - filled) or 1)
                if filled + len(piece) > len(into):
                    raise _wrong("a plane is too long")
                if not piece and not len(given) and not decompressor.eof:
                    raise _wrong("a plane's last frame is truncated")
                into[filled : filled + len(piece)] = piece
                filled, given = filled + len(piece), _NOTHING
        except (zstd.ZstdError, EOFError) as error:
            raise _wrong(f"zstd failed: {error}") from error
        body = memoryview(decompressor.unused_data)
        if len(body) and filled - before < FRAME_MIN:
            raise _wrong("a plane's frames are too short")
        before = filled
    if filled != len(into):
        raise _wrong("a plane is too short")


def _wrong(what: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"a chunk cannot be decoded: {what}",
        hint="relight verify --repair repairs it from another tier with an undamaged copy",
    )
