"""BLAKE3, 32 bytes: the one hash of the format.

The library releases the GIL on large buffers and takes any contiguous buffer without copying it.
"""

from __future__ import annotations

import re

from blake3 import blake3

Digest = blake3

DIGEST_BYTES = 32
ZERO_HEX = "0" * 64
_HEX = re.compile(r"[0-9a-f]{64}\Z")


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """The 32-byte hash of ``data``."""
    return Digest(data).digest()


def hexdigest(data: bytes | bytearray | memoryview) -> str:
    """The hash of ``data`` as 64 lower-case hexadecimal digits, as JSON files carry it."""
    return Digest(data).hexdigest()


def is_hex(text: str) -> bool:
    """Whether ``text`` is exactly one hash in hexadecimal."""
    return _HEX.match(text) is not None
