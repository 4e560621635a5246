"""Lossy chunks with a bounded error: float32 values as 16-bit floats, or as blocks of 8-bit integers. Pure.

A lossy chunk is, all little-endian: a byte 3; the number of its runs (16 bits); for each run 9 bytes (the way, plus 16 if its bytes are a
coded chunk; its length in the chunk, 32 bits; its stored length, 32 bits); and the stored bytes of the runs, one after the other. The
chunk's hash is the hash of the decoded bytes, so readers treat it like any other chunk. Before the writer stores a run, it checks the error
of every value. If one exceeds the bound of the way, the run is stored exactly.

=== ============== ============================================ =========================================
way                stored bytes                                 largest error of a value
=== ============== ============================================ =========================================
0                  unchanged                                    none
1   ``bfloat16``   the upper half of each value, rounded to     1/256 of its magnitude, or 2^-133
                   nearest, ties to even
2   ``float16``    each value, rounded in the same way          1/2048 of its magnitude, or 2^-25;
                                                                none above 65504
3   ``int8``       for each block of 256 values a float32 step  1/254 of the largest magnitude in its
                   (the largest magnitude times ``STEP``); then block
                   a byte for each value
=== ============== ============================================ =========================================
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from relight.errors import CorruptCheckpoint
from relight.format import codecs, derived
from relight.format.entropy import Compress, compress, trial_of

WAYS = {"bfloat16": 1, "float16": 2, "int8": 3}
BOUNDS = {"bfloat16": 1 / 256, "float16": 1 / 2048, "int8": 1 / 254}
"""Largest error that ``policy.compact`` promises, relative to a value's magnitude, or for ``int8`` to the largest one in its block."""
SMALLEST = {"bfloat16": 2.0**-133, "float16": 2.0**-25}
"""Largest absolute error of values that are subnormal in 16 bits, and so have few significant bits."""
LEAST = 2.0**-100
"""Blocks with a smaller step are never stored as ``int8``."""
BLOCK = 256
STEP = (1 - 2.0**-14) / 127
"""Step of ``int8``, relative to the largest magnitude in the block. With 1/127, float32 rounding would push one of some 100,000 values,
half-way between two steps, beyond 1/254; each such value would make the writer store its whole run exactly."""
_VERSION = 3
_HALF, _FULL = codecs.ElementKind(2, True), codecs.ElementKind(4, True)
_NAMES = {0: "", **{number: name for name, number in WAYS.items()}}
_HEAD, _RUN = struct.Struct("<BH"), struct.Struct("<BII")
RUNS_MAX = 0xFFFF


class LossyRange(NamedTuple):
    """A run of a chunk, and the ways in which it may be stored, the smallest first. Without any way, it is stored exactly."""

    length: int
    ways: tuple[str, ...] = ()
    most: float = math.inf
    """Largest error that a value may have, as a second bound next to that of the way."""
    relative: bool = False
    """Whether ``most`` is relative to the run's largest magnitude."""


def encode_lossy(
    data: memoryview, runs: Sequence[LossyRange], by: Compress = compress
) -> tuple[bytes, memoryview] | None:
    """Return the stored bytes and the bytes that they decode to; None if they are not smaller, or no run is lossy.

    Memory: three times the chunk.
    """
    decoded, heads, bodies, offset, lossy = bytearray(data), list[bytes](), list[bytes | memoryview](), 0, False
    for run in runs:
        length, piece = run.length, data[offset : offset + run.length]
        way, near = _nearest(piece, run)
        if near is None:
            body, flags = _packed(piece, _FULL if length % 4 == 0 else codecs.BYTES, by)
        else:
            body, flags = _packed(near[0], _HALF, by) if way != "int8" else (near[0], 0)
            flags, lossy = flags + WAYS[way], True
            decoded[offset : offset + length] = near[1]
        heads.append(_RUN.pack(flags, length, len(body)))
        bodies.append(body)
        offset += length
    stored = b"".join((_HEAD.pack(_VERSION, len(runs)), *heads, *bodies))
    return (stored, memoryview(decoded)) if lossy and len(stored) < len(data) else None


def decode_lossy(stored: memoryview, into: memoryview) -> None:
    """Decode a lossy chunk into memory of its length. Raise ``CorruptCheckpoint`` if the stored bytes are malformed."""
    version, count = _HEAD.unpack_from(stored) if len(stored) >= _HEAD.size else (0, 0)
    begin = _HEAD.size + count * _RUN.size
    if version != _VERSION or not count or begin > len(stored):
        raise CorruptCheckpoint("a chunk cannot be decoded: its header is malformed")
    offset = 0
    for number in range(count):
        flags, length, size = _RUN.unpack_from(stored, _HEAD.size + number * _RUN.size)
        too_long = offset + length > len(into) or begin + size > len(stored)
        if flags & 15 not in _NAMES or flags > 31 or too_long or (flags & 15 and length % 4):
            raise CorruptCheckpoint("a chunk cannot be decoded: its runs are malformed")
        _decode(_NAMES[flags & 15], bool(flags & 16), stored[begin : begin + size], into[offset : offset + length])
        offset, begin = offset + length, begin + size
    if offset != len(into) or begin != len(stored):
        raise CorruptCheckpoint("a chunk cannot be decoded: its runs do not fill it exactly")


def _decode(encoding: str, coded: bool, body: memoryview, into: memoryview) -> None:
    count = len(into) // 4
    length = {"": len(into), "int8": 4 * -(-count // BLOCK) + count}.get(encoding, 2 * count)
    if coded:
        decoded = memoryview(bytearray(length))
        codecs.decode(body, decoded)
        body = decoded
    if len(body) != length:
        raise CorruptCheckpoint("a chunk cannot be decoded: a run has the wrong length")
    if not encoding:
        into[:] = body
        return
    with np.errstate(all="ignore"):
        _DECODERS[encoding](body, np.frombuffer(into, "<f4"))


def _nearest(data: memoryview, run: LossyRange) -> tuple[str, tuple[memoryview, memoryview] | None]:
    """Return the first way of a run with errors within its bound, and the result of ``_near`` for it; "" and None without one."""
    for way in run.ways:
        near = _near(data, way)
        if near is not None and (
            run.most == math.inf or _error(data, near[1]) <= run.most * (_largest(data) if run.relative else 1.0)
        ):
            return way, near
    return "", None


def _error(data: memoryview, decoded: memoryview) -> float:
    """Return the largest error of finite float32 values, computed exactly."""
    return float(np.abs(np.frombuffer(data, "<f4").astype("f8") - np.frombuffer(decoded, "<f4")).max())


def _largest(data: memoryview) -> float:
    return float(np.abs(np.frombuffer(data, "<f4")).max())


def _near(data: memoryview, encoding: str) -> tuple[memoryview, memoryview] | None:
    """Return the stored bytes of float32 values and the bytes that they decode to; None if a value exceeds the bound of the way."""
    values = np.frombuffer(data, "<f4")
    if not len(values) or not np.isfinite(values).all():
        return None
    body = memoryview(_int8(values)) if encoding == "int8" else _half(data, encoding)
    if encoding == "int8":
        scales = np.frombuffer(body[: 4 * -(-len(values) // BLOCK)], "<f4")
        if ((scales > 0) & (scales < LEAST)).any():
            return None  # a processor that flushes subnormals to zero would decode other values
    decoded = memoryview(bytearray(len(data)))
    _decode(encoding, False, body, decoded)
    return (body, decoded) if _within(values, np.frombuffer(decoded, "<f4"), encoding) else None


def _half(data: memoryview, encoding: str) -> memoryview:
    halves = memoryview(bytearray(len(data) // 2))
    derived.rounded(derived.KINDS[encoding], data, halves)
    return halves


def _packed(data: memoryview, kind: codecs.ElementKind, by: Compress) -> tuple[bytes | memoryview, int]:
    """Return ``data`` and 0, or ``data`` coded and the flag 16 if coding makes it smaller."""
    best = codecs.choose(data, kind, None, trial_of(by)) if data else None
    body = None if best is None else codecs.encode(data, best, by=trial_of(by))
    return (data, 0) if body is None else (body, 16)


def _int8(values: np.ndarray) -> bytes:
    blocks = -(-len(values) // BLOCK)
    padded = np.zeros(blocks * BLOCK, "<f4")
    padded[: len(values)] = values
    rows = padded.reshape(blocks, BLOCK)
    scales = (np.abs(rows).max(axis=1) * STEP).astype("<f4")
    with np.errstate(all="ignore"):
        steps = np.rint(rows / np.where(scales > 0, scales, 1)[:, None]).clip(-127, 127).astype("i1")
    return b"".join((scales.tobytes(), steps.reshape(-1)[: len(values)].tobytes()))


def _from_bfloat16(body: memoryview, out: np.ndarray) -> None:
    out.view("<u4")[:] = np.frombuffer(body, "<u2").astype("<u4") << np.uint32(16)


def _from_float16(body: memoryview, out: np.ndarray) -> None:
    out[:] = np.frombuffer(body, "<f2")


def _from_int8(body: memoryview, out: np.ndarray) -> None:
    blocks = -(-len(out) // BLOCK)
    scales = np.repeat(np.frombuffer(body[: 4 * blocks], "<f4"), BLOCK)[: len(out)]
    out[:] = np.frombuffer(body[4 * blocks :], "i1") * scales


_DECODERS: dict[str, Callable[[memoryview, np.ndarray], None]] = {
    "bfloat16": _from_bfloat16, "float16": _from_float16, "int8": _from_int8,
}  # fmt: skip


def _within(values: np.ndarray, decoded: np.ndarray, encoding: str) -> bool:
    error = np.abs(values.astype("f8") - decoded)
    if encoding != "int8":
        least = SMALLEST[encoding]
        return bool((error <= np.maximum(np.abs(values, dtype="f8") * BOUNDS[encoding], least)).all())
    blocks = -(-len(values) // BLOCK)
    padded = np.zeros(blocks * BLOCK)
    padded[: len(values)] = np.abs(values)
    largest = np.repeat(padded.reshape(blocks, BLOCK).max(axis=1), BLOCK)[: len(values)]
    return bool((error <= largest * (BOUNDS[encoding] * (1 + 1e-6))).all())
