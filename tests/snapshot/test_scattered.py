"""Scattered addresses are read by a few calls, or one by one without a memfd."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import random

import pytest
from tests.descriptors import new_descriptors, open_descriptors

from relight.snapshot import sample_reader
from relight.snapshot.sample_reader import SampleReader

WIDTH = 16


def places(count: int) -> tuple[ctypes.Array[ctypes.c_char], list[int], list[int]]:
    """Return memory, and addresses and lengths in it. Lengths are 1 to 16 bytes."""
    rng = random.Random(count)
    memory = ctypes.create_string_buffer(rng.randbytes(64 * count + 64), 64 * count + 64)
    begin = ctypes.addressof(memory)
    return (
        memory,
        [begin + 64 * number + rng.randrange(40) for number in range(count)],
        [rng.choice((WIDTH, WIDTH, 1, 7)) for _ in range(count)],
    )


def wanted(addresses: list[int], lengths: list[int]) -> bytes:
    return b"".join(ctypes.string_at(*place).ljust(WIDTH, b"\0") for place in zip(addresses, lengths, strict=True))


@pytest.mark.parametrize("count", [0, 1, 3, 1023, 1024, 1025, 5000])
def test_what_is_read_is_what_is_there(count: int) -> None:
    """Read the current bytes each time, whatever the number of calls. Shorter places are padded with zeros."""
    memory, addresses, lengths = places(count)
    reader = SampleReader(addresses, lengths, WIDTH)
    assert reader.read() == wanted(addresses, lengths)
    ctypes.memset(memory, 7, len(memory))
    assert reader.read() == wanted(addresses, lengths)


def test_without_a_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the same bytes without a memfd, and emit nothing."""

    def none(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    _, addresses, lengths = places(1500)
    monkeypatch.setattr(os, "memfd_create", none)
    assert SampleReader(addresses, lengths, WIDTH).read() == wanted(addresses, lengths)


@pytest.mark.parametrize("answer", [-1, 0, 40])
def test_a_call_that_gives_less(monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    """Read the addresses one by one if a call transfers fewer bytes, because memory is full or a signal arrived."""
    memory, addresses, lengths = places(1500)
    reader = SampleReader(addresses, lengths, WIDTH)
    reader.read()
    ctypes.memset(memory, 9, len(memory))
    monkeypatch.setattr(sample_reader, "_pwritev", lambda *_: answer)
    assert reader.read() == wanted(addresses, lengths)


def test_nothing_is_left_open() -> None:
    """A reader that is deleted closes its memfd."""
    _, addresses, lengths = places(10)
    gc.collect()
    before = open_descriptors("relight-samples")
    readers = [SampleReader(addresses, lengths, WIDTH) for _ in range(20)]
    assert len(open_descriptors("relight-samples") - before) == 20
    readers.clear()
    gc.collect()
    assert not new_descriptors(before, target="relight-samples")
