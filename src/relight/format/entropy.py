"""Planes of bytes as zstd frames, and back. Pure.

zstd is used as a mere entropy coder where a plane has no repetitions, which is several times as fast. A plane is one frame or several, one
behind the other: who codes on many processors at once codes pieces. What is decoded comes in small pieces, into memory that is there:
what zstd gives as a whole lies in memory that is new, whose pages cost as much as the decoding.
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
"""A plane, and how: ``entropy`` or ``repeats``; gives frames. Any thread."""
PIECE_BYTES = 32 << 10
"""What is decoded at once."""
FRAME_MIN = 32 << 10
"""What each frame but the last comes to, at least: a plane of countless frames would take for ever."""
LEVEL_MAX = 19
"""Higher levels of zstd use windows larger than ``decompress`` allows."""
_WINDOW_LOG = 17
_NOTHING = memoryview(b"")
_LITERALS = 1002
"""zstd's switch for coding literals whatever the level: one of those it calls experimental, and has had since its version 1.3."""
_C, _D = zstd.CompressionParameter, zstd.DecompressionParameter
_REPEATING: Mapping[int, int] = {_C.compression_level: 1}
_ENTROPY: Mapping[int, int] = {_C.strategy: zstd.Strategy.fast, _C.hash_log: 6, _C.min_match: 7, _C.window_log: _WINDOW_LOG}


def compress(raw: memoryview, method: str) -> bytes:
    """One frame."""
    return zstd.compress(raw, options=_REPEATING if method == "repeats" else entropy_options())


class Leveled:
    """``compress`` at a level of zstd from 1 to ``LEVEL_MAX``: it searches longer for repetitions. Any thread; any reader decodes it."""

    def __init__(self, level: int) -> None:
        self._options: Mapping[int, int] = {_C.compression_level: level}

    def __call__(self, raw: memoryview, method: str) -> bytes:
        """Return one frame."""
        return zstd.compress(raw, options=self._options) if method == "repeats" else compress(raw, method)


def trial_of(by: Compress) -> Compress:
    """Return what tries samples for ``by``: itself if it is of a level, else ``compress``, as a device is for whole chunks."""
    return by if isinstance(by, Leveled) else compress


@cache
def entropy_options(switch: int = _LITERALS) -> Mapping[int, int]:
    """Return options of zstd as an entropy coder: without a search for repetitions, if this zstd has that switch."""
    stepping: Mapping[int, int] = {**_ENTROPY, _C.target_length: 1024, switch: 1}
    with contextlib.suppress(zstd.ZstdError, ValueError):
        zstd.compress(b"", options=stepping)
        return stepping
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
                    raise _wrong("a plane is longer than it should be")
                if not piece and not len(given) and not decompressor.eof:
                    raise _wrong("a plane's last frame is cut off")
                into[filled : filled + len(piece)] = piece
                filled, given = filled + len(piece), _NOTHING
        except (zstd.ZstdError, EOFError) as error:
            raise _wrong(f"zstd failed: {error}") from error
        body = memoryview(decompressor.unused_data)
        if len(body) and filled - before < FRAME_MIN:
            raise _wrong("a plane's frames are shorter than they may be")
        before = filled
    if filled != len(into):
        raise _wrong("a plane is shorter than it should be")


def _wrong(what: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"a chunk cannot be decoded: {what}", hint="relight scrub repairs it from another tier that has it whole")
