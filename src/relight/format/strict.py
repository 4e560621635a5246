"""Strict JSON, with no duplicate keys, no NaN, and bounded size and depth; and the sealed frame around it."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn, TypeVar

import msgspec

from relight.decode import from_plain
from relight.errors import CorruptCheckpoint, UnsafeContent
from relight.format.digest import hexdigest

SEALED_BYTES_MAX = 1 << 20
ROOT_BYTES_MAX = 4 << 20
DEPTH_MAX = 32

_HEAD, _MIDDLE, _TAIL = b'{"seal":"', b'","body":', b"}\n"
_START = len(_HEAD) + 64 + len(_MIDDLE)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
T = TypeVar("T")


def to_json(value: Any) -> bytes:
    """Return ``value`` as compact JSON. Raise ``ValueError`` for NaN or infinity, which the format does not have."""
    return _ENCODER.encode(value).encode()


def from_json(data: bytes | memoryview, where: str, limit: int) -> Any:
    """Parse JSON strictly. Raise ``UnsafeContent`` for JSON that Relight never writes. Time and memory are bounded by ``limit`` bytes."""
    if len(data) > limit:
        raise UnsafeContent(f"{len(data)} bytes of JSON where at most {limit} are allowed", where=where)
    # A byte of input can cost tens of bytes of containers: bound their number before building any.
    raw = bytes(data)
    if raw.count(b"[") + raw.count(b"{") > limit // 64 or raw.count(b",") > limit // 32:
        raise UnsafeContent("JSON with an absurd number of values", where=where)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            raise UnsafeContent("duplicate key in JSON", where=where)
        return result

    def constant(name: str) -> NoReturn:
        raise UnsafeContent(f"{name} in JSON", where=where)

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except RecursionError:
        raise UnsafeContent("JSON is nested too deeply", where=where) from None
    except (ValueError, UnicodeError) as error:
        raise CorruptCheckpoint(f"not JSON: {str(error)[:120]}", where=where) from None
    try:
        _check(value, where, 0)
    except UnicodeEncodeError:
        raise UnsafeContent("text in JSON that is not Unicode (a lone surrogate)", where=where) from None
    return value


def _check(value: Any, where: str, depth: int) -> None:
    if depth > DEPTH_MAX:
        raise UnsafeContent(f"JSON nested deeper than {DEPTH_MAX}", where=where)
    if isinstance(value, dict):
        for key, item in value.items():
            key.encode()
            if len(key) > 4096:
                raise UnsafeContent("a JSON key of more than 4096 characters", where=where)
            _check(item, where, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check(item, where, depth + 1)
    elif isinstance(value, str):
        value.encode()
    elif isinstance(value, float) and not math.isfinite(value):
        raise UnsafeContent("a number out of range in JSON", where=where)
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise UnsafeContent("an integer out of range in JSON", where=where)


def convert(value: Any, to: type[T], where: str) -> T:
    """Convert ``value`` to ``to``. Raise ``UnsafeContent``, with the field's name, for unknown fields and wrong types."""
    try:
        return from_plain(value, to)
    except msgspec.ValidationError as error:
        raise UnsafeContent(f"a field does not match the format: {shown(error)}", where=where) from None


def shown(what: object) -> str:
    """Return ``what`` for a message: at most 200 characters, with control characters and line breaks escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(what)[:200])


def seal(payload: bytes) -> bytes:
    """Return a sealed file with one JSON object."""
    return _HEAD + hexdigest(payload).encode() + _MIDDLE + payload + _TAIL


def unseal(data: bytes, where: str) -> Any:
    """Return the payload of a sealed file, parsed. Raise ``CorruptCheckpoint`` if any bit of the file was changed."""
    return from_json(sealed_payload(data, where), where, SEALED_BYTES_MAX)


def sealed_payload(data: bytes, where: str, limit: int = SEALED_BYTES_MAX) -> bytes:
    """Return the bytes of a sealed file's payload. Raise ``CorruptCheckpoint`` if any bit of the file was changed."""
    if len(data) > limit:
        raise UnsafeContent(
            f"a file with a checksum has {len(data)} bytes, and at most {limit} are allowed", where=where
        )
    if len(data) < _START + 2 + len(_TAIL) or not data.startswith(_HEAD) or not data.endswith(_TAIL):
        raise CorruptCheckpoint(
            "not a complete file of Relight: empty, truncated, or damaged at its start or end", where=where
        )
    if data[len(_HEAD) + 64 : _START] != _MIDDLE:
        raise CorruptCheckpoint("the bytes around the file's checksum are damaged", where=where)
    payload = data[_START : -len(_TAIL)]
    if data[len(_HEAD) : len(_HEAD) + 64] != hexdigest(payload).encode():
        raise CorruptCheckpoint("the file's checksum does not match its bytes", where=where)
    return payload
