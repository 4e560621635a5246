"""Write pickles that torch reads, with only the opcodes that ``torch.load(weights_only=True)`` accepts. Pure.

Nothing here reads or runs a pickle: a state's tree has only plain values, and this module writes their bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from relight.errors import IncompatibleState

LONG_BYTES_MAX = 255


class PickledClass(NamedTuple):
    """A class or function, by module and name."""

    module: str
    name: str


class PickledCall(NamedTuple):
    """The result of ``function(*arguments)``."""

    function: PickledClass
    arguments: tuple[Any, ...]


class PickledObject(NamedTuple):
    """An object of a class, without its constructor, and its state: a dict of attributes, or what its ``__setstate__`` takes."""

    kind: PickledClass
    state: Any = None


class PickledStorage(NamedTuple):
    """A storage, which the reader finds by its key."""

    key: tuple[Any, ...]


class Items(NamedTuple):
    """A dict, by its items: keys may be objects that are not hashable in this process."""

    pairs: tuple[tuple[Any, Any], ...]


def pickled(value: Any) -> bytes:
    """Return ``value`` as a pickle of protocol 2. Raise ``IncompatibleState`` for values that torch would not read."""
    out = bytearray(b"\x80\x02")
    _put(value, out)
    return bytes(out + b".")


def fits(value: Any) -> bool:
    """Return whether ``pickled`` accepts a value."""
    try:
        pickled(value)
    except IncompatibleState:
        return False
    return True


def _put(value: Any, out: bytearray) -> None:
    kind = type(value)
    writer = _WRITERS.get(kind)
    if writer is None:
        raise IncompatibleState(
            f"a {kind.__name__} cannot be stored in a file that torch.load(weights_only=True) reads"
        )
    writer(value, out)


def _none(value: None, out: bytearray) -> None:
    out += b"N"


def _bool(value: bool, out: bytearray) -> None:
    out += b"\x88" if value else b"\x89"


def _int(value: int, out: bytearray) -> None:
    if 0 <= value < 256:
        out += struct.pack("<cB", b"K", value)
    elif 0 <= value < 1 << 16:
        out += struct.pack("<cH", b"M", value)
    elif -(1 << 31) <= value < 1 << 31:
        out += struct.pack("<ci", b"J", value)
    else:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(data) > LONG_BYTES_MAX:
            raise IncompatibleState(
                f"an integer of {value.bit_length()} bits cannot be stored in a file that torch.load(weights_only=True) reads"
            )
        out += struct.pack("<cB", b"\x8a", len(data)) + data


def _float(value: float, out: bytearray) -> None:
    out += struct.pack(">cd", b"G", value)


def _str(value: str, out: bytearray) -> None:
    data = value.encode("utf-8", "surrogatepass")
    out += struct.pack("<cI", b"X", len(data)) + data


def _bytes(value: bytes, out: bytearray) -> None:
    _call(PickledCall(PickledClass("_codecs", "encode"), (value.decode("latin-1"), "latin1")), out)


def _complex(value: complex, out: bytearray) -> None:
    _call(PickledCall(PickledClass("builtins", "complex"), (value.real, value.imag)), out)


def _set(value: set[Any], out: bytearray) -> None:
    _call(PickledCall(PickledClass("builtins", "set"), (list(value),)), out)


def _list(value: list[Any], out: bytearray) -> None:
    out += b"]"
    if value:
        out += b"("
        for item in value:
            _put(item, out)
        out += b"e"


def _tuple(value: tuple[Any, ...], out: bytearray) -> None:
    out += b"(" if value else b")"
    for item in value:
        _put(item, out)
    out += b"t" if value else b""


def _dict(value: dict[Any, Any], out: bytearray) -> None:
    _items(Items(tuple(value.items())), out)


def _items(value: Items, out: bytearray) -> None:
    out += b"}"
    if value.pairs:
        out += b"("
        for key, item in value.pairs:
            _put(key, out)
            _put(item, out)
        out += b"u"


def _class(value: PickledClass, out: bytearray) -> None:
    out += b"c" + f"{value.module}\n{value.name}\n".encode()


def _call(value: PickledCall, out: bytearray) -> None:
    _class(value.function, out)
    _tuple(value.arguments, out)
    out += b"R"


def _made(value: PickledObject, out: bytearray) -> None:
    _class(value.kind, out)
    out += b")\x81"
    if value.state is not None:
        _put(value.state, out)
        out += b"b"


def _stored(value: PickledStorage, out: bytearray) -> None:
    _tuple(value.key, out)
    out += b"Q"


_WRITERS: dict[type, Callable[[Any, bytearray], None]] = {
    type(None): _none, bool: _bool, int: _int, float: _float, str: _str, bytes: _bytes, complex: _complex, set: _set, list: _list,
    tuple: _tuple, dict: _dict, Items: _items, PickledClass: _class, PickledCall: _call, PickledObject: _made, PickledStorage: _stored,
}  # fmt: skip
