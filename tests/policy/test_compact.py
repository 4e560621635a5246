"""What a save leaves out, and whether coding the rest pays: decided from what was seen, and said."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import relight
from relight.commit.earlier import Smaller
from relight.commit.pack_writer import Spent
from relight.policy.compact import Compact, Conditions, Experience, Sample, choose

FAST, SLOW = 1 / 2e9, 1 / 50e6


def seen(coded: float | None = None, code_s: float = FAST, store_s: float | None = None, **more: Any) -> Experience:
    """With a sample of one kind."""
    samples = (Sample("float32 param", 1.0, coded, code_s),) if coded is not None else None
    return Experience(samples=samples, store_s_per_byte=store_s, **more)


@pytest.mark.parametrize(
    ("rules", "seen", "reuse", "coded", "says"),
    [
        (Compact(), seen(), False, False, "nothing to compare"),
        (Compact(), seen(equal=0.0), False, False, "0.0% of the last two"),
        (Compact(), seen(equal=0.99), True, False, "99%"),
        (Compact(reuse=False), seen(equal=0.99), False, False, "reuse is off"),
        (Compact(full_every=3), seen(equal=0.99, since_full=2), True, False, "99%"),
        (Compact(full_every=3), seen(equal=0.99, since_full=3), False, False, "every 3 saves"),
        (Compact(codecs="never"), seen(0.5, FAST, SLOW), False, False, "codecs are off"),
        (Compact(codecs="always"), seen(), False, True, "codecs are on"),
        (Compact(codecs="always"), seen(0.99), False, False, "came to 99%"),
        (Compact(), seen(0.7, FAST, SLOW), False, True, "to 70%, 71 MB/s; as it is the store takes 50 MB/s"),
        (Compact(), seen(0.7, SLOW, FAST), False, False, "too long: with float32 param coded a sample came to 70%, 100 MB/s; as it is the store takes 2,000"),
        (Compact(), seen(0.7, FAST, 1 / 500e6, strain=20.0), False, False, "70%, 200 MB/s"),
        (Compact(), seen(0.7, FAST, SLOW, drag=2.0), False, False, "70%, 36 MB/s"),
        (Compact(), seen(0.95, FAST, SLOW), False, False, "95%"),
        (Compact(), seen(1.0, FAST, SLOW), False, False, "100%"),
        (Compact(), Experience(samples=(), store_s_per_byte=SLOW), False, False, "nothing to code"),
    ],
)  # fmt: skip
def test_choices(rules: Compact, seen: Experience, reuse: bool, coded: bool, says: str) -> None:
    """Each with its reason."""
    found = choose(rules, seen, Conditions(2))
    assert (found.reuse, found.coded) == (reuse, coded)
    assert says in found.reason


KINDS = (
    Sample("bfloat16 param", 0.1, 0.66, 1 / 1.5e9),
    Sample("float32 param", 0.3, 0.72, 1 / 1.2e9),
    Sample("float32 optim", 0.5, 0.95, 1 / 0.6e9),
    Sample("int64 loader", 0.1, 1.0, 1 / 10e9),
)


@pytest.mark.parametrize(
    ("store", "kinds"),
    [
        (50e6, {"bfloat16 param", "float32 param", "float32 optim"}),
        (2.2e9, {"bfloat16 param", "float32 param"}),
        (20e9, set()),
    ],
)  # fmt: skip
def test_what_is_coded_depends_on_the_store(store: float, kinds: set[str]) -> None:
    """Kinds that gain much for a second of coding are coded for a faster store, too; noise never is."""
    found = choose(Compact(), Experience(samples=KINDS, store_s_per_byte=1 / store), Conditions(2))
    assert set(found.kinds or ()) == kinds, found.reason
    assert found.coded == bool(kinds)


@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1.1), st.floats(1e-11, 1e-6)), max_size=6), st.floats(1e-11, 1e-6),
    st.integers(1, 8), st.integers(1, 4), st.floats(1, 20), st.floats(1, 20),
)  # fmt: skip
def test_it_is_never_slower(
    samples: list[tuple[float, float, float]], store: float, threads: int, lanes: int, strain: float, drag: float
) -> None:
    """By what was seen: whatever is chosen, storing it all as it is would take at least a tenth longer."""
    whole = sum(weight for weight, _, _ in samples)
    held = tuple(Sample(f"kind {number}", weight / whole, *one) for number, (weight, *one) in enumerate(samples))
    found = choose(Compact(), Experience(samples=held, store_s_per_byte=store, strain=strain, drag=drag), Conditions(threads, lanes))
    coded = [one for one in held if one.kind in (found.kinds or ())]
    assert found.coded == bool(coded)
    if coded:
        stored = 1 - sum(one.weight * (1 - one.coded) for one in coded)
        took = max(lanes * stored * store, sum(one.weight * one.code_s_per_byte for one in coded) * strain / threads)
        assert took * drag <= 0.9 * store * (1 + 1e-9)


def test_a_pace_is_a_slow_store() -> None:
    """A disk that takes two gigabytes a second, of which no more than fifty megabytes are wanted."""
    fast = seen(0.7, 1 / 1e9, FAST)
    assert not choose(Compact(), fast, Conditions(2)).coded
    assert choose(Compact(), fast, Conditions(2, bytes_per_second=50e6)).coded


def after(coding_s: float, took_s: float, waited_s: float = 0.0) -> Smaller:
    """A save of a gigabyte, coded to 0.7 of it, to a store of 1 GB/s, which should have taken 0.7 s."""
    smaller = Smaller(Compact(reuse=False), seen(0.7, 1 / 1e9, 1 / 1e9))
    assert smaller.choice(Conditions(2)).coded
    spent = Spent()
    spent.bytes, spent.seconds, spent.coded_bytes, spent.coding_s, spent.waited_s = 700_000_000, 0.7, 10**9, coding_s, waited_s
    smaller.met(spent, Conditions(2), 10**9, took_s)
    return smaller


def test_what_coding_was_seen_to_take_counts() -> None:
    """A training that leaves no processor, or a save that took longer than it should for whatever reason: coding gives way, and is tried
    again when that was long ago."""
    assert after(1.0, 0.75).choice(Conditions(2)).coded, "as it should have been"
    assert after(1.0, 3.0, waited_s=2.25).choice(Conditions(2)).coded, "what took so long was the trainer's copying"
    for smaller in (after(4.0, 2.0), after(1.0, 1.1)):
        assert not smaller.choice(Conditions(2)).coded
        plain = Spent()
        plain.bytes, plain.seconds = 10**9, 1.0
        for number in range(1, 40):
            smaller.met(plain, Conditions(2), 10**9, 1.1)
            if smaller.choice(Conditions(2)).coded:
                break
        assert 2 < number < 20, number


def test_what_was_mostly_shared_says_nothing_of_coding() -> None:
    """A tenth of it was new: that it took little time does not say what all of it would take."""
    smaller = Smaller(Compact(), seen(0.7, 1 / 1e9, 1 / 1e9, drag=1.2))
    smaller.choice(Conditions(2))
    spent = Spent()
    spent.bytes, spent.seconds, spent.coded_bytes, spent.coding_s = 70_000_000, 0.07, 10**8, 0.1
    smaller.choice(Conditions(2, bytes_per_second=1e8))
    smaller.met(spent, Conditions(2), 10**9, 0.1)
    assert smaller.seen.drag == 1.2 and smaller.seen.strain == 1.0


@pytest.mark.parametrize(
    "given", [{"reuse": 1}, {"codecs": True}, {"codecs": "zstd"}, {"full_every": 0}, {"full_every": 2.5}, {"full_every": True}]
)
def test_rules_that_make_no_sense(given: dict[str, Any]) -> None:
    """Say what is meant."""
    with pytest.raises(relight.ConfigError, match=next(iter(given))):
        relight.Compact(**given)
