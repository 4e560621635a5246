"""Chunks, smaller: planes of bytes, of values or of their differences from earlier ones, each coded by zstd if that gains anything. Pure.

What a chunk comes to is told by a sample of it first, so that one that would not become smaller costs next to nothing. Most planes of
trained values are noise, and stored as they are. In the others neighbours have nothing in common but their distribution: zstd is used as a
mere entropy coder, which looks for no repetitions, and is several times as fast; where a sample has repetitions, as differences do that
are mostly zero, it looks for them.

A coded chunk is

====================  ====================================================================================
byte 0                1, the version of this coding
byte 1                an element's bytes (1, 2, 4, 8); + 16: floating point; + 32: differences
byte 2                how many planes follow
5 bytes a plane       its width times 16, + 1 if zstd frames; then the stored length, little-endian
the planes            one after the other, the uppermost first
====================  ====================================================================================

in that order. Cost, on one core: about a gigabyte a second, and two back. Memory: the chunk, twice.
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
"""A plane or chunk that comes to more than this of itself is stored as it is."""
DIFFERENCE_GAIN = 0.95
"""What differences must come to of what the chunk comes to by itself: they cost a reader another chunk."""
SAMPLES, SAMPLE_BYTES = 4, 16 << 10
REPEATS, REPEATS_LEAST = 0.9, 0.02
"""Repetitions are looked for if a sample comes to less than the first of what it comes to without, and to less by the second of itself:
looking takes twice the time."""
MOSTLY_ALIKE = 0.07
"""They are looked for, too, where a sample comes to less than that without: nearly all of it is one byte, as where little was touched.
Long runs are stepped over as fast as anything, and what the sample has not met lies in between."""

_FLOATING, _DIFFERENCES = 16, 32
_PLANE = struct.Struct("<BI")
_HEAD_BYTES = 3


class ElementKind(NamedTuple):
    """What elements are: their bytes, and whether they are floating-point numbers."""

    width: int
    floating: bool


def kind_of(dtype: DType) -> ElementKind:
    """The kind of a tensor's elements. Complex numbers are two floating-point ones each."""
    name, width = dtype.name, dtype.itemsize
    if name.startswith("complex"):
        return ElementKind(width // 2, True)
    return ElementKind(width, name.startswith(("float", "bfloat")))


BYTES = ElementKind(1, False)


@dataclass(frozen=True, slots=True)
class Way:
    """How a chunk is to be coded, and what a sample says it comes to, as a share of itself."""

    kind: ElementKind
    difference: bool
    widths: tuple[int, ...]
    methods: tuple[str, ...]
    """For each plane ``raw``, ``entropy`` or ``repeats``."""
    share: float


def choose(data: memoryview, kind: ElementKind, base: memoryview | None = None, trial: Compress = compress) -> Way | None:
    """How best to code ``data``; None if it would not become smaller. ``base``: an earlier chunk of the same length and kind; it is
    used if that is better by a twentieth. ``trial``: codes the samples. Cost: that of coding 64 KiB, or twice that."""
    if len(data) % kind.width:
        kind = BYTES
    best = _way(_sample(data, kind), None, kind, trial)
    if base is not None:
        other = _way(_sample(data, kind), _sample(base, kind), kind, trial)
        best = other if other.share <= DIFFERENCE_GAIN * best.share else best
    return best if best.share <= GAIN else None


def unchanged(data: memoryview, base: memoryview) -> float:
    """Return the share of ``data`` that equals ``base``, in words of eight bytes. Cost: one read of both, a few GB/s."""
    whole = len(data) // 8 * 8
    if not whole:
        return float(data == base)
    here, there = np.frombuffer(data[:whole], np.uint64), np.frombuffer(base[:whole], np.uint64)
    return int(np.count_nonzero(here == there)) * 8 / whole


def difference(kind: ElementKind, length: int) -> Way:
    """The way for a chunk of which most equals its base: zstd steps over the long runs of zeros between the changes."""
    if length % kind.width:
        kind = BYTES
    return Way(kind, True, (1,) * kind.width, ("repeats",) * kind.width, 0.0)


def encode(data: memoryview, way: Way, base: memoryview | None = None, rooms: Rooms | None = None, by: Compress = compress) -> bytes | None:
    """``data`` coded that way; None if it did not become smaller. ``base`` must be given where the way has differences. ``rooms``: this
    thread's, kept from one chunk to the next. ``by``: makes frames of planes."""
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
    """Whether these are differences."""
    return len(stored) > 1 and bool(stored[1] & _DIFFERENCES)


def decode(stored: memoryview, into: memoryview, base: memoryview | None = None, rooms: Rooms | None = None) -> None:
    """The chunk that was coded, into memory of its length. ``base`` may be that memory itself. ``rooms``: as for ``encode``.

    ``CorruptCheckpoint`` if it is no coded chunk of that length, or its base is not. Nothing beyond the length that is asked for is
    ever made, whatever the bytes say.
    """
    rooms = rooms or Rooms()
    width, floating, difference, planes = _planes(stored, len(into), rooms)
    if difference and (base is None or len(base) != len(into)):
        raise _wrong("it holds differences from a chunk that is not there")
    values = np.frombuffer(into, np.dtype(f"<u{width}"))
    join(planes, values, turned=floating, base=elements(base, width) if difference and base is not None else None, rooms=rooms)


def _planes(stored: memoryview, length: int, rooms: Rooms) -> tuple[int, bool, bool, list[Elements]]:
    if len(stored) < _HEAD_BYTES or stored[0] != VERSION:
        raise _wrong("it is no coded chunk that this version knows")
    width, count = stored[1] & 15, stored[2]
    at = _HEAD_BYTES + count * _PLANE.size
    if stored[1] >= 64 or width not in (1, 2, 4, 8) or length % width or at > len(stored):
        raise _wrong("its head makes no sense")
    heads = [_PLANE.unpack_from(stored, _HEAD_BYTES + number * _PLANE.size) for number in range(count)]
    widths = tuple(head >> 4 for head, _ in heads)
    if widths not in {widths_of(width, single) for single in range(width + 1)} or any(head & 15 > 1 for head, _ in heads):
        raise _wrong("its planes are not those of an element")
    planes: list[Elements] = []
    for one, (head, held) in zip(widths, heads, strict=True):
        body = stored[at : at + held]
        at += held
        wanted = length // width * one
        if head & 1:
            room = rooms.take(f"plane {len(planes)}", wanted, 1).data
            decompress(body, room)
            body = room
        if len(body) != wanted:
            raise _wrong("a plane is not as long as it should be")
        planes.append(elements(body, one))
    if at != len(stored):
        raise _wrong("there is more than its planes")
    return width, bool(stored[1] & _FLOATING), bool(stored[1] & _DIFFERENCES), planes


def _sample(data: memoryview, kind: ElementKind) -> Elements:
    """Runs of elements from all over."""
    values = elements(data, kind.width)
    run = SAMPLE_BYTES // kind.width
    if len(values) <= SAMPLES * run:
        return values
    starts = [(len(values) - run) * number // (SAMPLES - 1) for number in range(SAMPLES)]
    return np.concatenate([values[start : start + run] for start in starts])


def _way(values: Elements, base: Elements | None, kind: ElementKind, trial: Compress) -> Way:
    planes = split(values, (1,) * kind.width, turned=kind.floating, base=base)
    found = [_try(plane.data, trial) for plane in planes]
    single = max((number + 1 for number, (method, _) in enumerate(found) if method != "raw"), default=0)
    widths = widths_of(kind.width, single)
    methods: list[str] = []
    at, share = 0, 0.0
    for width in widths:
        method, one = found[at] if width == 1 else ("raw", 1.0)
        methods.append(method)
        share += one * width / kind.width
        at += width
    return Way(kind, base is not None, widths, tuple(methods), share)


def _try(plane: memoryview, trial: Compress) -> tuple[str, float]:
    """The method for a plane like this, and what it comes to. If the caller has chosen a level, size counts more than time."""
    length = max(len(plane), 1)
    shares = {"raw": GAIN, "entropy": len(trial(plane, "entropy")) / length}
    repeats = len(trial(plane, "repeats")) / length
    if shares["entropy"] <= MOSTLY_ALIKE:
        return "repeats", min(repeats, shares["entropy"])
    if isinstance(trial, Leveled) or repeats < min(REPEATS * shares["entropy"], shares["entropy"] - REPEATS_LEAST):
        shares["repeats"] = repeats
    method = min(shares, key=lambda one: shares[one])
    return method, 1.0 if method == "raw" else shares[method]


def _wrong(what: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"a chunk cannot be decoded: {what}", hint="relight scrub mends it from another tier that has it whole")
