"""The share of a link that a save takes: the arithmetic, and a small slice between two network namespaces, where these can be made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.link import missing, shares, windows


def test_shares_are_those_of_the_time_in_which_bytes_were_sent() -> None:
    """A link of 100 bytes a second: four quiet seconds, ten at half of it with one second at all of it, four quiet ones."""
    samples, sent = [(0.0, 5)], 5
    for tenth in range(1, 181):
        rate = 0 if tenth <= 40 or tenth > 140 else 100 if 80 < tenth <= 90 else 50
        sent += rate // 10
        samples.append((tenth / 10, sent))
    assert max(windows(samples, 1.0)) == pytest.approx(100)
    result = shares(samples, 100.0)
    assert result["copy_s"] == pytest.approx(10, abs=0.5) and result["share"] == pytest.approx(0.55, abs=0.02)
    assert result["most_in_1_s"] == pytest.approx(1, abs=0.01) and result["most_in_10_s"] <= 0.55


@pytest.mark.slow
def test_a_bounded_copy_leaves_most_of_a_link_to_others() -> None:
    """On a link of 24 Mbit/s, a copy bounded to 40 % takes under 60 % and sends at most 15 % more than the state."""
    if why := missing():
        pytest.skip(why)
    from benchmarks.link import measure

    row = measure(24, 34, 0.4, ways=["bounded"])["ways"]["bounded"]
    assert row["share"] < 0.6 and row["sent_bytes"] < 1.15 * row["state_bytes"]
