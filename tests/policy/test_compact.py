"""What a save leaves out, and whether coding the rest pays: decided from what was seen, and said."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import relight
from relight.commit.chunk_index import IncrementalState
from relight.commit.pack_writer import WriteStats
from relight.policy.compact import CodecSample, Compact, Conditions, Experience, choose

FAST, SLOW = 1 / 2e9, 1 / 50e6


def seen(coded: float | None = None, code_s: float = FAST, store_s: float | None = None, **more: Any) -> Experience:
    """With a sample of one kind."""
    samples = (CodecSample("float32 param", 1.0, coded, code_s),) if coded is not None else None
    return Experience(samples=samples, lane_s_per_byte=store_s, **{"drag": 1.0, **more})


@pytest.mark.parametrize(
    ("rules", "seen", "reuse", "coded", "says"),
    [
        (Compact(), seen(), False, False, "nothing to compare"),
        (Compact(), seen(equal=0.0), False, False, "0.0% of the last two"),
        (Compact(), seen(alike=0.0, equal=0.0), False, False, "0.0% of it may be"),
        (Compact(), seen(alike=0.5), True, False, "50.0% of it may be"),
        (Compact(), seen(alike=0.5, equal=0.0), True, False, "50.0% of it may be"),
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
        (Compact(), seen(0.7, FAST, 1 / 500e6, crowd=20.0), False, False, "70%, 200 MB/s"),
        (Compact(), seen(0.7, FAST, SLOW, drag=2.0), False, False, "70%, 36 MB/s"),
        (Compact(), seen(0.95, FAST, SLOW), False, False, "95%"),
        (Compact(), seen(1.0, FAST, SLOW), False, False, "100%"),
        (Compact(), Experience(samples=(), lane_s_per_byte=SLOW), False, False, "nothing to code"),
    ],
)  # fmt: skip
def test_choices(rules: Compact, seen: Experience, reuse: bool, coded: bool, says: str) -> None:
    """Each with its reason."""
    found = choose(rules, seen, Conditions(2))
    assert (found.reuse, found.coded) == (reuse, coded)
    assert says in found.reason


KINDS = (
    CodecSample("bfloat16 param", 0.1, 0.66, 1 / 1.5e9),
    CodecSample("float32 param", 0.3, 0.72, 1 / 1.2e9),
    CodecSample("float32 optim", 0.5, 0.95, 1 / 0.6e9),
    CodecSample("int64 loader", 0.1, 1.0, 1 / 10e9),
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
    found = choose(Compact(), Experience(samples=KINDS, lane_s_per_byte=1 / store, drag=1.0), Conditions(2))
    assert set(found.kinds or ()) == kinds, found.reason
    assert found.coded == bool(kinds)


@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1.1), st.floats(1e-11, 1e-6)), max_size=6), st.floats(1e-11, 1e-6),
    st.integers(1, 8), st.integers(1, 4), st.floats(1, 20), st.none() | st.floats(1, 20),
)  # fmt: skip
def test_it_is_never_slower(
    samples: list[tuple[float, float, float]], store: float, threads: int, lanes: int, strain: float, drag: float | None
) -> None:
    """By what was seen: whatever is chosen, storing it all as it is would take at least a tenth longer."""
    whole = sum(weight for weight, _, _ in samples)
    held = tuple(CodecSample(f"kind {number}", weight / whole, *one) for number, (weight, *one) in enumerate(samples))
    found = choose(Compact(), Experience(samples=held, lane_s_per_byte=store, strain=strain, drag=drag), Conditions(threads, lanes))
    coded = [one for one in held if one.kind in (found.kinds or ())]
    assert found.coded == bool(coded)
    if coded:
        stored = 1 - sum(one.weight * (1 - one.coded) for one in coded)
        parts = stored * store, sum(one.weight * one.code_s_per_byte for one in coded) * strain / threads
        took = max(parts) * drag if drag is not None else min(max(parts) * 1.1, sum(parts))
        assert took <= 0.9 * store / lanes * (1 + 1e-9)


def test_a_pace_is_a_slow_store() -> None:
    """A disk that takes two gigabytes a second, of which no more than fifty megabytes are wanted."""
    fast = seen(0.7, 1 / 1e9, FAST)
    assert not choose(Compact(), fast, Conditions(2)).coded
    assert choose(Compact(), fast, Conditions(2, bytes_per_second=50e6)).coded


GB = 10**9


def spent(stored: int, store_s: float, waited_s: float = 0.0, **coded: tuple[int, float]) -> WriteStats:
    """What a save took, by kind, ``float32_param=(bytes, seconds)``."""
    found = WriteStats()
    found.bytes, found.seconds, found.waited_s = stored, store_s, waited_s
    for kind, (length, seconds) in coded.items():
        found.add_coded(kind.replace("_", " "), length, seconds)
    return found


def after(coding_s: float, took_s: float, waited_s: float = 0.0) -> IncrementalState:
    """A save of a gigabyte, coded to 0.7 of it, to a store of 1 GB/s, which should have taken 0.7 s."""
    smaller = IncrementalState(Compact(reuse=False), seen(0.7, 1 / 1e9, 1 / 1e9))
    assert smaller.choice(Conditions(2)).coded
    smaller.record_cost(spent(700_000_000, 0.7, waited_s, float32_param=(GB, coding_s)), Conditions(2), 1, GB, took_s)
    return smaller


def test_what_coding_was_seen_to_take_counts() -> None:
    """A training that leaves no processor, or a save that took longer than it should for whatever reason: coding gives way, and is tried
    again when that was long ago."""
    assert after(1.0, 0.75).choice(Conditions(2)).coded, "as it should have been"
    assert after(1.0, 3.0, waited_s=2.25).choice(Conditions(2)).coded, "what took so long was the trainer's copying"
    for smaller in (after(4.0, 2.0), after(1.0, 1.1)):
        assert not smaller.choice(Conditions(2)).coded
        for number in range(1, 40):
            smaller.record_cost(spent(GB, 1.0), Conditions(2), 1, GB, 1.1)
            if smaller.choice(Conditions(2)).coded:
                break
        assert 2 < number < 30, number


def test_the_first_save_that_is_coded_is_no_gamble() -> None:
    """What coding and storing take together is not known then: the gain must be more than it may be."""
    samples = (CodecSample("float32 param", 1.0, 0.83, 1 / 4e9),)
    assert not choose(Compact(), Experience(samples=samples, lane_s_per_byte=1 / 1e9), Conditions(2)).coded
    assert choose(Compact(), Experience(samples=samples, lane_s_per_byte=1 / 1e9, drag=1.0), Conditions(2)).coded


def test_where_the_store_takes_nearly_all_of_it_there_is_no_gamble() -> None:
    """Coding one after the other with storing would be a gain, too."""
    samples = (CodecSample("float32 param", 1.0, 0.83, 1 / 1e9),)
    assert choose(Compact(), Experience(samples=samples, lane_s_per_byte=1 / 2e9), Conditions(2, bytes_per_second=100e6)).coded


def test_what_was_mostly_shared_says_nothing_of_the_whole() -> None:
    """A tenth of it was new: most of the time went into looking whether the rest is there."""
    smaller = IncrementalState(Compact(), seen(0.7, 1 / 1e9, 1 / 1e9, drag=1.2))
    smaller.record_cost(spent(70_000_000, 0.07, float32_param=(10**8, 0.2)), Conditions(2), 1, GB, 1.0)
    assert smaller.seen.drag == 1.2 and smaller.seen.strain == pytest.approx(2.0)


def test_a_crowd_is_noticed_before_anything_is_coded() -> None:
    """Hashing that waited for a processor says what coding would wait for; and when it does not any more. A moment says nothing."""
    smaller = IncrementalState(Compact(), seen(0.7, FAST, 1 / 1e9))

    def hashed(own_s: float, took_s: float) -> bool:
        looked = spent(GB, 1.0)
        looked.hashing_s, looked.hashing_own_s = took_s, own_s
        smaller.record_cost(looked, Conditions(2), 1, GB, 1.0)
        return smaller.choice(Conditions(2)).coded

    assert smaller.choice(Conditions(2)).coded
    assert not hashed(0.2, 1.8)
    assert not hashed(1e-4, 1e-4), "it says nothing"
    assert hashed(0.2, 0.2)
    assert not hashed(0.2, 1e9) and smaller.seen.crowd <= 20, "one look counts for so much at most"


def test_strain_is_of_the_kinds_that_were_coded() -> None:
    """What codes slowly is no strain: it is as slow as its sample. What there is no sample of says nothing."""
    smaller = IncrementalState(Compact(), Experience(samples=KINDS, lane_s_per_byte=1 / 1e9))
    smaller.record_cost(spent(GB, 1.0, float32_optim=(600_000_000, 1.0), uint8_header=(GB, 50.0)), Conditions(2), 1, GB, 1.0)
    assert smaller.seen.strain == pytest.approx(1.0)
    coarse = IncrementalState(Compact(), Experience(samples=(CodecSample("float32 param", 1.0, 0.7, 0.0),)))
    coarse.record_cost(spent(GB, 1.0, float32_param=(GB, 1.0)), Conditions(2), 1, GB, 1.0)
    assert coarse.seen.strain == 1.0, "a clock too coarse to time a sample by"


def test_lanes() -> None:
    """One lane was seen to take 1 GB/s, and coding needs one: two that are written at once take less time than coding gains."""
    smaller = IncrementalState(Compact(reuse=False), seen(0.7, 1 / 4e9, 1 / 1e9))
    assert smaller.choice(Conditions(2, lanes=1)).coded and not smaller.choice(Conditions(2, lanes=2)).coded
    smaller.record_cost(spent(GB, 0.5), Conditions(2, lanes=2), 2, GB, 0.6)
    assert smaller.seen.lane_s_per_byte == pytest.approx(1 / 1e9), "two lanes at 2 GB/s"
    shared = IncrementalState(Compact(), seen(0.7, 1 / 4e9, 1 / 1e9, equal=0.5))
    assert shared.choice(Conditions(2, lanes=2)).coded, "what shares with an earlier save writes to one lane anyway"


def test_a_store_that_takes_it_into_memory_first() -> None:
    """A save that coding held up makes it look fast, as it is never waited for: it is believed by a tenth."""
    smaller = IncrementalState(Compact(), seen(0.7, 1 / 4e9, 1 / 1e8))
    smaller.record_cost(spent(700_000_000, 0.01, float32_param=(GB, 0.3)), Conditions(2), 1, GB, 0.3)
    assert smaller.seen.lane_s_per_byte == pytest.approx(0.9 / 1e8)
    smaller.record_cost(spent(GB, 1.0), Conditions(2), 1, GB, 1.0)
    assert smaller.seen.lane_s_per_byte == pytest.approx(1 / 1e9), "one that is stored as it is says what it takes"


@pytest.mark.parametrize(
    "given", [{"reuse": 1}, {"codecs": True}, {"codecs": "zstd"}, {"full_every": 0}, {"full_every": 2.5}, {"full_every": True}]
)
def test_rules_that_make_no_sense(given: dict[str, Any]) -> None:
    """Say what is meant."""
    with pytest.raises(relight.ConfigError, match=next(iter(given))):
        relight.Compact(**given)
