"""BLAKE3 with 32 bytes: the only hash of the format.

The library releases the GIL for large buffers, and reads any contiguous buffer without a copy.
"""

from __future__ import annotations

import re

from blake3 import blake3

Digest = blake3

DIGEST_BYTES = 32
ZERO_HEX = "0" * 64
_HEX = re.compile(r"[0-9a-f]{64}\Z")


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """Return the 32-byte hash of ``data``."""
    return Digest(data).digest()


def hexdigest(data: bytes | bytearray | memoryview) -> str:
    """Return the hash of ``data`` as 64 lower-case hexadecimal digits, as in JSON files."""
    return Digest(data).hexdigest()


def is_hex(text: str) -> bool:
    """Return whether ``text`` is a hash of 64 lower-case hexadecimal digits."""
    return _HEX.match(text) is not None
