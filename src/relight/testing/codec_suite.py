"""The guarantees of every ``ChunkCodec``, as tests: subclass, make the codec, run pytest.

::

    class TestMine(CodecSuite):
        def make(self):
            return MyCodec()

Each test's docstring is the guarantee. Tests that could end the process, take all memory or never end run in a process of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import multiprocessing
import random
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from relight.comm.children import safe_spawn
from relight.errors import CorruptCheckpoint
from relight.format import DTYPES, hexdigest
from relight.format.chunk_codecs import ChunkCodec, DecodeContext, EncodeContext, EncodedChunk, plugin_fault
from relight.format.entropy import compress
from relight.format.planes import Rooms
from relight.units import duration_text, size_text

GUARD = 64
"""Bytes before and after the memory of a decoded chunk, which must not change."""
DAMAGED_MAX = 12
"""Most encodings that are damaged and decoded."""
EXTRA_BYTES = 256 << 20
"""Address space that decoding a damaged chunk of at most 64 KiB may take."""
CHUNK_BYTES, CHUNKS_MAX = 4 << 20, 8
"""A whole chunk, and the memory that decoding it may take, in chunks."""
_THREADS, _ROUNDS = 4, 8
_FLOATS = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "complex128": "<f8",
    "complex64": "<f4",
    "complex32": "<f2",
}


class SampleChunk(NamedTuple):
    """A chunk that the suite stores."""

    name: str
    dtype: str
    data: bytes

    @property
    def base(self) -> bytes:
        """The chunk of the save before: a few bytes differ."""
        base = bytearray(self.data)
        for place in range(0, len(base), 97):
            base[place] ^= 3
        return bytes(base)


class CodecSuite:
    """Subclass it as ``TestSomething`` and define ``make``."""

    decode_s = 10.0
    """Seconds that decoding one damaged chunk of at most 64 KiB may take."""

    def make(self) -> ChunkCodec:
        """Return the codec."""
        raise NotImplementedError

    def chunks(self) -> Iterator[SampleChunk]:
        """Yield the chunks to store. Extend it if the codec needs other ones to make them smaller. The same ones at each call."""
        for dtype, (_, itemsize, _) in DTYPES.items():
            for name, data in _contents(dtype, itemsize):
                yield SampleChunk(f"{name} as {dtype}", dtype, data)

    # -- tests

    def test_it_can_be_registered(self) -> None:
        """Its class attributes are those that Relight accepts, and its class needs no arguments."""
        codec = self.make()
        fault = plugin_fault(codec, codec.name)
        assert not fault, f"Relight refuses it: {fault}"
        assert type(codec)().name == codec.name

    def test_encode_makes_a_chunk_smaller_or_returns_none(self) -> None:
        """``encode`` returns between one byte and one less than the chunk has, or None, also for an empty chunk. Some become smaller."""
        codec, smaller = self.make(), 0
        for chunk in self.chunks():
            encoded = _encoded(codec, chunk)
            if encoded is not None:
                smaller += 1
                assert 0 < len(encoded.stored) < len(chunk.data), f"{chunk.name}: {len(encoded.stored)} bytes"
        assert smaller, (
            "no chunk became smaller, so nothing was tested: yield chunks for which it is made from chunks()"
        )

    def test_each_chunk_comes_back(self) -> None:
        """``decode`` returns the chunk's bytes. An inexact codec's are those that ``encode`` has returned as ``decoded``."""
        codec = self.make()
        for chunk, encoded in self._smaller(codec):
            expected: bytes | memoryview | None = chunk.data if codec.exact else encoded.decoded
            assert expected is not None and len(expected) == len(chunk.data), f"{chunk.name}: decoded= is missing"
            assert _decoded(codec, encoded.stored, chunk) == expected, f"{chunk.name} is not what was encoded"

    def test_an_inexact_codec_keeps_its_error(self) -> None:
        """Each finite value differs by at most ``relative_error`` of its magnitude. NaN and infinite values stay the same."""
        codec = self.make()
        for chunk, encoded in [] if codec.exact else self._smaller(codec):
            if chunk.dtype in _FLOATS or chunk.dtype == "bfloat16":
                assert encoded.decoded is not None, f"{chunk.name}: decoded= is missing"
                wrong = _beyond(chunk.dtype, chunk.data, bytes(encoded.decoded), codec.relative_error)
                assert not wrong, f"{chunk.name}: {wrong}"

    def test_decode_fills_all_of_its_memory_and_nothing_else(self) -> None:
        """The result does not depend on what the memory had, except for the base of a codec that needs one. Its surroundings stay."""
        codec = self.make()
        for chunk, encoded in self._smaller(codec):
            first, second = (_decoded(codec, encoded.stored, chunk, filled) for filled in (0x00, 0xA5))
            assert first == second, f"{chunk.name}: some bytes were not written"

    def test_a_base_is_used_if_it_is_needed(self) -> None:
        """A codec that needs a base returns None without one. The result of any other codec does not depend on it."""
        codec = self.make()
        for chunk in self.chunks():
            without, with_base = _encoded(codec, chunk, None), _encoded(codec, chunk, chunk.base)
            if codec.needs_base:
                assert without is None, f"{chunk.name} was encoded without a base"
            else:
                assert _bytes_of(without) == _bytes_of(with_base), f"{chunk.name}: the base changes what is stored"

    def test_what_it_is_given_is_not_written(self) -> None:
        """Chunk, base and stored bytes are read-only, and stay the same."""
        codec = self.make()
        for chunk in self.chunks():
            data, base = bytearray(chunk.data), bytearray(chunk.base)
            context = _context(chunk, memoryview(base).toreadonly())
            encoded = codec.encode(memoryview(data).toreadonly(), context)
            assert data == chunk.data and base == chunk.base, f"{chunk.name}: encode wrote to what it was given"
            if encoded is not None:
                before, stored = bytes(encoded.stored), bytearray(encoded.stored)
                _decoded(codec, stored, chunk)
                assert stored == before, f"{chunk.name}: decode wrote to the stored bytes"

    def test_a_chunk_has_one_encoding(self) -> None:
        """The same chunk gives the same bytes each time, also in another process: the same state is stored as the same files."""
        codec = self.make()
        first, second = (self._encodings(lambda step: None) for codec in (codec, codec))
        assert first == second, f"{_difference(first, second)} has two encodings"
        other = self._in_child("_encodings")
        assert first == other, f"{_difference(first, other)} has another encoding in another process"

    def test_threads_use_it_at_once(self) -> None:
        """Several threads encode and decode different chunks at the same time, and get what one thread gets."""
        codec = self.make()
        work = [
            (chunk, bytes(encoded.stored), _decoded(codec, encoded.stored, chunk))
            for chunk, encoded in self._smaller(codec)
        ]
        wrong: list[str] = []
        gate = threading.Barrier(_THREADS)

        def run(own: int) -> None:
            gate.wait()
            try:
                for chunk, stored, decoded in (work[own::_THREADS] or work) * _ROUNDS:
                    if _bytes_of(_encoded(codec, chunk)) != stored or _decoded(codec, stored, chunk) != decoded:
                        wrong.append(f"{chunk.name} differs")
            except Exception as error:  # noqa: BLE001 - whatever another package's code raises
                wrong.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=run, args=(own,)) for own in range(_THREADS)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert not wrong, f"with {_THREADS} threads: {wrong[0]}"

    def test_no_memory_beyond_a_chunk_is_used(self) -> None:
        """``encode`` and ``decode`` neither read nor write beyond the end of what they are given: the next page is not accessible."""
        self._in_child("_at_page_ends")

    def test_damaged_chunks_raise_corrupt_checkpoint(self) -> None:
        """``decode`` of cut, changed or random bytes, or for another length, raises ``CorruptCheckpoint`` or fills its memory.

        It ends within ``decode_s`` seconds, takes little memory, and writes nowhere else.
        """
        self._in_child("_decode_damaged")

    def test_decoding_takes_a_few_chunks_of_memory(self) -> None:
        """Decoding a chunk of 4 MiB takes at most ``CHUNKS_MAX`` times its memory."""
        self._in_child("_decode_large")

    # -- inside

    def _smaller(self, codec: ChunkCodec) -> Iterator[tuple[SampleChunk, EncodedChunk]]:
        for chunk in self.chunks():
            encoded = _encoded(codec, chunk)
            if encoded is not None:
                yield chunk, encoded

    def _encodings(self, note: Callable[[str], None]) -> dict[str, str]:
        codec = self.make()
        return {chunk.name: hexdigest(_bytes_of(_encoded(codec, chunk))) for chunk in self.chunks()}

    def _at_page_ends(self, note: Callable[[str], None]) -> None:
        codec = self.make()
        for chunk in self.chunks():
            note(f"encoding {chunk.name}")
            base = _at_page_end(chunk.base).toreadonly()
            encoded = codec.encode(_at_page_end(chunk.data).toreadonly(), _context(chunk, base))
            if encoded is not None:
                note(f"decoding {chunk.name}")
                into = _at_page_end(chunk.base)
                codec.decode(_at_page_end(bytes(encoded.stored)).toreadonly(), into, _decoding(codec))

    def _decode_damaged(self, note: Callable[[str], None]) -> None:
        codec = self.make()
        work = [(chunk, bytes(encoded.stored)) for chunk, encoded in self._smaller(codec) if len(chunk.data) <= 65536]
        step = -(-len(work) // DAMAGED_MAX) or 1
        for chunk, stored in work:  # libraries are loaded now, before the memory is limited
            _decoded(codec, stored, chunk)
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + EXTRA_BYTES, limits[1]))
        for chunk, stored in work[::step]:
            for what, damaged, length in _damaged(stored, len(chunk.data)):
                note(f"decoding {chunk.name}, {what},")
                sized = chunk._replace(data=chunk.data[:length].ljust(length, b"\0"))
                signal.setitimer(signal.ITIMER_REAL, self.decode_s)
                with contextlib.suppress(CorruptCheckpoint):
                    _decoded(codec, damaged, sized)
                signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)

    def _decode_large(self, note: Callable[[str], None]) -> None:
        codec = self.make()
        by_width = {DTYPES[chunk.dtype].itemsize: chunk for chunk, _ in self._smaller(codec)}
        for chunk in by_width.values():
            large = chunk._replace(data=(chunk.data * (CHUNK_BYTES // len(chunk.data) + 1))[:CHUNK_BYTES])
            encoded = _encoded(codec, large)
            if encoded is None:
                continue
            note(f"decoding 4 MiB of {chunk.name}")
            before = _peak(reset=True)
            _decoded(codec, encoded.stored, large)
            took = _peak() - before
            assert took <= CHUNKS_MAX * CHUNK_BYTES, f"decoding 4 MiB of {chunk.name} took {size_text(took)}"

    def _in_child(self, check: str) -> Any:
        """Return what a method of the suite returns in another process. Raise ``AssertionError`` if it raises, or ends the process."""
        fresh = multiprocessing.get_context("spawn")
        with safe_spawn():
            results: Any = fresh.SimpleQueue()
            step: Any = fresh.Array("c", 256)
            child = fresh.Process(target=_run, args=(self, check, step, results), daemon=True)
            child.start()
        child.join()
        if results.empty():
            code = child.exitcode or 0
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            how = (
                f"took more than {duration_text(self.decode_s)}"
                if code == -signal.SIGALRM
                else f"ended the process by {name}"
            )
            raise AssertionError(f"{step.value.decode()} {how}")
        fault, result = results.get()
        assert not fault, fault
        return result


def _run(suite: CodecSuite, check: str, step: Any, results: Any) -> None:
    """Call a method of the suite, and put its result, or what it raised, into the queue."""

    def note(text: str) -> None:
        step.value = text.encode()[:255]

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        outcome = ("", getattr(suite, check)(note))
    except Exception as error:  # noqa: BLE001 - whatever another package's code raises
        outcome = (f"{step.value.decode()} raised {type(error).__name__}: {error}"[:2000], None)
    results.put(outcome)


def _contents(dtype: str, itemsize: int) -> Iterator[tuple[str, bytes]]:
    """Yield the awkward contents of a dtype, each with its name."""
    import numpy as np

    draw = random.Random(7)
    yield "no bytes", b""
    yield "one byte", b"\x01"
    yield "three bytes", b"\x00\x01\xff"
    yield "zeros", bytes(4096)
    yield "one value", bytes(range(1, itemsize + 1)) * (4096 // itemsize)
    yield "random bytes", draw.randbytes(4096)
    yield "half random, of an odd length", draw.randbytes(1500) + bytes(2501)
    yield "counting", b"".join((number % 200).to_bytes(itemsize, "little") for number in range(8192 // itemsize))
    if dtype in _FLOATS or dtype == "bfloat16":
        special = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.5]
        yield "NaN, infinite values and zeros", _floats(dtype, np.resize(np.array(special), 1024))
        yield "denormal values", _smallest(dtype, itemsize)
        drawn = np.random.default_rng(7)
        yield "values near 1", _floats(dtype, drawn.uniform(0.5, 2.0, 4096))
        normal = drawn.normal(0.0, 0.02, 16_384)
        yield "weights", _floats(dtype, normal)
        yield "sparse weights", _floats(dtype, np.where(np.arange(16_384) % 8 == 0, normal, 0.0))


def _floats(dtype: str, values: Any) -> bytes:
    """Return float64 values in a dtype."""
    if dtype == "bfloat16":
        return bytes((values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes())
    return bytes(values.astype(_FLOATS[dtype]).tobytes())


def _smallest(dtype: str, itemsize: int) -> bytes:
    """Return denormal values: the lowest bits of each number are set, and no exponent."""
    width = int(_FLOATS.get(dtype, "<f2")[-1])
    return b"".join((number % 100).to_bytes(width, "little") for number in range(4096 // width))


def _values(dtype: str, data: bytes) -> Any:
    import numpy as np

    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2", len(data) // 2).astype("<u4") << 16).view("<f4").astype("f8")
    width = int(_FLOATS[dtype][-1])
    return np.frombuffer(data, _FLOATS[dtype], len(data) // width).astype("f8")


def _beyond(dtype: str, data: bytes, decoded: bytes, most: float) -> str:
    """Return the first value that differs by more than ``most`` of its magnitude, and what it became; empty if none does."""
    import numpy as np

    before, after = _values(dtype, data), _values(dtype, decoded)
    with np.errstate(all="ignore"):
        kept = np.where(
            np.isfinite(before),
            np.abs(after - before) <= most * np.abs(before),
            (before == after) | (np.isnan(before) & np.isnan(after)),
        )
    places = np.flatnonzero(~kept)
    return f"{before[places[0]]!r} became {after[places[0]]!r}" if len(places) else ""


def _context(chunk: SampleChunk, base: memoryview | None) -> EncodeContext:
    return EncodeContext(chunk.dtype, compress, Rooms(), base)


def _decoding(codec: ChunkCodec) -> DecodeContext:
    def refuse(offset: int, into: memoryview) -> None:
        raise AssertionError("decode reads other chunks of the pack, so its bytes mean something else in another pack")

    return DecodeContext(codec.needs_base, refuse, Rooms)


_OWN = b"the chunk's own"


def _encoded(codec: ChunkCodec, chunk: SampleChunk, base: bytes | None = _OWN) -> EncodedChunk | None:
    """Encode a chunk, with its own base if the codec needs one, or with the given one."""
    if base is _OWN:
        base = chunk.base if codec.needs_base else None
    view = None if base is None else memoryview(base).toreadonly()
    return codec.encode(memoryview(chunk.data).toreadonly(), _context(chunk, view))


def _decoded(codec: ChunkCodec, stored: bytes | bytearray | memoryview, chunk: SampleChunk, filled: int = 0) -> bytes:
    """Decode into the middle of memory that is ``filled`` with a byte, or has the base.

    Raise ``AssertionError`` if its surroundings change.
    """
    room = bytearray([filled ^ 0xFF]) * (len(chunk.data) + 2 * GUARD)
    into = memoryview(room)[GUARD : GUARD + len(chunk.data)]
    into[:] = chunk.base if codec.needs_base else bytes([filled]) * len(into)
    around = room[:GUARD], room[-GUARD:]
    codec.decode(memoryview(stored).toreadonly(), into, _decoding(codec))
    assert (room[:GUARD], room[-GUARD:]) == around, f"{chunk.name}: decode wrote beyond its memory"
    return bytes(into)


def _bytes_of(encoded: EncodedChunk | None) -> bytes:
    return b"" if encoded is None else bytes(encoded.stored)


def _difference(first: dict[str, str], second: dict[str, str]) -> str:
    return next((name for name in first if first[name] != second.get(name)), "the list of chunks")


def _at_page_end(data: bytes) -> memoryview:
    """Return a copy of ``data`` that ends where the memory ends: the next page may be neither read nor written."""
    pages = -(-len(data) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory[pages - len(data) : pages] = data
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if protect(address + pages, mmap.PAGESIZE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    return memoryview(memory)[pages - len(data) : pages]


def _address_space() -> int:
    """Return the bytes of this process's address space that are in use."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * mmap.PAGESIZE


def _peak(*, reset: bool = False) -> int:
    """Return the most bytes of memory that this process has used. ``reset``: return what it uses now, and count the peak from here."""
    if reset:
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM:"))


def _damaged(stored: bytes, length: int) -> Iterator[tuple[str, bytes, int]]:
    """Yield damaged copies of stored bytes: what was done, the bytes, and the length of the memory to decode into."""
    draw = random.Random(len(stored))
    for end in sorted(
        {0, 1, 2, 4, 8, len(stored) // 2, len(stored) - 1, *(draw.randrange(len(stored)) for _ in range(8))}
    ):
        if end < len(stored):
            yield f"cut to {end} bytes", stored[:end], length
    yield "with bytes appended", stored + bytes(range(64)), length
    for place in sorted({*range(min(16, len(stored))), *(draw.randrange(len(stored)) for _ in range(24))}):
        for value in (0x00, 0xFF, stored[place] ^ 1 << draw.randrange(8)):
            yield f"with byte {place} as {value}", stored[:place] + bytes([value]) + stored[place + 1 :], length
    for size in (4, 8, 16):
        yield f"with {size} bytes of ones at the beginning", b"\xff" * size + stored[size:], length
        yield f"with {size} bytes of zeros at the beginning", bytes(size) + stored[size:], length
    for size in (1, 16, len(stored)):
        yield f"replaced by {size} random bytes", draw.randbytes(size), length
    for other in (0, 1, length - 1, length + 1, 2 * length):
        yield f"into {other} bytes", stored, other
