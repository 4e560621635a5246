"""Codecs of chunks: byte planes of values, or of their differences from an earlier chunk, compressed by zstd where that helps. Pure.

A sample first estimates the gain, so that an incompressible chunk costs little. Most planes of trained values are noise, and are stored
raw. In the other planes, neighbours share only their distribution. There zstd is used only as an entropy coder, without a search for
repetitions, which is several times as fast. If a sample has repetitions, as mostly zero differences do, zstd searches for them.

A coded chunk is

====================  ====================================================================================
byte 0                1, the version of this coding
byte 1                an element's bytes (1, 2, 4, 8); + 16: floating point; + 32: differences
byte 2                number of planes
5 bytes a plane       its width times 16, + 1 if zstd frames; then the stored length, little-endian
the planes            one after the other, the uppermost first
====================  ====================================================================================

in that order. Speed on one core: about 1 GB/s to encode, 2 GB/s to decode. Memory: twice the chunk.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from relight.errors import CorruptCheckpoint
from relight.format.dtypes import DType
from relight.format.entropy import Compress, Leveled, compress, decompress
from relight.format.planes import Elements, Rooms, elements, join, split, widths_of

VERSION = 1
GAIN = 0.97
"""A plane or chunk is stored raw if compression leaves more than this share of it."""
UNROTATED_LOSS = 0.01
"""If no number of a sample is negative, its bits are not rotated, unless that codes it longer by more than this share. Rotation moves the
constant sign into the lowest byte. An entropy coder then decodes that whole plane to save one bit of eight."""
DIFFERENCE_GAIN = 0.95
"""Largest size of differences relative to the chunk coded alone, to be worth a reader's read of another chunk."""
SAMPLES, SAMPLE_BYTES = 4, 16 << 10
REPEATS, REPEATS_LEAST = 0.9, 0.02
"""Repetitions are searched if a sample then shrinks to less than the first share of its size without a search, and the gain is at least
the second share of the sample. The search doubles the time."""
MOSTLY_ALIKE = 0.07
"""Repetitions are also searched if a sample shrinks below this share without a search: nearly all bytes are equal, as in barely changed
data. zstd skips long runs quickly, and the sample may lack the changes between them."""

_FLOATING, _DIFFERENCES = 16, 32
_PLANE = struct.Struct("<BI")
_HEAD_BYTES = 3


class ElementKind(NamedTuple):
    """Kind of elements: bytes per element, and whether they are floating-point numbers."""

    width: int
    floating: bool


def kind_of(dtype: DType) -> ElementKind:
    """Return the kind of a tensor's elements. A complex number counts as two floating-point numbers."""
    name, width = dtype.name, dtype.itemsize
    if name.startswith("complex"):
        return ElementKind(width // 2, True)
    return ElementKind(width, name.startswith(("float", "bfloat")))


BYTES = ElementKind(1, False)


@dataclass(frozen=True, slots=True)
class Way:
    """Coding of a chunk, and the coded size that a sample predicts, as a share of the chunk."""

    kind: ElementKind
    difference: bool
    widths: tuple[int, ...]
    methods: tuple[str, ...]
    """For each plane ``raw``, ``entropy`` or ``repeats``."""
    share: float


def choose(
    data: memoryview, kind: ElementKind, base: memoryview | None = None, trial: Compress = compress
) -> Way | None:
    """Return the best way to code ``data``; None if it would not become smaller.

    ``base`` is an earlier chunk of the same length and kind; it is used if that is better by 5%. ``trial`` codes the samples. Cost: codes
    64 KiB for each of these: rotated bits, unrotated bits if no number is negative, differences.
    """
    if len(data) % kind.width:
        kind = BYTES
    sample = _sample(data, kind)
    best = rotated = _way(sample, None, kind, trial)
    if kind.floating and not int(sample.max(initial=0)) >> (8 * kind.width - 1):
        plain = _way(sample, None, ElementKind(kind.width, False), trial)
        loss = 0.0 if isinstance(trial, Leveled) else UNROTATED_LOSS
        best = plain if plain.share <= rotated.share * (1 + loss) else rotated
    if base is not None:
        delta = _way(sample, _sample(base, kind), kind, trial)
        best = delta if delta.share <= min(DIFFERENCE_GAIN * rotated.share, best.share) else best
    return best if best.share <= GAIN else None


def unchanged(data: memoryview, base: memoryview) -> float:
    """Return the share of ``data`` that equals ``base``, in words of eight bytes. Cost: one read of both, a few GB/s."""
    whole = len(data) // 8 * 8
    if not whole:
        return float(data == base)
    here, base_words = np.frombuffer(data[:whole], np.uint64), np.frombuffer(base[:whole], np.uint64)
    return int(np.count_nonzero(here == base_words)) * 8 / whole


def difference(kind: ElementKind, length: int) -> Way:
    """Return the way to code a chunk that mostly equals its base: zstd skips the long runs of zeros between the changes."""
    if length % kind.width:
        kind = BYTES
    return Way(kind, True, (1,) * kind.width, ("repeats",) * kind.width, 0.0)


def encode(
    data: memoryview, way: Way, base: memoryview | None = None, rooms: Rooms | None = None, by: Compress = compress
) -> bytes | None:
    """Return ``data`` coded in this way; None if it did not become smaller.

    ``base``: required if the way uses differences. ``rooms``: this thread's buffers, reused between chunks. ``by``: compresses planes.
    """
    values = elements(data, way.kind.width)
    earlier = elements(base, way.kind.width) if way.difference and base is not None else None
    planes = split(values, way.widths, turned=way.kind.floating, base=earlier, rooms=rooms)
    heads, bodies = [], []
    for plane, method in zip(planes, way.methods, strict=True):
        raw = plane.data.cast("B")
        body = raw if method == "raw" else by(raw, method)
        coded = len(body) < len(raw)
        bodies.append(body if coded else raw)
        heads.append(_PLANE.pack(plane.itemsize * 16 + coded, len(bodies[-1])))
    flags = way.kind.width + _FLOATING * way.kind.floating + _DIFFERENCES * (earlier is not None)
    stored = b"".join((bytes((VERSION, flags, len(planes))), *heads, *bodies))
    return stored if len(stored) < len(data) else None


def needs_base(stored: memoryview) -> bool:
    """Return whether a coded chunk has differences, and decoding needs its base."""
    return len(stored) > 1 and bool(stored[1] & _DIFFERENCES)


def decode(stored: memoryview, into: memoryview, base: memoryview | None = None, rooms: Rooms | None = None) -> None:
    """Decode a chunk into memory of its length. ``base`` may be the same memory. ``rooms``: as for ``encode``.

    Raise ``CorruptCheckpoint`` if it is not a coded chunk of that length, or the base has another length. Malicious bytes cannot make it
    allocate more than that length.
    """
    rooms = rooms or Rooms()
    width, floating, difference, planes = _planes(stored, len(into), rooms)
    if difference and (base is None or len(base) != len(into)):
        raise _wrong("the base chunk of its differences is missing")
    values = np.frombuffer(into, np.dtype(f"<u{width}"))
    join(
        planes,
        values,
        turned=floating,
        base=elements(base, width) if difference and base is not None else None,
        rooms=rooms,
    )


def _planes(stored: memoryview, length: int, rooms: Rooms) -> tuple[int, bool, bool, list[Elements]]:
    if len(stored) < _HEAD_BYTES or stored[0] != VERSION:
        raise _wrong("unknown version of the coding")
    width, count = stored[1] & 15, stored[2]
    offset = _HEAD_BYTES + count * _PLANE.size
    if stored[1] >= 64 or width not in (1, 2, 4, 8) or length % width or offset > len(stored):
        raise _wrong("its header is malformed")
    heads = [_PLANE.unpack_from(stored, _HEAD_BYTES + number * _PLANE.size) for number in range(count)]
    widths = tuple(head >> 4 for head, _ in heads)
    if widths not in {widths_of(width, single) for single in range(width + 1)} or any(
        head & 15 > 1 for head, _ in heads
    ):
        raise _wrong("the widths of its planes are invalid")
    planes: list[Elements] = []
    for plane_width, (head, stored_length) in zip(widths, heads, strict=True):
        body = stored[offset : offset + stored_length]
        offset += stored_length
        wanted = length // width * plane_width
        if head & 1:
            room = rooms.take(f"plane {len(planes)}", wanted, 1).data
            decompress(body, room)
            body = room
        if len(body) != wanted:
            raise _wrong("a plane has the wrong length")
        planes.append(elements(body, plane_width))
    if offset != len(stored):
        raise _wrong("bytes follow its planes")
    return width, bool(stored[1] & _FLOATING), bool(stored[1] & _DIFFERENCES), planes


def _sample(data: memoryview, kind: ElementKind) -> Elements:
    """Return a sample: ranges of elements, evenly distributed."""
    values = elements(data, kind.width)
    run = SAMPLE_BYTES // kind.width
    if len(values) <= SAMPLES * run:
        return values
    starts = [(len(values) - run) * number // (SAMPLES - 1) for number in range(SAMPLES)]
    return np.concatenate([values[start : start + run] for start in starts])


def _way(values: Elements, base: Elements | None, kind: ElementKind, trial: Compress) -> Way:
    planes = split(values, (1,) * kind.width, turned=kind.floating, base=base)
    tried = [_try(plane.data, trial) for plane in planes]
    single = max((number + 1 for number, (method, _) in enumerate(tried) if method != "raw"), default=0)
    widths = widths_of(kind.width, single)
    methods: list[str] = []
    number, share = 0, 0.0
    for width in widths:
        method, plane_share = tried[number] if width == 1 else ("raw", 1.0)
        methods.append(method)
        share += plane_share * width / kind.width
        number += width
    return Way(kind, base is not None, widths, tuple(methods), share)


def _try(plane: memoryview, trial: Compress) -> tuple[str, float]:
    """Return the method for a plane like this, and the coded size as a share. With a chosen level, size counts more than time."""
    length = max(len(plane), 1)
    shares = {"raw": GAIN, "entropy": len(trial(plane, "entropy")) / length}
    repeats = len(trial(plane, "repeats")) / length
    if shares["entropy"] <= MOSTLY_ALIKE:
        return "repeats", min(repeats, shares["entropy"])
    if isinstance(trial, Leveled) or repeats < min(REPEATS * shares["entropy"], shares["entropy"] - REPEATS_LEAST):
        shares["repeats"] = repeats
    method = min(shares, key=lambda name: shares[name])
    return method, 1.0 if method == "raw" else shares[method]


def _wrong(what: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"a chunk cannot be decoded: {what}",
        hint="relight verify --repair repairs it from another tier with an undamaged copy",
    )
