"""Encode an error on one rank and raise it on another, with the same kind and texts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from relight.agent.messages import words_of
from relight.commit.multi_rank import OthersFailed
from relight.decode import from_msgpack
from relight.errors import RelightError, error_of, is_refusal

ErrorFields = tuple[str, str, str, str, bool, list[str]]
"""The result of ``relight.agent.messages.words_of``: kind, what, where, hint, retryable, details."""
_REFUSAL, _FAULT = b"-", b"!"
"""First byte of a failure. Both are numbers in MessagePack, and no message between ranks begins with a number."""


def encode_error(error: BaseException) -> bytes:
    """Return the error's kind and texts as bytes."""
    try:
        fields: ErrorFields = words_of(error)
        return msgspec.msgpack.encode(fields)
    except Exception:  # the error's own __str__, or a file name that cannot be encoded: other ranks wait
        return msgspec.msgpack.encode(("save_failed", type(error).__name__, "", "", False, []))


def decode_error(word: bytes, rank: int = 0) -> RelightError:
    """Return the error of rank ``rank``, for another rank to raise."""
    fields: ErrorFields = from_msgpack(word, ErrorFields)  # type: ignore[arg-type]
    return error_from(*fields, rank)


def error_from(
    kind: str, what: str, where: str, hint: str, retryable: bool, details: Sequence[str], rank: int = 0
) -> RelightError:
    """Return the error of rank ``rank`` from its fields, marked as that rank's."""
    return error_of(kind)(f"rank {rank}: {what}", where=where, hint=hint, retryable=retryable, details=details)


def encode_failure(error: BaseException) -> bytes:
    """Return a message that a rank sends in place of an array in MessagePack, which it could not make."""
    return (_REFUSAL if is_refusal(error) else _FAULT) + encode_error(error)


def is_failure(message: bytes) -> bool:
    """Return whether a message is from ``encode_failure``."""
    return message[:1] in (_REFUSAL, _FAULT)


def is_fault_of_rank(message: bytes) -> bool:
    """Return whether a failed rank's error was no refusal of the system, so that the next save would meet it again."""
    return message[:1] == _FAULT


def decode_failure(message: bytes, rank: int) -> RelightError:
    """Return the failure of rank ``rank``, for another rank to raise. ``OthersFailed``: the system refused something."""
    error = decode_error(message[1:], rank)
    if is_fault_of_rank(message):
        return error
    return OthersFailed(error.what, where=error.where, hint="see that rank's own log")
