"""Rows of a tracker: the values of one step, and Relight's own numbers. Encoded for the checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from relight.decode import from_msgpack

_encode = msgspec.msgpack.Encoder().encode


class RelightNumbers(NamedTuple):
    """Relight's own numbers about the save, or the restore, of ``step``. Their names begin with ``relight/``."""

    step: int
    values: dict[str, float]


class StepRow(NamedTuple):
    """The values that the script logged for one step. ``time_s``: seconds since 1970 of the first of them.

    ``notes``: what Relight reported during that step.
    """

    step: int
    time_s: float
    values: dict[str, float]
    notes: list[RelightNumbers]

    @classmethod
    def at(cls, step: int) -> StepRow:
        """Return an empty row that begins now."""
        return cls(step, time.time(), {}, [])


class CheckpointLink(NamedTuple):
    """A checkpoint by its address: what a tracker records in place of the checkpoint's bytes."""

    uri: str
    """``STORE/RUN@ID``, which every command and ``relight.load`` take."""
    id: str
    step: int
    digest: str
    """BLAKE3 of the checkpoint's root, from which every byte can be verified; empty if the log could not be read."""


def encode_row(row: StepRow) -> bytes:
    """Return the row as MessagePack. NaN and infinities are kept."""
    return _encode(row)


def join_rows(rows: Iterable[bytes]) -> bytes:
    """Return encoded rows as one text of bytes, without decoding them."""
    return _encode([msgspec.Raw(row) for row in rows])


def decode_rows(data: bytes) -> list[StepRow]:
    """Return the rows in ``data``. Raise ``msgspec.MsgspecError`` for anything else."""
    return from_msgpack(data, list[StepRow])
