"""Errors as words that one rank says to others: of the same kind there, with all they say."""

from __future__ import annotations

import msgspec

from relight.errors import RelightError, SaveFailed, error_of
from relight.typed import from_msgpack

Told = tuple[str, str, str, str, bool]


def known(error: BaseException) -> RelightError:
    """The error itself, or, of somebody else's code, what is left of it."""
    return error if isinstance(error, RelightError) else SaveFailed(f"{type(error).__name__}: {error}")


def error_word(error: BaseException) -> bytes:
    """What is said of it."""
    said = known(error)
    told: Told = (said.kind, said.what, said.where, said.hint, said.retryable)
    return msgspec.msgpack.encode(told)


def told_error(word: bytes) -> RelightError:
    """Rank 0's, as the others raise it."""
    return error_from(*from_msgpack(word, Told))  # type: ignore[arg-type]


def error_from(kind: str, what: str, where: str, hint: str, retryable: bool) -> RelightError:
    """See ``told_error``."""
    return error_of(kind)(f"rank 0: {what}", where=where, hint=hint, retryable=retryable)
