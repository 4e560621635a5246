"""Encode an error on one rank and raise it on another, with the same kind and texts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from relight.agent.messages import words_of
from relight.decode import from_msgpack
from relight.errors import RelightError, error_of

ErrorFields = tuple[str, str, str, str, bool, list[str]]
"""The result of ``relight.agent.messages.words_of``: kind, what, where, hint, retryable, details."""


def encode_error(error: BaseException) -> bytes:
    """Return the error's kind and texts as bytes."""
    fields: ErrorFields = words_of(error)
    return msgspec.msgpack.encode(fields)


def decode_error(word: bytes) -> RelightError:
    """Return rank 0's error, for another rank to raise."""
    return error_from(*from_msgpack(word, ErrorFields))  # type: ignore[arg-type]


def error_from(kind: str, what: str, where: str, hint: str, retryable: bool, details: Sequence[str]) -> RelightError:
    """Return rank 0's error from its fields, marked as rank 0's."""
    return error_of(kind)(f"rank 0: {what}", where=where, hint=hint, retryable=retryable, details=details)
