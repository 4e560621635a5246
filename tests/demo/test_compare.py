"""The comparison must be able to fail."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from relight.demo.compare import Finished, compare

SAME = ("d", "d")


def steps(count: int = 20) -> list[Finished]:
    """A run's steps."""
    return [Finished(step, (5.0 / (step + 1)).hex(), f"samples {step}") for step in range(count)]


def one_bit_more(entry: Finished) -> Finished:
    """The same with the last bit of its loss changed."""
    return replace(entry, loss=math.nextafter(float.fromhex(entry.loss), math.inf).hex())


def test_equal_runs_are_equal() -> None:
    """Equal runs have no difference, steps done twice included."""
    killed = [*steps()[:8], *steps()[5:]]
    assert compare(20, steps(), killed, SAME) is None


@pytest.mark.parametrize("at", [0, 7, 19])
def test_one_bit_of_one_loss(at: int) -> None:
    """One bit of one loss is found, and its step named."""
    killed = steps()
    killed[at] = one_bit_more(killed[at])
    difference = compare(20, steps(), killed, SAME)
    assert difference is not None
    assert (difference.step, difference.what) == (at, "losses")
    assert difference.straight != difference.killed
    assert f"step {at}" in str(difference)


def test_the_first_difference_is_named() -> None:
    """The difference at the lowest step is reported, wherever it is in the journal."""
    killed = [one_bit_more(entry) if entry.step in (4, 9) else entry for entry in steps()]
    difference = compare(20, steps(), list(reversed(killed)), SAME)
    assert difference is not None
    assert difference.step == 4


@pytest.mark.parametrize("which", [6, 7], ids=["first time", "second time"])
def test_a_step_done_twice_counts_twice(which: int) -> None:
    """A step that was lost and done again must have been right both times."""
    killed = [*steps()[:7], *steps()[6:]]
    killed[which] = one_bit_more(killed[which])
    assert compare(20, steps(), killed, SAME) is not None


def test_other_samples_with_the_same_loss() -> None:
    """Other samples are a difference even if the loss happens to be equal."""
    killed = steps()
    killed[3] = replace(killed[3], samples="others")
    difference = compare(20, steps(), killed, SAME)
    assert difference is not None
    assert (difference.step, difference.what) == (3, "samples")


def test_a_step_never_done() -> None:
    """A hole in either run is a difference."""
    holed = [entry for entry in steps() if entry.step != 11]
    for straight, killed in ((steps(), holed), (holed, steps())):
        difference = compare(20, straight, killed, SAME)
        assert difference is not None
        assert difference.step == 11


@pytest.mark.parametrize("digests", [("a", "b"), ("a", None), (None, None)])
def test_other_parameters_at_the_end(digests: tuple[str | None, str | None]) -> None:
    """Equal losses are not enough: parameters and optimizer must be equal, and known."""
    difference = compare(20, steps(), steps(), digests)
    assert difference is not None
    assert difference.step is None


def test_not_a_number_equals_itself() -> None:
    """A loss that is not a number is compared as what is written, so two of them are equal."""
    diverged = [replace(entry, loss=math.nan.hex() if entry.step > 5 else entry.loss) for entry in steps()]
    assert compare(20, diverged, diverged, SAME) is None
    assert compare(20, steps(), diverged, SAME) is not None
