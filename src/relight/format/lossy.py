"""Chunks that are stored with an error, and never more than is said: down-casts of float32, and blocks of 8 bits. Pure.

A lossy chunk is a byte 3, the number of its runs, 16 bits, for each run 9 bytes (the way, plus 16 if a coded chunk stands for its bytes;
its length in the chunk, 32 bits; its stored length, 32 bits), and what is stored of them, one after the other; all little-endian. What
they stand for *is* the chunk: its hash is of what they decode to, so nothing above knows of it. Whoever stores it sees first that no value
is off by more than the way allows, and stores the run as it is if one is.

=== ============== ============================================ =========================================
way                bytes                                        no value is off by more than
=== ============== ============================================ =========================================
0                  as they are                                  nothing
1   ``bfloat16``   its upper half, rounded to nearest, ties to  1/256 of itself, or 2^-133
                   even
2   ``float16``    so                                           1/2048 of itself, or 2^-25; none above 65504
3   ``int8``       for each 256 values a float32, the largest   1/254 of the largest of its 256
                   magnitude times ``STEP``; a byte each
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
"""The largest error, as ``policy.compact`` promises: of a value's own magnitude, or, for ``int8``, of the largest in its block."""
SMALLEST = {"bfloat16": 2.0**-133, "float16": 2.0**-25}
"""What values may be off by that are so small that they have hardly a digit."""
LEAST = 2.0**-100
"""Blocks whose step is smaller are never stored as ``int8``."""
BLOCK = 256
STEP = (1 - 2.0**-14) / 127
"""What an ``int8`` step is of the largest in its block. A step of 1/127 has values half-way between two steps that float32's rounding takes
beyond 1/254, one of some 100,000: each would have the whole run stored exactly."""
_VERSION = 3
_HALF, _FULL = codecs.ElementKind(2, True), codecs.ElementKind(4, True)
_NAMES = {0: "", **{number: name for name, number in WAYS.items()}}
_HEAD, _RUN = struct.Struct("<BH"), struct.Struct("<BII")
RUNS_MAX = 0xFFFF


class LossyRange(NamedTuple):
    """A run of a chunk, and the ways in which it may be stored, the smallest first; none: exactly."""

    length: int
    ways: tuple[str, ...] = ()
    most: float = math.inf
    """The largest error that a value of it may have, in addition to the way's own bound."""
    relative: bool = False
    """Whether that is a share of the run's largest magnitude."""


def encode_lossy(data: memoryview, runs: Sequence[LossyRange], by: Compress = compress) -> tuple[bytes, memoryview] | None:
    """The stored bytes, and what they decode to; None if nothing is gained, or all is as it was. Memory: the chunk, three times."""
    found, heads, bodies, at, lossy = bytearray(data), list[bytes](), list[bytes | memoryview](), 0, False
    for run in runs:
        length, piece = run.length, data[at : at + run.length]
        way, near = _nearest(piece, run)
        if near is None:
            body, flags = _packed(piece, _FULL if length % 4 == 0 else codecs.BYTES, by)
        else:
            body, flags = _packed(near[0], _HALF, by) if way != "int8" else (near[0], 0)
            flags, lossy = flags + WAYS[way], True
            found[at : at + length] = near[1]
        heads.append(_RUN.pack(flags, length, len(body)))
        bodies.append(body)
        at += length
    stored = b"".join((_HEAD.pack(_VERSION, len(runs)), *heads, *bodies))
    return (stored, memoryview(found)) if lossy and len(stored) < len(data) else None


def decode_lossy(stored: memoryview, into: memoryview) -> None:
    """The chunk that they stand for. ``CorruptCheckpoint`` if they make no sense."""
    version, count = _HEAD.unpack_from(stored) if len(stored) >= _HEAD.size else (0, 0)
    begin = _HEAD.size + count * _RUN.size
    if version != _VERSION or not count or begin > len(stored):
        raise CorruptCheckpoint("a chunk cannot be decoded: its head makes no sense")
    at = 0
    for number in range(count):
        flags, length, held = _RUN.unpack_from(stored, _HEAD.size + number * _RUN.size)
        if flags & 15 not in _NAMES or flags > 31 or at + length > len(into) or begin + held > len(stored) or (flags & 15 and length % 4):
            raise CorruptCheckpoint("a chunk cannot be decoded: its runs make no sense")
        _decode(_NAMES[flags & 15], bool(flags & 16), stored[begin : begin + held], into[at : at + length])
        at, begin = at + length, begin + held
    if at != len(into) or begin != len(stored):
        raise CorruptCheckpoint("a chunk cannot be decoded: its runs are not as long as it is")


def _decode(way: str, coded: bool, body: memoryview, into: memoryview) -> None:
    count = len(into) // 4
    length = {"": len(into), "int8": 4 * -(-count // BLOCK) + count}.get(way, 2 * count)
    if coded:
        held = memoryview(bytearray(length))
        codecs.decode(body, held)
        body = held
    if len(body) != length:
        raise CorruptCheckpoint("a chunk cannot be decoded: a run is not as long as it should be")
    if not way:
        into[:] = body
        return
    with np.errstate(all="ignore"):
        _DECODERS[way](body, np.frombuffer(into, "<f4"))


def _nearest(data: memoryview, run: LossyRange) -> tuple[str, tuple[memoryview, memoryview] | None]:
    """Return the first way of a run with errors within its bound, and what ``_near`` gives for it."""
    for way in run.ways:
        near = _near(data, way)
        if near is not None and (run.most == math.inf or _error(data, near[1]) <= run.most * (_largest(data) if run.relative else 1.0)):
            return way, near
    return "", None


def _error(data: memoryview, found: memoryview) -> float:
    """Return the largest error of finite float32 values, computed exactly."""
    return float(np.abs(np.frombuffer(data, "<f4").astype("f8") - np.frombuffer(found, "<f4")).max())


def _largest(data: memoryview) -> float:
    return float(np.abs(np.frombuffer(data, "<f4")).max())


def _near(data: memoryview, way: str) -> tuple[memoryview, memoryview] | None:
    """What is stored of float32 values, and what that decodes to; None if one would be further off than is allowed."""
    values = np.frombuffer(data, "<f4")
    if not len(values) or not np.isfinite(values).all():
        return None
    body = memoryview(_int8(values)) if way == "int8" else _half(data, way)
    if way == "int8":
        scales = np.frombuffer(body[: 4 * -(-len(values) // BLOCK)], "<f4")
        if ((scales > 0) & (scales < LEAST)).any():
            return None  # products that some processors, told so, take for zero
    found = memoryview(bytearray(len(data)))
    _decode(way, False, body, found)
    return (body, found) if _within(values, np.frombuffer(found, "<f4"), way) else None


def _half(data: memoryview, way: str) -> memoryview:
    held = memoryview(bytearray(len(data) // 2))
    derived.rounded(derived.KINDS[way], data, held)
    return held


def _packed(held: memoryview, kind: codecs.ElementKind, by: Compress) -> tuple[bytes | memoryview, int]:
    """It, coded if that is shorter, and the flag that says so."""
    best = codecs.choose(held, kind, None, trial_of(by)) if held else None
    body = None if best is None else codecs.encode(held, best, by=trial_of(by))
    return (held, 0) if body is None else (body, 16)


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


def _within(values: np.ndarray, found: np.ndarray, way: str) -> bool:
    error = np.abs(values.astype("f8") - found)
    if way != "int8":
        least = SMALLEST[way]
        return bool((error <= np.maximum(np.abs(values, dtype="f8") * BOUNDS[way], least)).all())
    blocks = -(-len(values) // BLOCK)
    padded = np.zeros(blocks * BLOCK)
    padded[: len(values)] = np.abs(values)
    largest = np.repeat(padded.reshape(blocks, BLOCK).max(axis=1), BLOCK)[: len(values)]
    return bool((error <= largest * (BOUNDS[way] * (1 + 1e-6))).all())
