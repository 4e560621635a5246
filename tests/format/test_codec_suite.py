"""The shipped suite for chunk codecs: it passes built-in ones and the guide's, and catches each planted fault."""

from __future__ import annotations

import ctypes
import os
import time
import zlib

import numpy as np
import pytest

from relight.errors import CorruptCheckpoint
from relight.format.chunk_codecs import ChunkCodec, DecodeContext, EncodeContext, EncodedChunk, PlaneCodec
from relight.testing.codec_suite import CodecSuite


class Sound(ChunkCodec):
    """zlib, as the guide has it."""

    name, code = "sound", 200

    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        stored = zlib.compress(data, 1)
        return EncodedChunk(stored) if len(stored) < len(data) else None

    def decode(self, stored: memoryview, into: memoryview, context: DecodeContext) -> None:
        decoder = zlib.decompressobj()
        try:
            decoded = decoder.decompress(stored, len(into) + 1)
        except zlib.error as error:
            raise CorruptCheckpoint(f"not a zlib chunk: {error}") from None
        if len(decoded) != len(into):
            raise CorruptCheckpoint("a zlib chunk has the wrong length")
        into[:] = decoded


class TestSound(CodecSuite):
    def make(self) -> ChunkCodec:
        return Sound()


class _Planes(PlaneCodec):
    name, code = "own-planes", 201

    def decode(self, stored: memoryview, into: memoryview, context: DecodeContext) -> None:
        try:
            super().decode(stored, into, context)
        except ValueError as error:
            raise CorruptCheckpoint(str(error)) from error


class TestPlanes(CodecSuite):
    """The suite on the code of a built-in codec."""

    def make(self) -> ChunkCodec:
        return _Planes()


class Halves(ChunkCodec):
    """Stores normal float32 values as float16."""

    name, code, exact, relative_error = "halves", 202, False, 1 / 2048

    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        if context.dtype != "float32" or len(data) % 4 or not data:
            return None
        values = np.frombuffer(data, "<f4")
        with np.errstate(all="ignore"):
            halves = values.astype("<f2")
        if np.any((values != 0) & ~((np.abs(values) >= 2**-14) & (np.abs(values) <= 65504))):
            return None
        return EncodedChunk(halves.tobytes(), memoryview(halves.astype("<f4").tobytes()))

    def decode(self, stored: memoryview, into: memoryview, context: DecodeContext) -> None:
        if 2 * len(stored) != len(into) or len(stored) % 2:
            raise CorruptCheckpoint("a chunk of halves has the wrong length")
        with np.errstate(all="ignore"):
            into[:] = np.frombuffer(stored, "<f2").astype("<f4").tobytes()


class TestInexact(CodecSuite):
    def make(self) -> ChunkCodec:
        return Halves()


class Differences(Sound):
    """zlib of the difference from the base."""

    name, code, needs_base = "differences", 203, True

    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        if context.base is None:
            return None
        return super().encode(memoryview(_xor(data, context.base)), context)

    def decode(self, stored: memoryview, into: memoryview, context: DecodeContext) -> None:
        difference = memoryview(bytearray(len(into)))
        super().decode(stored, difference, context)
        into[:] = _xor(difference, into)


def _xor(first: memoryview, second: memoryview) -> bytes:
    return (np.frombuffer(first, "u1") ^ np.frombuffer(second, "u1")).tobytes()


class TestWithBase(CodecSuite):
    def make(self) -> ChunkCodec:
        return Differences()


class Reserved(Sound):
    code = 3


class Larger(Sound):
    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        return EncodedChunk(zlib.compress(data, 1))


class Idle(Sound):
    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        return None


class NanLost(Sound):
    """Makes one NaN of all: the values are equal to numpy, and the bytes are not."""

    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        if context.dtype == "float32" and len(data) % 4 == 0 and data:
            values = np.frombuffer(data, "<f4").copy()
            values[np.isnan(values)] = np.nan
            data = memoryview(values.tobytes())
        return super().encode(data, context)


class DenormalLost(Sound):
    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        if context.dtype == "float32" and len(data) % 4 == 0 and data:
            values = np.frombuffer(data, "<f4").copy()
            values[np.abs(values) < 2**-126] = 0.0
            data = memoryview(values.tobytes())
        return super().encode(data, context)


class Undecoded(Halves):
    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        encoded = super().encode(data, context)
        return None if encoded is None else EncodedChunk(encoded.stored)


class Bold(Halves):
    relative_error = 1e-6


class Incomplete(Sound):
    """Does not write the last byte."""

    def decode(self, stored: memoryview, into: memoryview, context: DecodeContext) -> None:
        whole = memoryview(bytearray(len(into)))
        super().decode(stored, whole, context)
        into[:-1] = whole[:-1]


class WithoutBase(Differences):
    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        return Sound.encode(self, data, context) if context.base is None else super().encode(data, context)


class SecretBase(Sound):
    """Uses a base without stating it."""

    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        return super().encode(data if context.base is None else memoryview(_xor(data, context.base)), context)


class WritesInput(Sound):
    """Writes through a read-only view, as a library in C can."""

    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        encoded = super().encode(data, context)
        if data:
            ctypes.memset(np.frombuffer(data, "u1").ctypes.data, 9, 1)
        return encoded


class NeedsWritable(Sound):
    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        (ctypes.c_char * len(data)).from_buffer(data)
        return super().encode(data, context)


class Timestamped(Sound):
    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        encoded = super().encode(data, context)
        return (
            None
            if encoded is None or len(encoded.stored) + 8 >= len(data)
            else EncodedChunk(bytes(encoded.stored) + os.urandom(8))
        )


class ByHash(Timestamped):
    """Differs between processes, as the order of a set of texts does."""

    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        encoded = Sound.encode(self, data, context)
        mark = (hash("text") & 2**64 - 1).to_bytes(8, "little")
        return (
            None
            if encoded is None or len(encoded.stored) + 8 >= len(data)
            else EncodedChunk(bytes(encoded.stored) + mark)
        )


class Stateful(Sound):
    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        self._data = bytes(data)
        time.sleep(0)
        return super().encode(memoryview(self._data), context)


class ReadsBeyond(Sound):
    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        if data:
            ctypes.string_at(np.frombuffer(data, "u1").ctypes.data, len(data) + 1)
        return super().encode(data, context)


class DecodesBeyond(Sound):
    """Reads eight bytes at once, also the last ones."""

    def decode(self, stored: memoryview, into: memoryview, context: DecodeContext) -> None:
        if stored:
            ctypes.string_at(np.frombuffer(stored, "u1").ctypes.data, -(-len(stored) // 8) * 8)
        super().decode(stored, into, context)


class WritesBeyond(Sound):
    def decode(self, stored: memoryview, into: memoryview, context: DecodeContext) -> None:
        super().decode(stored, into, context)
        if into:
            ctypes.memset(np.frombuffer(into, "u1").ctypes.data + len(into), 7, 1)


class OtherError(Sound):
    def decode(self, stored: memoryview, into: memoryview, context: DecodeContext) -> None:
        into[:] = zlib.decompress(stored)


class Trusting(Sound):
    """Allocates what the first bytes state."""

    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        encoded = super().encode(data, context)
        if encoded is None or len(encoded.stored) + 8 >= len(data):
            return None
        return EncodedChunk(len(data).to_bytes(8, "little") + bytes(encoded.stored))

    def decode(self, stored: memoryview, into: memoryview, context: DecodeContext) -> None:
        room = memoryview(bytearray(min(int.from_bytes(stored[:8], "little"), 1 << 40)))
        if len(stored) < 8 or len(room) < len(into):
            raise CorruptCheckpoint("a chunk of another length")
        super().decode(stored[8:], room[: len(into)], context)
        into[:] = room[: len(into)]


class Endless(Trusting):
    """Counts to what the first bytes state."""

    def decode(self, stored: memoryview, into: memoryview, context: DecodeContext) -> None:
        for _ in range(int.from_bytes(stored[:8], "little")):
            pass
        Sound.decode(self, stored[8:], into, context)


class Ending(Sound):
    def decode(self, stored: memoryview, into: memoryview, context: DecodeContext) -> None:
        try:
            super().decode(stored, into, context)
        except CorruptCheckpoint:
            os._exit(3)


class Greedy(Sound):
    def decode(self, stored: memoryview, into: memoryview, context: DecodeContext) -> None:
        super().decode(stored, into, context)
        copies = [bytes(into) for _ in range(20)]
        into[:] = copies[-1]


class ReadsOthers(Sound):
    """Refers to another chunk of the pack, so it is not portable."""

    def decode(self, stored: memoryview, into: memoryview, context: DecodeContext) -> None:
        context.read(0, into)


PLANTED = [
    (Reserved, "test_it_can_be_registered", "code is 3"),
    (Larger, "test_encode_makes_a_chunk_smaller_or_returns_none", "bytes"),
    (Idle, "test_encode_makes_a_chunk_smaller_or_returns_none", "no chunk became smaller"),
    (NanLost, "test_each_chunk_comes_back", "NaN, infinite values and zeros as float32 is not"),
    (DenormalLost, "test_each_chunk_comes_back", "as float32 is not what was encoded"),
    (ReadsOthers, "test_each_chunk_comes_back", "reads other chunks"),
    (Undecoded, "test_each_chunk_comes_back", "decoded= is missing"),
    (Bold, "test_an_inexact_codec_keeps_its_error", "became"),
    (Incomplete, "test_decode_fills_all_of_its_memory_and_nothing_else", "some bytes were not written"),
    (WritesBeyond, "test_decode_fills_all_of_its_memory_and_nothing_else", "wrote beyond its memory"),
    (WithoutBase, "test_a_base_is_used_if_it_is_needed", "without a base"),
    (SecretBase, "test_a_base_is_used_if_it_is_needed", "the base changes"),
    (WritesInput, "test_what_it_is_given_is_not_written", "encode wrote"),
    (NeedsWritable, "test_what_it_is_given_is_not_written", "not writable"),
    (Timestamped, "test_a_chunk_has_one_encoding", "has two encodings"),
    (ByHash, "test_a_chunk_has_one_encoding", "in another process"),
    (Stateful, "test_threads_use_it_at_once", "with 4 threads"),
    (ReadsBeyond, "test_no_memory_beyond_a_chunk_is_used", "encoding .* ended the process by SIGSEGV"),
    (DecodesBeyond, "test_no_memory_beyond_a_chunk_is_used", "decoding .* ended the process by SIGSEGV"),
    (OtherError, "test_damaged_chunks_raise_corrupt_checkpoint", "raised error: Error -5"),
    (Trusting, "test_damaged_chunks_raise_corrupt_checkpoint", "raised MemoryError"),
    (Endless, "test_damaged_chunks_raise_corrupt_checkpoint", "took more than 500 ms"),
    (Ending, "test_damaged_chunks_raise_corrupt_checkpoint", "ended the process by exit code 3"),
    (Greedy, "test_decoding_takes_a_few_chunks_of_memory", "took .* MB"),
]


class Planted(CodecSuite):
    """The suite on a faulty codec."""

    decode_s = 0.5

    def __init__(self, kind: type[ChunkCodec]) -> None:
        self._kind = kind

    def make(self) -> ChunkCodec:
        return self._kind()


Planted.__test__ = False  # type: ignore[attr-defined] # made by the test below


@pytest.mark.parametrize(("kind", "check", "why"), PLANTED, ids=[f"{kind.__name__}" for kind, _, _ in PLANTED])
def test_each_planted_fault_is_caught(kind: type[ChunkCodec], check: str, why: str) -> None:
    """The named test of the suite fails for the faulty codec, and states what is wrong."""
    with pytest.raises(Exception, match=why):
        getattr(Planted(kind), check)()


def test_each_test_of_the_suite_has_a_planted_fault() -> None:
    """A check that nothing can fail is none."""
    assert {name for name in dir(CodecSuite) if name.startswith("test_")} == {check for _, check, _ in PLANTED}
