"""Coded chunks: exact for every kind of element and for any bytes; anything else is refused in bounded memory."""

from __future__ import annotations

import resource
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relight
from relight.format import entropy
from relight.format.codecs import BYTES, ElementKind, Way, choose, decode, encode, kind_of, needs_base
from relight.format.dtypes import DTYPES, dtype_named
from relight.format.entropy import compress
from relight.format.planes import BLOCK_BYTES, Elements, Rooms, elements, join, split, widths_of

KINDS = sorted({kind_of(dtype) for dtype in DTYPES.values()})
METHODS = ("raw", "entropy", "repeats")


def weights(count: int, seed: int = 0) -> np.ndarray:
    """Return float32 values like those of a layer."""
    return (np.random.default_rng(seed).standard_normal(count) * 0.02).astype("<f4")


def bfloat16(values: np.ndarray) -> memoryview:
    """Return the upper halves of float32 values."""
    return memoryview((values.view("<u4") >> 16).astype("<u2")).cast("B")


def there_and_back(data: bytes, way: Way, base: bytes | None = None) -> None:
    """Assert that a coded chunk decodes exactly, into separate memory and over its base."""
    stored = encode(memoryview(data), way, None if base is None else memoryview(base))
    if stored is None:
        return
    assert len(stored) < len(data)
    into = bytearray(len(data))
    decode(memoryview(stored), memoryview(into), None if base is None else memoryview(base))
    assert into == data
    if base is not None:
        over = bytearray(base)
        decode(memoryview(stored), memoryview(over), memoryview(over))
        assert over == data


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    raw=st.binary(max_size=600),
    base=st.none() | st.binary(max_size=600),
    single=st.integers(0, 8),
    method=st.sampled_from(METHODS),
    repeat=st.sampled_from((1, 1, 200)),
)
def test_any_bytes_come_back(
    kind: ElementKind, raw: bytes, base: bytes | None, single: int, method: str, repeat: int
) -> None:
    """Every chosen and every possible way is exact."""
    raw = (raw * repeat)[: len(raw) * repeat // kind.width * kind.width]
    base = None if base is None else (base * (len(raw) // max(len(base), 1) + 1))[: len(raw)].ljust(len(raw), b"\0")
    widths = widths_of(kind.width, min(single, kind.width))
    there_and_back(raw, Way(kind, base is not None, widths, (method,) * len(widths), 1.0), base)
    way = choose(memoryview(raw), kind, None if base is None else memoryview(base))
    if way is not None:
        there_and_back(raw, way, base if way.difference else None)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype(name: str) -> None:
    """Similar values of any kind become smaller, and a chunk larger than a block decodes exactly."""
    kind, rng = kind_of(dtype_named(name)), np.random.default_rng(1)
    if kind.floating and kind.width >= 4:
        data = rng.standard_normal(100_001).astype(f"<f{kind.width}").tobytes()
    elif kind.floating and kind.width == 2:
        data = rng.standard_normal(100_001).astype("<f2").tobytes()
    else:
        data = rng.binomial(100, 0.1, 100_001).astype(f"<u{kind.width}").tobytes()
    way = choose(memoryview(data), kind)
    assert way is not None
    stored = encode(memoryview(data), way)
    assert stored is not None
    assert len(stored) / len(data) == pytest.approx(way.share, abs=0.02)
    there_and_back(data, way)


def test_the_size_of_coded_trained_values() -> None:
    """Exponents are compressed, mantissas stay raw, and the size matches the entropy of a normal distribution."""
    values = weights(1 << 20)
    way = choose(bfloat16(values), ElementKind(2, True))
    assert way is not None and way.widths == (1, 1) and way.methods == ("entropy", "raw")
    stored = encode(bfloat16(values), way)
    assert stored is not None and len(stored) <= 0.665 * (2 << 20)
    way = choose(memoryview(values).cast("B"), ElementKind(4, True))
    assert way is not None and way.widths == (1, 1, 2) and way.methods == ("entropy", "raw", "raw") and way.share < 0.84


@pytest.mark.parametrize("width", [2, 4])
def test_numbers_without_a_negative_one(width: int) -> None:
    """Their lowest bytes are stored raw: decoding is one plane shorter, and the chunk at most one percent longer."""
    values = weights(1 << 20) ** 2
    data, kind = (memoryview(values).cast("B") if width == 4 else bfloat16(values)), ElementKind(width, True)
    way = choose(data, kind)
    assert way is not None and not way.kind.floating and [method != "raw" for method in way.methods].count(True) == 1
    single = (1,) * width
    rotated = encode(data, Way(kind, False, single, ("entropy", *("raw",) * (width - 2), "entropy"), 1.0))
    stored = encode(data, way)
    assert stored is not None and rotated is not None and len(stored) <= 1.01 * len(rotated)
    there_and_back(bytes(data), way)
    signed = choose(memoryview(weights(1 << 20)).cast("B"), ElementKind(4, True))
    assert signed is not None and signed.kind.floating
    leveled = choose(data, kind, trial=entropy.Leveled(3))
    assert leveled is not None and leveled.share <= way.share


def test_noise_is_left_alone() -> None:
    """A sample shows that the chunk is incompressible."""
    noise = np.random.default_rng(0).bytes(1 << 20)
    assert choose(memoryview(noise), BYTES) is None
    assert choose(memoryview(noise), ElementKind(4, True)) is None
    assert encode(memoryview(noise), Way(BYTES, False, (1,), ("entropy",), 0.5)) is None


def test_differences() -> None:
    """Values that moved a little are smaller as a delta than alone, and equal values take almost nothing. A base that
    does not help is not used."""
    before = weights(1 << 18)
    after = before * (1 + 1e-4 * weights(1 << 18, 1) / 0.02)
    data, base = memoryview(after.astype("<f4")).cast("B"), memoryview(before).cast("B")
    alone, with_base = choose(data, ElementKind(4, True)), choose(data, ElementKind(4, True), base)
    assert alone is not None and with_base is not None and with_base.difference
    assert with_base.share < 0.8 * alone.share
    there_and_back(bytes(data), with_base, bytes(base))
    same = choose(base, ElementKind(4, True), base)
    assert same is not None and same.share < 0.002
    stored = encode(base, same, base)
    assert stored is not None and len(stored) < 1000 and needs_base(memoryview(stored))
    other = choose(data, ElementKind(4, True), memoryview(np.random.default_rng(3).bytes(1 << 20)))
    assert other is not None and not other.difference


def test_few_rows_of_many() -> None:
    """If a hundredth of a table's rows changed, the delta is hardly larger than their bytes."""
    rng = np.random.default_rng(0)
    before = weights(4096 * 256).reshape(4096, 256)
    after = before.copy()
    rows = rng.choice(4096, 41, replace=False)
    after[rows] += 1e-3 * rng.standard_normal((41, 256)).astype("<f4")
    data, base = memoryview(after.reshape(-1)).cast("B"), memoryview(before.reshape(-1)).cast("B")
    way = choose(data, ElementKind(4, True), base)
    assert way is not None
    stored = encode(data, way, base)
    assert stored is not None and len(stored) < 1.1 * 41 * 256 * 4
    there_and_back(bytes(data), way, bytes(base))


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_planes(width: int) -> None:
    """Every split joins exactly: rotated or not, with differences or not, longer than a block and no multiple of it."""
    rng = np.random.default_rng(width)
    length = BLOCK_BYTES + width * 7_001
    values, base = elements(rng.bytes(length), width), elements(rng.bytes(length), width)
    for single in range(width + 1):
        widths = widths_of(width, single)
        assert sum(widths) == width and (single == 0 or widths[: min(single, width)] == (1,) * min(single, width))
        for turned in (False, True):
            for earlier in (None, base):
                joined = np.empty_like(values)
                join(split(values, widths, turned=turned, base=earlier), joined, turned=turned, base=earlier)
                assert np.array_equal(joined, values)


def coded() -> tuple[bytes, int]:
    """Return a coded chunk of bfloat16, and its decoded length."""
    data = bfloat16(weights(5000))
    way = choose(data, ElementKind(2, True))
    assert way is not None
    stored = encode(data, way)
    assert stored is not None
    return stored, len(data)


def test_every_damaged_byte_is_refused_or_changes_what_comes_out() -> None:
    """A chunk with one changed byte raises only Relight's errors, and never allocates more than the chunk."""
    stored, length = coded()
    into = bytearray(length)
    refused = 0
    for offset in (*range(64), *range(64, len(stored), 37)):
        damaged = bytearray(stored)
        damaged[offset] ^= 0xFF
        try:
            decode(memoryview(damaged), memoryview(into))
        except relight.CorruptCheckpoint:
            refused += 1
    assert refused >= 10


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_are_decoded_or_refused(stored: bytes, length: int) -> None:
    """Random bytes raise only Relight's errors."""
    for data in (stored, bytes((1, 18, 2)) + stored, bytes((1, 50, 2)) + stored):
        try:
            decode(memoryview(data), memoryview(bytearray(length)))
        except relight.CorruptCheckpoint:
            pass


def test_wrong_lengths() -> None:
    """Wrong lengths and versions are refused. A frame of a gigabyte is stopped at the expected length."""
    stored, length = coded()
    for wrong in (stored[:-1], stored + b"x", b"", stored[:2], b"\2" + stored[1:]):
        with pytest.raises(relight.CorruptCheckpoint):
            decode(memoryview(wrong), memoryview(bytearray(length)))
    for other in (0, length - 2, length - 1, length + 2):
        with pytest.raises(relight.CorruptCheckpoint):
            decode(memoryview(stored), memoryview(bytearray(other)))
    bomb = entropy.zstd.compress(bytes(1 << 30))
    chunk = bytes((1, 1, 1)) + struct.pack("<BI", 17, len(bomb)) + bomb
    with pytest.raises(relight.CorruptCheckpoint):
        decode(memoryview(chunk), memoryview(bytearray(4096)))


@pytest.mark.parametrize(("changed", "method"), [(0.002, "repeats"), (0.02, "repeats"), (0.4, "entropy")])
def test_repetitions_are_searched_if_that_saves_bytes(changed: float, method: str) -> None:
    """Repetitions are searched in differences that are mostly zero, and not where an entropy coder alone gains as much."""
    rng = np.random.default_rng(7)
    before = rng.integers(0, 1 << 16, 1 << 20).astype("<u2")
    after = before + ((rng.random(1 << 20) < changed) * rng.integers(1, 600, 1 << 20)).astype("<u2")
    data, base = memoryview(after).cast("B"), memoryview(before).cast("B")
    way = choose(data, ElementKind(2, True), base)
    assert way is not None and way.difference and way.methods[0] == method
    planes = split(elements(data, 2), way.widths, turned=True, base=elements(base, 2))
    by = {candidate: len(compress(planes[0].data.cast("B"), candidate)) / len(planes[0]) for candidate in METHODS[1:]}
    other = by["entropy" if method == "repeats" else "repeats"]
    assert by[method] < other + 0.03


@pytest.mark.parametrize("seed", range(8))
def test_a_hundredth_of_the_rows_changed(seed: int) -> None:
    """The size follows the changed rows, although a sample may have met few or none of them."""
    rng = np.random.default_rng(seed)
    before = rng.normal(0, 1, (1 << 14, 64)).astype("<f4")
    after = before.copy()
    touched = rng.permutation(1 << 14)[: (1 << 14) // 100]
    after[touched] = rng.normal(0, 1, (len(touched), 64)).astype("<f4")
    data, base = memoryview(after.reshape(-1)).cast("B"), memoryview(before.reshape(-1)).cast("B")
    way = choose(data, ElementKind(4, True), base)
    assert way is not None and way.difference
    stored = encode(data, way, base)
    assert stored is not None and len(stored) <= 1.2 * len(touched) * 64 * 4


def test_memory_that_is_there_is_used_again() -> None:
    """Decoding a later chunk causes almost no page faults, because buffers are reused."""
    data = bfloat16(weights(1 << 21))
    way = choose(data, ElementKind(2, True))
    assert way is not None and "entropy" in way.methods
    stored, into, rooms = encode(data, way), memoryview(bytearray(len(data))), Rooms()
    assert stored is not None
    for _ in range(3):
        decode(memoryview(stored), into, rooms=rooms)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(10):
        decode(memoryview(stored), into, rooms=rooms)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 10 * len(data) // 4096 // 4


@pytest.mark.parametrize(
    ("width", "with_base", "operations"),
    [(1, False, 4), (2, False, 7), (4, False, 9), (1, True, 6), (2, True, 9), (4, True, 11)],
)
def test_operations_on_each_byte(width: int, with_base: bool, operations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A join writes each byte at most this often, and never uses NumPy's slow left shift of 1 and 2 bytes."""
    written: list[tuple[str, int, int]] = []

    def counted(name: str) -> Callable[..., Any]:
        apply = getattr(np, name)

        def run(first: Elements, *rest: Any, **options: Any) -> Any:
            target = options.get("out", first)
            written.append((name, target.itemsize, target.nbytes))
            return apply(first, *rest, **options)

        return run

    values = elements(np.random.default_rng(width).bytes(BLOCK_BYTES), width)
    base = elements(bytes(BLOCK_BYTES), width) if with_base else None
    planes, joined = split(values, widths_of(width, 1), turned=True, base=base), np.empty_like(values)
    for name, function in vars(np).items():
        if isinstance(function, np.ufunc):
            monkeypatch.setattr(np, name, counted(name))
    monkeypatch.setattr(np, "copyto", counted("copyto"))
    join(planes, joined, turned=True, base=base)
    monkeypatch.undo()
    assert np.array_equal(joined, values)
    assert not [name for name, itemsize, _ in written if name == "left_shift" and itemsize <= 2]
    assert sum(count for _, _, count in written) <= operations * BLOCK_BYTES


def test_differences_without_their_base() -> None:
    """Raise, as a zstd without that parameter does."""
    data = memoryview(weights(5000)).cast("B")
    way = choose(data, ElementKind(4, True), data)
    assert way is not None
    stored = encode(data, way, data)
    assert stored is not None
    for base in (None, memoryview(bytes(len(data) - 4))):
        with pytest.raises(relight.CorruptCheckpoint, match="differences"):
            decode(memoryview(stored), memoryview(bytearray(len(data))), base)


def test_where_zstd_has_no_switch_for_literals() -> None:
    """Without that parameter, compression works with the other options."""
    data = bfloat16(weights(5000))
    without = entropy.entropy_options(1999)
    assert 1999 not in without and 1002 in entropy.entropy_options()
    assert len(entropy.zstd.compress(data, options=without)) < len(data)
