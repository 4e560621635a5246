"""The plan: what fits is measured with, what does not is refused with numbers. The figures: medians, and ratios of one round."""

from __future__ import annotations

import pytest

from relight.bench.figures import floor_figures, medians, noise, our_figures, thread_counts, useful
from relight.bench.plan import BenchSpace, disk_needed, memory_needed, plan_bench, spread, state_size
from relight.errors import ConfigError, NoSpace

GB = 10**9
MB = 10**6


def test_a_size_that_was_asked_for_is_taken_or_refused_never_changed() -> None:
    """A given size is accepted with just enough space, and refused with a few bytes less."""
    for torch in (True, False):
        enough = BenchSpace(disk_needed(GB), memory_needed(GB, torch=torch), torch=torch)
        assert plan_bench(enough, GB, 5).size == GB
    with pytest.raises(NoSpace, match=r"1 GB needs 2\.06 GB on the disk; 2\.06 GB are free"):
        plan_bench(BenchSpace(disk_needed(GB) - 2, None), GB, 5)
    with pytest.raises(NoSpace, match=r"needs 4\.02 GB of memory .*; 4\.02 GB are available"):
        plan_bench(BenchSpace(None, memory_needed(GB, torch=True) - 4), GB, 5)


@pytest.mark.parametrize(
    "room",
    [
        BenchSpace(GB, 8 * GB),
        BenchSpace(64 * GB, 2 * GB),
        BenchSpace(200 * MB, 700 * MB),
        BenchSpace(GB, 2 * GB, torch=False),
    ],
)
def test_the_size_that_a_refusal_names_fits(room: BenchSpace) -> None:
    """The size in the hint of a refusal is accepted."""
    with pytest.raises(NoSpace) as refused:
        plan_bench(room, 100 * GB, 5)
    hint = refused.value.hint
    assert hint.endswith(" fits")
    size = state_size(hint.split()[1])
    assert plan_bench(room, size, 5).size == size


def test_an_assumed_size_fits_the_memory_the_disk_and_the_time() -> None:
    """The assumed size is at most 500 MB. It is smaller on a slow or full disk, and with little memory."""
    assert plan_bench(BenchSpace(None, None, write_bps=3e9), None, 5).size == 500 * MB
    assert 16 * MB <= plan_bench(BenchSpace(None, None, write_bps=50e6), None, 5).size <= 50 * MB
    assert (
        plan_bench(BenchSpace(None, None, write_bps=50e6), None, 10).size
        < plan_bench(BenchSpace(None, None, write_bps=50e6), None, 2).size
    )
    assert disk_needed(plan_bench(BenchSpace(300 * MB, None), None, 5).size) <= 300 * MB
    assert memory_needed(plan_bench(BenchSpace(None, GB), None, 5).size, torch=True) <= GB


@pytest.mark.parametrize("room", [BenchSpace(10 * MB, None), BenchSpace(None, 100 * MB), BenchSpace(0, 0)])
def test_too_little_space_is_refused_without_a_size_too(room: BenchSpace) -> None:
    """The error has the needed and available bytes, and a hint."""
    with pytest.raises(NoSpace, match=r"needs \d.* (MB|GB)") as refused:
        plan_bench(room, None, 5)
    assert refused.value.hint


@pytest.mark.parametrize("text", ["", "1.2.3MB", "MB", "-5MB", "5 XB", "5M B"])
def test_an_invalid_size_is_refused(text: str) -> None:
    """An invalid size raises ``ConfigError``."""
    with pytest.raises(ConfigError, match="is not a size"):
        state_size(text)


def test_sizes_have_decimal_and_binary_units() -> None:
    """Units are decimal, or binary with an i."""
    assert [state_size(text) for text in ("256MB", "256mb", "1G", "1.5 GiB", "4096", "2kB")] == [
        256 * MB,
        256 * MB,
        GB,
        3 << 29,
        4096,
        2000,
    ]


def test_too_small_a_state_is_refused() -> None:
    """A few kB would measure fsync alone."""
    with pytest.raises(ConfigError, match="too small to measure"):
        plan_bench(BenchSpace(None, None), 1000, 5)


@pytest.mark.parametrize(("size", "tensors"), [(MB, None), (500 * MB, None), (12 * MB, 3), (12 * MB, 1000), (MB, 1)])
def test_the_bytes_are_spread_as_asked(size: int, tensors: int | None) -> None:
    """Parameters and both moments together take the size, within a twentieth."""
    elements = spread(size, tensors)
    assert abs(12 * sum(elements) - size) <= size / 20
    assert min(elements) >= 1
    if tensors is not None:
        assert len(elements) == -(-tensors // 3)


def test_ratios_compare_one_round() -> None:
    """A machine that was half as fast in one round changes the seconds, not the ratio."""
    rounds = [
        {"write_direct": 1.0, "save_waiting": 1.5},
        {"write_direct": 2.0, "save_waiting": 3.0},
        {"write_direct": 1.0, "save_waiting": 1.5},
    ]
    (ours,) = our_figures(rounds, GB, "write_direct")
    assert (ours.seconds, ours.ratio, ours.floor) == (1.5, 1.5, ("write_direct",))
    (floor,) = floor_figures(rounds, GB, {})
    assert (floor.seconds, floor.bytes_per_second) == (1.0, 1e9)
    assert medians(rounds) == {"write_direct": 1.0, "save_waiting": 1.5}
    assert len(noise([floor])) == 1 and "1 s to 2 s" in noise([floor])[0]


def test_two_floors_are_added() -> None:
    """A warm restore reads from the cache, and hashes."""
    (ours,) = our_figures([{"restore_warm": 3.0, "read_cached": 0.5, "hash": 1.0}], GB, "write_direct")
    assert ours.ratio == 2.0


def test_useful_threads_are_the_fewest_that_are_nearly_best() -> None:
    """Five percent is not worth twice the cores."""
    assert useful({1: 1.0, 2: 0.52, 4: 0.5}) == 2
    assert useful({1: 1.0, 2: 0.52, 4: 0.4}) == 4
    assert thread_counts(1) == [1]
    assert thread_counts(8) == [1, 2, 4, 8]
