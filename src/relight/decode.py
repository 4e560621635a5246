"""Values of a given type out of bytes and plain values: msgspec's, with each type made known to it by one thread at a time.

msgspec learns a type when it is first asked for it. While it does, it may call Python, and a second thread that comes with the same type
then finds it half known: the process ends by SIGSEGV (seen with 0.22.0: a saving agent that two ranks spoke to at the same moment). So
nothing else in Relight gives msgspec a type.
"""

from __future__ import annotations

import os
import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_known: set[Any] = set()
"""Types that msgspec has seen: two threads must not introduce one at the same time."""
_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


def from_json_bytes(data: bytes | str, kind: type[T]) -> T:
    """``data``, JSON, as ``kind``. ``msgspec.MsgspecError`` if it is not."""
    _learn(kind)
    try:
        return msgspec.json.decode(data, type=kind)
    except UnicodeDecodeError as error:  # a text in it that is no UTF-8, of which msgspec says so
        raise msgspec.DecodeError(str(error)) from error


def from_msgpack(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """``data``, MessagePack, as ``kind``. ``msgspec.MsgspecError`` if it is not."""
    _learn(kind)
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from error


def from_plain(value: Any, kind: type[T], *, strict: bool = True) -> T:
    """``value``, of dicts, lists and the like, as ``kind``. ``msgspec.ValidationError`` if it is not. With ``strict=False``, texts of
    numbers and of true and false are converted."""
    _learn(kind)
    return msgspec.convert(value, kind, strict=strict)


def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """One that any number of threads may use."""
    _learn(kind)
    return msgspec.msgpack.Decoder(kind)


def _learn(kind: Any) -> None:
    if kind not in _known:
        with _lock:
            msgspec.msgpack.Decoder(kind)
            _known.add(kind)
