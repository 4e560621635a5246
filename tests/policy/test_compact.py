"""What a save leaves out, and whether coding the rest pays: decided from what was seen, and said."""

from __future__ import annotations

from typing import Any

import pytest

import relight
from relight.policy.compact import Compact, Experience, choose

FAST, SLOW = 1 / 2e9, 1 / 50e6


@pytest.mark.parametrize(
    ("rules", "seen", "reuse", "coded", "says"),
    [
        (Compact(), Experience(), False, False, "nothing to compare"),
        (Compact(), Experience(equal=0.0), False, False, "0.0% of the last two"),
        (Compact(), Experience(equal=0.99), True, False, "99%"),
        (Compact(reuse=False), Experience(equal=0.99), False, False, "reuse is off"),
        (Compact(full_every=3), Experience(equal=0.99, since_full=2), True, False, "99%"),
        (Compact(full_every=3), Experience(equal=0.99, since_full=3), False, False, "every 3 saves"),
        (Compact(codecs="never"), Experience(coded=0.5, code_s_per_byte=FAST, store_s_per_byte=SLOW), False, False, "codecs are off"),
        (Compact(codecs="always"), Experience(), False, True, "codecs are on"),
        (Compact(codecs="always"), Experience(coded=0.99), False, False, "came to 99%"),
        (Compact(), Experience(coded=0.7, code_s_per_byte=FAST, store_s_per_byte=SLOW), False, True, "4,000 MB/s, the store takes 50 MB/s"),
        (Compact(), Experience(coded=0.7, code_s_per_byte=SLOW, store_s_per_byte=FAST), False, False, "100 MB/s, the store takes 2,000"),
        (Compact(), Experience(coded=0.95, code_s_per_byte=FAST, store_s_per_byte=SLOW), False, False, "95%"),
        (Compact(), Experience(coded=1.0, code_s_per_byte=FAST, store_s_per_byte=SLOW), False, False, "100%"),
    ],
)
def test_choices(rules: Compact, seen: Experience, reuse: bool, coded: bool, says: str) -> None:
    """Each with its reason."""
    found = choose(rules, seen, threads=2)
    assert (found.reuse, found.coded) == (reuse, coded)
    assert says in found.reason


@pytest.mark.parametrize(
    "given", [{"reuse": 1}, {"codecs": True}, {"codecs": "zstd"}, {"full_every": 0}, {"full_every": 2.5}, {"full_every": True}]
)
def test_rules_that_make_no_sense(given: dict[str, Any]) -> None:
    """Say what is meant."""
    with pytest.raises(relight.ConfigError, match=next(iter(given))):
        relight.Compact(**given)
