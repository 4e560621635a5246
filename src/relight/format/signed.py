"""Signed records: a second line after the record has the signer and the signature. Pure.

``{"by":"<kind>:<16 hex digits>","signature":"<base64>","seal":"<64 hex digits>"}\\n``; the seal is the BLAKE3 of the first two values.
The signature covers the bytes of the record's first line. A reader without ``trust=`` accepts the record without checking its signature.
"""

from __future__ import annotations

import base64
import re
from typing import NamedTuple

from relight.errors import CorruptCheckpoint
from relight.format.digest import hexdigest

_LINE = re.compile(
    rb'\{"by":"([a-z0-9]{1,16}:[0-9a-f]{16})","signature":"([A-Za-z0-9+/=]{4,200})","seal":"([0-9a-f]{64})"\}\n\Z'
)
DOMAIN = b"relight record\0"
"""Prefix of the signed bytes (domain separation): the signature is invalid for any other purpose."""


class Signature(NamedTuple):
    """The signer's id, and the signature."""

    by: str
    value: bytes


def with_signature(record: bytes, signature: Signature) -> bytes:
    """Return the file of a signed record."""
    by, value = signature.by.encode(), base64.b64encode(signature.value)
    return (
        record
        + b'{"by":"'
        + by
        + b'","signature":"'
        + value
        + b'","seal":"'
        + hexdigest(by + b"\n" + value).encode()
        + b'"}\n'
    )


def apart(data: bytes, where: str) -> tuple[bytes, Signature | None]:
    """Return the record, and its signature if it has one. Raise ``CorruptCheckpoint`` if anything else follows the record."""
    end = data.find(b"\n") + 1
    record, rest = data[:end], data[end:]
    if not end or not rest:
        return data, None
    match = _LINE.match(rest)
    if match is None or hexdigest(match[1] + b"\n" + match[2]).encode() != match[3]:
        raise CorruptCheckpoint("the line after the record is not a signature, or is damaged", where=where)
    try:
        value = base64.b64decode(match[2], validate=True)
    except ValueError:
        raise CorruptCheckpoint("the signature is not valid base 64", where=where) from None
    return record, Signature(match[1].decode(), value)
