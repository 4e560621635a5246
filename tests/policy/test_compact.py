"""What a save leaves out, and whether coding the rest pays. Both are decided from measurements and reported."""

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
    """Return what was measured, with a sample of one kind."""
    samples = (CodecSample("float32 param", 1.0, coded, code_s),) if coded is not None else None
    return Experience(samples=samples, lane_s_per_byte=store_s, **{"drag": 1.0, **more})


@pytest.mark.parametrize(
    ("rules", "seen", "reuse", "coded", "reason"),
    [
        (Compact(), seen(), False, False, "nothing to compare"),
        (Compact(), seen(equal=0.0), False, False, "0 % of the last two"),
        (Compact(), seen(alike=0.0, equal=0.0), False, False, "0 % of it may be"),
        (Compact(), seen(alike=0.5), True, False, "50 % of it may be"),
        (Compact(), seen(alike=0.5, equal=0.0), True, False, "50 % of it may be"),
        (Compact(), seen(equal=0.99), True, False, "99 %"),
        (Compact(reuse=False), seen(equal=0.99), False, False, "reuse is off"),
        (Compact(full_every=3), seen(equal=0.99, since_full=2), True, False, "99 %"),
        (Compact(full_every=3), seen(equal=0.99, since_full=3), False, False, "every 3 saves"),
        (Compact(codecs="never"), seen(0.5, FAST, SLOW), False, False, "codecs are off"),
        (Compact(codecs="always"), seen(), False, True, "codecs are on"),
        (Compact(codecs="always"), seen(0.99), False, False, "takes 99 % of its raw bytes"),
        (Compact(), seen(0.7, FAST, SLOW), False, True, "takes 70 % of its raw bytes, 71.4 MB/s; the store takes raw bytes at 50 MB/s"),
        (Compact(), seen(0.7, SLOW, FAST), False, False, "too long: with float32 param coded, a sample takes 70 % of its raw bytes, 100 MB/s; the store takes raw bytes at 2 GB/s"),
        (Compact(), seen(0.7, FAST, 1 / 500e6, strain=20.0), False, False, "70 % of its raw bytes, 200 MB/s"),
        (Compact(), seen(0.7, FAST, 1 / 500e6, crowd=20.0), False, False, "70 % of its raw bytes, 200 MB/s"),
        (Compact(), seen(0.7, FAST, SLOW, drag=2.0), False, False, "70 % of its raw bytes, 35.7 MB/s"),
        (Compact(), seen(0.95, FAST, SLOW), False, False, "95 %"),
        (Compact(), seen(1.0, FAST, SLOW), False, False, "100 %"),
        (Compact(), Experience(samples=(), lane_s_per_byte=SLOW), False, False, "nothing to code"),
    ],
)  # fmt: skip
def test_choices(rules: Compact, seen: Experience, reuse: bool, coded: bool, reason: str) -> None:
    """Check each choice and its reason."""
    choice = choose(rules, seen, Conditions(2))
    assert (choice.reuse, choice.coded) == (reuse, coded)
    assert reason in choice.reason


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
    """Code kinds with a high gain per second of coding for a faster store too. Noise is never coded."""
    choice = choose(Compact(), Experience(samples=KINDS, lane_s_per_byte=1 / store, drag=1.0), Conditions(2))
    assert set(choice.kinds or ()) == kinds, choice.reason
    assert choice.coded == bool(kinds)


@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1.1), st.floats(1e-11, 1e-6)), max_size=6), st.floats(1e-11, 1e-6),
    st.integers(1, 8), st.integers(1, 4), st.floats(1, 20), st.none() | st.floats(1, 20),
)  # fmt: skip
def test_it_is_never_slower(
    samples: list[tuple[float, float, float]], store: float, threads: int, lanes: int, strain: float, drag: float | None
) -> None:
    """Whatever is chosen, storing everything uncoded would take at least a tenth longer by the measurements."""
    whole = sum(weight for weight, _, _ in samples)
    kinds = tuple(
        CodecSample(f"kind {number}", weight / whole, *figures) for number, (weight, *figures) in enumerate(samples)
    )
    choice = choose(
        Compact(),
        Experience(samples=kinds, lane_s_per_byte=store, strain=strain, drag=drag),
        Conditions(threads, lanes),
    )
    coded = [sample for sample in kinds if sample.kind in (choice.kinds or ())]
    assert choice.coded == bool(coded)
    if coded:
        stored = 1 - sum(sample.weight * (1 - sample.coded) for sample in coded)
        parts = stored * store, sum(sample.weight * sample.code_s_per_byte for sample in coded) * strain / threads
        took = max(parts) * drag if drag is not None else min(max(parts) * 1.1, sum(parts))
        assert took <= 0.9 * store / lanes * (1 + 1e-9)


def test_a_pace_is_a_slow_store() -> None:
    """Treat a bandwidth limit of 50 MB/s on a disk of 2 GB/s as a slow store."""
    fast = seen(0.7, 1 / 1e9, FAST)
    assert not choose(Compact(), fast, Conditions(2)).coded
    assert choose(Compact(), fast, Conditions(2, bytes_per_second=50e6)).coded


GB = 10**9


def spent(stored: int, store_s: float, waited_s: float = 0.0, **coded: tuple[int, float]) -> WriteStats:
    """Return the cost of a save, by kind: ``float32_param=(bytes, seconds)``."""
    stats = WriteStats()
    stats.bytes, stats.seconds, stats.waited_s = stored, store_s, waited_s
    for kind, (length, seconds) in coded.items():
        stats.add_coded(kind.replace("_", " "), length, seconds)
    return stats


def after(coding_s: float, took_s: float, waited_s: float = 0.0) -> IncrementalState:
    """Record a save of 1 GB that was coded to 70% for a store of 1 GB/s, so that 0.7 s were expected."""
    smaller = IncrementalState(Compact(reuse=False), seen(0.7, 1 / 1e9, 1 / 1e9))
    assert smaller.choice(Conditions(2)).coded
    smaller.record_cost(spent(700_000_000, 0.7, waited_s, float32_param=(GB, coding_s)), Conditions(2), 1, GB, took_s)
    return smaller


def test_what_coding_was_seen_to_take_counts() -> None:
    """Stop coding when training leaves no processor for it, or when a save takes longer than expected for any reason.
    Try again after many saves."""
    assert after(1.0, 0.75).choice(Conditions(2)).coded, "as expected"
    assert after(1.0, 3.0, waited_s=2.25).choice(Conditions(2)).coded, "the time went into the trainer's copying"
    for smaller in (after(4.0, 2.0), after(1.0, 1.1)):
        assert not smaller.choice(Conditions(2)).coded
        for number in range(1, 40):
            smaller.record_cost(spent(GB, 1.0), Conditions(2), 1, GB, 1.1)
            if smaller.choice(Conditions(2)).coded:
                break
        assert 2 < number < 30, number


def test_the_first_save_that_is_coded_is_no_gamble() -> None:
    """Before the first coded save the overlap of coding and storing is unknown. Code only if the gain exceeds that
    uncertainty."""
    samples = (CodecSample("float32 param", 1.0, 0.83, 1 / 4e9),)
    assert not choose(Compact(), Experience(samples=samples, lane_s_per_byte=1 / 1e9), Conditions(2)).coded
    assert choose(Compact(), Experience(samples=samples, lane_s_per_byte=1 / 1e9, drag=1.0), Conditions(2)).coded


def test_where_the_store_takes_nearly_all_of_it_there_is_no_gamble() -> None:
    """Code if even coding and storing in sequence would be faster."""
    samples = (CodecSample("float32 param", 1.0, 0.83, 1 / 1e9),)
    assert choose(
        Compact(), Experience(samples=samples, lane_s_per_byte=1 / 2e9), Conditions(2, bytes_per_second=100e6)
    ).coded


def test_a_mostly_shared_save_does_not_count_for_the_whole() -> None:
    """Ignore the total time of a save with only a tenth of new bytes. It spent most of the time on comparing chunks."""
    smaller = IncrementalState(Compact(), seen(0.7, 1 / 1e9, 1 / 1e9, drag=1.2))
    smaller.record_cost(spent(70_000_000, 0.07, float32_param=(10**8, 0.2)), Conditions(2), 1, GB, 1.0)
    assert smaller.seen.drag == 1.2 and smaller.seen.strain == pytest.approx(2.0)


def test_a_crowd_is_noticed_before_anything_is_coded() -> None:
    """Derive CPU contention for coding from hashing that waited for a processor, and notice its end. A very short
    measurement counts for nothing."""
    smaller = IncrementalState(Compact(), seen(0.7, FAST, 1 / 1e9))

    def hashed(own_s: float, took_s: float) -> bool:
        measured = spent(GB, 1.0)
        measured.hashing_s, measured.hashing_own_s = took_s, own_s
        smaller.record_cost(measured, Conditions(2), 1, GB, 1.0)
        return smaller.choice(Conditions(2)).coded

    assert smaller.choice(Conditions(2)).coded
    assert not hashed(0.2, 1.8)
    assert not hashed(1e-4, 1e-4), "too short to count"
    assert hashed(0.2, 0.2)
    assert not hashed(0.2, 1e9) and smaller.seen.crowd <= 20, "one measurement counts for a limited amount"


def test_strain_is_of_the_kinds_that_were_coded() -> None:
    """Do not count a slow codec as strain: its sample is as slow. Ignore kinds without a sample."""
    smaller = IncrementalState(Compact(), Experience(samples=KINDS, lane_s_per_byte=1 / 1e9))
    smaller.record_cost(
        spent(GB, 1.0, float32_optim=(600_000_000, 1.0), uint8_header=(GB, 50.0)), Conditions(2), 1, GB, 1.0
    )
    assert smaller.seen.strain == pytest.approx(1.0)
    coarse = IncrementalState(Compact(), Experience(samples=(CodecSample("float32 param", 1.0, 0.7, 0.0),)))
    coarse.record_cost(spent(GB, 1.0, float32_param=(GB, 1.0)), Conditions(2), 1, GB, 1.0)
    assert coarse.seen.strain == 1.0, "a clock too coarse to time a sample by"


def test_lanes() -> None:
    """With one lane at 1 GB/s coding pays. Two lanes written at once take less time than coding gains."""
    smaller = IncrementalState(Compact(reuse=False), seen(0.7, 1 / 4e9, 1 / 1e9))
    assert smaller.choice(Conditions(2, lanes=1)).coded and not smaller.choice(Conditions(2, lanes=2)).coded
    smaller.record_cost(spent(GB, 0.5), Conditions(2, lanes=2), 2, GB, 0.6)
    assert smaller.seen.lane_s_per_byte == pytest.approx(1 / 1e9), "two lanes at 2 GB/s"
    shared = IncrementalState(Compact(), seen(0.7, 1 / 4e9, 1 / 1e9, equal=0.5))
    assert shared.choice(Conditions(2, lanes=2)).coded, (
        "a save that shares chunks with an earlier one writes to one lane anyway"
    )


def test_a_store_that_takes_it_into_memory_first() -> None:
    """Lower the estimated time of a store by at most a tenth after a save that coding held up. A store with a write
    buffer seems faster than it is."""
    smaller = IncrementalState(Compact(), seen(0.7, 1 / 4e9, 1 / 1e8))
    smaller.record_cost(spent(700_000_000, 0.01, float32_param=(GB, 0.3)), Conditions(2), 1, GB, 0.3)
    assert smaller.seen.lane_s_per_byte == pytest.approx(0.9 / 1e8)
    smaller.record_cost(spent(GB, 1.0), Conditions(2), 1, GB, 1.0)
    assert smaller.seen.lane_s_per_byte == pytest.approx(1 / 1e9), "an uncoded save measures the store"


@pytest.mark.parametrize(
    "given",
    [{"reuse": 1}, {"codecs": True}, {"codecs": "zstd"}, {"full_every": 0}, {"full_every": 2.5}, {"full_every": True}],
)
def test_rules_that_make_no_sense(given: dict[str, Any]) -> None:
    """Raise ConfigError with the setting's name."""
    with pytest.raises(relight.ConfigError, match=next(iter(given))):
        relight.Compact(**given)
