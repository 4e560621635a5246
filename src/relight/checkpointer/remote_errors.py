"""Errors as words that one rank says to others: of the same kind there, with all they say."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from relight.agent.messages import words_of
from relight.decode import from_msgpack
from relight.errors import RelightError, error_of

Told = tuple[str, str, str, str, bool, list[str]]
"""As ``relight.agent.messages.words_of`` makes it."""


def encode_error(error: BaseException) -> bytes:
    """What is said of it."""
    told: Told = words_of(error)
    return msgspec.msgpack.encode(told)


def decode_error(word: bytes) -> RelightError:
    """Rank 0's, as the others raise it."""
    return error_from(*from_msgpack(word, Told))  # type: ignore[arg-type]


def error_from(kind: str, what: str, where: str, hint: str, retryable: bool, details: Sequence[str]) -> RelightError:
    """See ``told_error``."""
    return error_of(kind)(f"rank 0: {what}", where=where, hint=hint, retryable=retryable, details=details)
