"""Derived chunks: 16-bit weights that equal their rounded float32 master weights in the same pack, and need not be stored. Pure.

A derived chunk is stored as a byte 2, a byte for the kind (1: bfloat16, 2: float16), and 12 bytes for each of its runs, in order: the
offset in the logical pack of the float32 values from which the run is rounded (64 bits), and the run's own length in bytes (32 bits), both
little-endian. Rounding is to nearest, ties to even, as every processor rounds. The writer checks that rounding gives exactly the chunk's
bytes, and the reader checks the chunk's hash.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from relight.errors import CorruptCheckpoint

KINDS = {"bfloat16": 1, "float16": 2}
"""Stored kind of each dtype."""
RUNS_MAX = 64
"""Largest number of runs of a chunk. A reader may have to decode one or two chunks for each."""
_RUN = struct.Struct("<QI")
_VERSION = 2


class SourceRange(NamedTuple):
    """Range of a chunk: its bytes, and the pack offset of the float32 values (twice as many bytes) that it is rounded from."""

    offset: int
    length: int


def encode_derived(kind: int, runs: Sequence[SourceRange]) -> bytes:
    """Return the stored bytes of a derived chunk."""
    return bytes((_VERSION, kind)) + b"".join(_RUN.pack(*run) for run in runs)


def parse_derived(stored: memoryview, length: int) -> tuple[int, list[SourceRange]]:
    """Return kind and ranges of a derived chunk of the given length. Raise ``CorruptCheckpoint`` if they are malformed."""
    if (
        len(stored) < 2 + _RUN.size
        or (len(stored) - 2) % _RUN.size
        or stored[0] != _VERSION
        or stored[1] not in KINDS.values()
    ):
        raise CorruptCheckpoint("a chunk cannot be decoded: its header is malformed")
    runs = [SourceRange(*fields) for fields in _RUN.iter_unpack(stored[2:])]
    if sum(run.length for run in runs) != length or any(
        run.offset >= 1 << 62 or run.length % 2 or not run.length for run in runs
    ):
        raise CorruptCheckpoint("a chunk cannot be decoded: its runs are malformed")
    if len(runs) > RUNS_MAX:
        raise CorruptCheckpoint(f"a chunk cannot be decoded: more than {RUNS_MAX} runs")
    return stored[1], runs


def rounded(kind: int, source: memoryview, into: memoryview) -> None:
    """Round the float32 values in ``source`` to 16 bits, into half as many bytes. Temporary memory: the size of ``source``."""
    out = np.frombuffer(into, "<u2")
    if kind == KINDS["float16"]:
        with np.errstate(all="ignore"):
            out[:] = np.frombuffer(source, "<f4").astype("<f2").view("<u2")
        return
    bits = np.frombuffer(source, "<u4")
    up = (bits >> np.uint32(16)) & np.uint32(1)
    up += np.uint32(0x7FFF)
    up += bits
    up >>= np.uint32(16)
    out[:] = up


def is_rounded(kind: int, source: memoryview, data: memoryview) -> bool:
    """Return whether ``data`` equals ``source`` rounded. Cheap if it does not: the first 4 KiB are compared first."""
    for end in (min(len(data), 4096), len(data)):
        result = memoryview(bytearray(end))
        rounded(kind, source[: 2 * end], result)
        if result != data[:end]:
            return False
    return True
