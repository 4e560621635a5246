"""Numbers about values, against numpy and torch where those know the kind."""

from __future__ import annotations

import math
import struct

import pytest

from relight.format.dtypes import DTYPES
from relight.reader.stats import StatsSink, stats

pytest.importorskip("numpy")


def of(dtype: str, data: bytes, *cuts: int) -> dict[str, float]:
    """Return statistics of bytes that arrive in pieces, the last piece first."""
    sink = StatsSink(dtype, len(data))
    edges = [0, *cuts, len(data)]
    for start, end in reversed(list(zip(edges, edges[1:]))):
        sink.absorb(start, memoryview(data)[start:end])
    return stats([sink])


def test_pieces_in_any_order_give_the_same_numbers() -> None:
    """Results are bit-identical for any order of pieces, so threads do not change a mean."""
    data = struct.pack("<64d", *(math.sin(n) * 10.0 ** (n % 17) for n in range(64)))
    sinks = [StatsSink("float64", len(data)) for _ in range(2)]
    pieces = [(start, memoryview(data)[start : start + 64]) for start in range(0, len(data), 64)]
    for sink, order in zip(sinks, (pieces, pieces[::-1])):
        for start, piece in order:
            sink.absorb(start, piece)
    assert stats(sinks[:1]) == stats(sinks[1:])
    whole = of("float64", data)
    assert math.isclose(stats(sinks[:1])["mean"], whole["mean"], rel_tol=1e-9)


def test_shards_are_one_tensor() -> None:
    """The pieces that ranks hold are counted together."""
    halves = [StatsSink("float32", 8), StatsSink("float32", 8)]
    halves[0].absorb(0, memoryview(struct.pack("<2f", 1, 2)))
    halves[1].absorb(0, memoryview(struct.pack("<2f", 3, math.nan)))
    assert stats(halves) == {"min": 1.0, "max": 3.0, "mean": 2.0, "norm": math.sqrt(14), "nan": 1, "inf": 0}


def test_large_numbers_do_not_overflow() -> None:
    """Neither norm nor mean overflows for numbers near the end of their range."""
    result = of("float64", struct.pack("<2d", 1e300, -1e300))
    assert math.isclose(result["norm"], math.sqrt(2) * 1e300)
    assert of("uint64", struct.pack("<2Q", 2**64 - 1, 0))["max"] == 2**64 - 1


def test_none_finite_and_nothing_at_all() -> None:
    """Without finite elements there are only counts. Without elements there is nothing."""
    assert of("float32", struct.pack("<2f", math.inf, math.nan)) == {"nan": 1, "inf": 1}
    assert stats([StatsSink("float32", 0)]) == {}


def test_complex_has_a_norm_and_no_order() -> None:
    """|3+4i| is 5."""
    assert of("complex64", struct.pack("<2f", 3, 4)) == {"norm": 5.0, "nan": 0, "inf": 0}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_element_is_taken(dtype: str) -> None:
    """Every dtype of the format is accepted with any bits. Dtypes below a byte have no statistics."""
    size = DTYPES[dtype].itemsize
    data = bytes(range(256)) * size
    result = of(dtype, data, 128 * size)
    assert set(result) <= {"min", "max", "mean", "norm", "nan", "inf"}
    below = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]
    assert bool(result) == (
        dtype not in (*below, "float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2")
    )


@pytest.mark.parametrize(
    "dtype",
    ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "bfloat16", "float16"],
)
def test_small_floats_equal_those_of_torch(dtype: str) -> None:
    """Statistics over all values of a one-byte or two-byte dtype equal torch's."""
    torch = pytest.importorskip("torch")
    data = (
        bytes(range(256))
        if dtype.startswith("float8")
        else b"".join(struct.pack("<H", code) for code in range(1 << 16))
    )
    values = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).double()
    finite = values[values.isfinite()]
    result = of(dtype, data)
    assert (result["min"], result["max"]) == (finite.min().item(), finite.max().item())
    assert (result["nan"], result["inf"]) == (int(values.isnan().sum()), int(values.isinf().sum()))
    assert math.isclose(result["norm"], finite.norm().item(), rel_tol=1e-12)
    assert math.isclose(result["mean"], finite.mean().item(), rel_tol=1e-9, abs_tol=1e-30)
