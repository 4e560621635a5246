"""Arithmetic of parity: against the schoolbook, and every choice of losses."""

from __future__ import annotations

import random
from itertools import combinations, permutations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relight.errors import ConfigError
from relight.peers import galois
from relight.peers.galois import (
    BLOCK,
    MEMBERS_MAX,
    PLANE,
    ROWS_MAX,
    accumulate,
    coefficient,
    invert,
    multiply,
    solve,
    weigh,
)


def slowly(a: int, b: int) -> int:
    """Return the product of two polynomials over GF(2), modulo x^8 + x^4 + x^3 + x^2 + 1."""
    product = 0
    for bit in range(8):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(14, 7, -1):
        if product >> bit & 1:
            product ^= 0x11D << (bit - 8)
    return product


TABLE = numpy.array([[slowly(a, b) for b in range(256)] for a in range(256)], numpy.uint8)


def elements(block: bytes | memoryview) -> numpy.ndarray:
    """A block's elements: bit t of each is in plane t."""
    bits = numpy.unpackbits(numpy.frombuffer(block, numpy.uint8).reshape(8, PLANE), axis=1)
    return (bits << numpy.arange(8, dtype=numpy.uint8)[:, None]).sum(axis=0, dtype=numpy.uint8)


def test_products_and_inverses_are_the_fields() -> None:
    """All 65,536 products equal the schoolbook's, and every element but 0 has its inverse."""
    assert all(multiply(a, b) == TABLE[a, b] for a in range(256) for b in range(256))
    assert all(multiply(a, invert(a)) == 1 for a in range(1, 256))
    with pytest.raises(ZeroDivisionError):
        invert(0)


def test_every_square_part_of_the_coefficients_has_an_inverse() -> None:
    """Any rows determine as many missing members: all 4 rows, all 32 members, all choices. Row 0 has ones only."""
    matrix = numpy.array(
        [[coefficient(row, member) for member in range(MEMBERS_MAX)] for row in range(ROWS_MAX)], numpy.uint8
    )
    assert (matrix[0] == 1).all() and matrix.all()
    tried = 0
    for size in (1, 2, 3, 4):
        columns = numpy.array(list(combinations(range(MEMBERS_MAX), size)))
        for rows in combinations(range(ROWS_MAX), size):
            determinant = numpy.zeros(len(columns), numpy.uint8)  # without signs: 1 is its own opposite
            for order in permutations(range(size)):
                term = numpy.ones(len(columns), numpy.uint8)
                for row, column in zip(rows, order):
                    term = TABLE[term, matrix[row, columns[:, column]]]
                determinant ^= term
            assert determinant.all(), rows
            tried += len(columns)
    assert tried == 4 * 32 + 6 * 496 + 4 * 4960 + 35960


def test_coefficients_stay_what_they_are() -> None:
    """Agents of one job may differ in their Relight: the first columns are pinned."""
    assert [[coefficient(row, member) for member in range(6)] for row in range(4)] == PINNED


PINNED = [[1, 1, 1, 1, 1, 1], [1, 2, 142, 4, 71, 8], [113, 195, 71, 4, 107, 254], [141, 33, 132, 183, 37, 2]]


@pytest.mark.parametrize("factor", range(0, 256, 5))
def test_accumulate_adds_the_product_of_every_element(factor: int) -> None:
    """For any factor, the factor times the data's element is added to each element of the block."""
    rng = random.Random(factor)
    data, into = rng.randbytes(BLOCK), bytearray(rng.randbytes(BLOCK))
    before = elements(bytes(into))
    accumulate(memoryview(into), memoryview(data), factor)
    assert (elements(bytes(into)) == before ^ TABLE[factor][elements(data)]).all()


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 4097, BLOCK + 3])
def test_plain_xor_takes_any_length(length: int) -> None:
    """Factor 1 takes any length, other factors need whole blocks. Different lengths are refused."""
    rng = random.Random(length)
    data, into = rng.randbytes(length), rng.randbytes(length)
    result = bytearray(into)
    accumulate(memoryview(result), memoryview(data), 1)
    assert result == bytes(a ^ b for a, b in zip(data, into))
    if length % BLOCK:
        with pytest.raises(ValueError, match="whole blocks"):
            accumulate(memoryview(result), memoryview(data), 2)
    with pytest.raises(ValueError, match="cannot be added"):
        accumulate(memoryview(result), memoryview(data + b"x"), 1)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_what_is_missing_is_the_sum_that_weigh_returns(data: st.DataObject) -> None:
    """For any k, m and losses up to m, each missing member is the weighed sum of k others, to the bit."""
    k, m = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    lost = data.draw(st.sets(st.integers(0, k + m - 1), max_size=m))
    rng = numpy.random.default_rng(k * 100 + m)
    members = [rng.bytes(BLOCK) for _ in range(k)]
    rows = []
    for row in range(m):
        piece = bytearray(BLOCK)
        for member, block in enumerate(members):
            accumulate(memoryview(piece), memoryview(block), coefficient(row, member))
        rows.append(bytes(piece))
    missing = [member for member in sorted(lost) if member < k]
    known = [member for member in range(k) if member not in lost]
    chosen = data.draw(st.permutations([row for row in range(m) if k + row not in lost]))[: len(missing)]
    for target in missing:
        of_rows, of_known = weigh(missing, chosen, known, target)
        total = bytearray(BLOCK)
        for factor, block in zip(
            of_rows + of_known, [rows[row] for row in chosen] + [members[other] for other in known]
        ):
            accumulate(memoryview(total), memoryview(block), factor)
        assert total == members[target]


def test_what_cannot_be_is_refused() -> None:
    """Rows and members beyond the matrix are refused, as are rows that determine nothing."""
    for row, member in ((4, 0), (-1, 0), (0, 32), (0, -1)):
        with pytest.raises(ConfigError):
            coefficient(row, member)
    with pytest.raises(ConfigError):
        solve([[1, 2], [1, 2]])
    assert galois.BLOCK % 4096 == 0
