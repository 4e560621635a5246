"""A few cells of the matrix of ``make matrix``, and that it has every pair."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pairs import rows_of
from tests.store.conftest import s3_server
from tests.store.servers import Server

from matrix import FACTORS, possible, try_cell

__all__ = ["s3_server"]
pytestmark = [pytest.mark.distributed, pytest.mark.crash]
BOUND = ("layout", "stores", "by", "source", "tls")
"""The factors that ``possible`` reads. Any value of another factor goes with any value."""


def test_every_pair_that_can_be_is_in_some_cell() -> None:
    """Every pair of values that is possible in some row is in some cell."""
    bound = [
        row
        for values in itertools.product(*(FACTORS[name] for name in BOUND))
        if possible(row := dict(zip(BOUND, values, strict=True)))
    ]
    wanted = {pair for row in bound for pair in itertools.combinations(sorted(row.items()), 2)}
    free = {(name, value) for name in FACTORS.keys() - set(BOUND) for value in FACTORS[name]}
    values = sorted(free | {item for row in bound for item in row.items()})
    wanted |= {(a, b) for a, b in itertools.combinations(values, 2) if a[0] != b[0] and {a, b} & free}
    rows = rows_of(FACTORS, possible, 0)
    assert {pair for row in rows for pair in itertools.combinations(sorted(row.items()), 2)} == wanted
    assert all(possible(row) for row in rows)
    assert len(rows) < 60


@pytest.mark.parametrize("number", [0, 4])  # between them: mirrors, TLS, a follower, a tracker, objects
def test_a_cell_is_killed_and_restored_to_the_bit(number: int, tmp_path: Path, s3_server: Server) -> None:
    """Combine features: save in one way, kill during a save, restore in another way."""
    row = rows_of(FACTORS, possible, 7)[number]
    assert try_cell(row, number, tmp_path, s3_server) == "", row
