"""Few rows that contain every pair of values of different factors, to test features in combination."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

Row = dict[str, str]
_TRIES = 60


def rows_of(factors: Mapping[str, Sequence[str]], possible: Callable[[Row], bool], seed: int) -> list[Row]:
    """Return rows that contain every pair that some possible row contains.

    Each row starts with a missing pair and is filled at random. The best of ``_TRIES`` candidates is the one with the most missing pairs.
    ``possible`` receives whole rows.
    """
    rng = random.Random(seed)
    missing = {pair for pair in _all_pairs(factors) if _completed(pair, factors, possible, rng, 400) is not None}
    rows: list[Row] = []
    while missing:
        pair = rng.choice(sorted(missing))
        tries = [row for _ in range(_TRIES) if (row := _completed(pair, factors, possible, rng, 400)) is not None]
        best = max(tries, key=lambda row: len(missing & _pairs_in(row)))
        rows.append(best)
        missing -= _pairs_in(best)
    return rows


Pair = tuple[tuple[str, str], tuple[str, str]]


def _all_pairs(factors: Mapping[str, Sequence[str]]) -> list[Pair]:
    return [
        ((first, a), (second, b))
        for first, second in itertools.combinations(sorted(factors), 2)
        for a in factors[first]
        for b in factors[second]
    ]


def _pairs_in(row: Row) -> set[Pair]:
    return set(itertools.combinations(sorted(row.items()), 2))


def _completed(
    pair: Pair, factors: Mapping[str, Sequence[str]], possible: Callable[[Row], bool], rng: random.Random, tries: int
) -> Row | None:
    for _ in range(tries):
        row = {name: rng.choice(list(values)) for name, values in factors.items()} | dict(pair)
        if possible(row):
            return row
    return None
