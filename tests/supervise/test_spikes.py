"""Losses that jump."""

from __future__ import annotations

import math
import random

import pytest

from relight.errors import ConfigError
from relight.policy.spikes import Spikes, spikes_of


def falling(rng: random.Random, step: int) -> float:
    """Return a realistic loss: falling, noisy, now and then a bad batch."""
    return 2 + 8 / (1 + step / 50) + rng.gauss(0, 0.1) + (rng.expovariate(2) if rng.random() < 0.02 else 0)


@pytest.mark.parametrize("seed", range(20))
def test_an_ordinary_run_has_none(seed: int) -> None:
    """Ten thousand steps of an ordinary loss have no spike."""
    rng, spikes = random.Random(seed), Spikes()
    assert not any(spikes.update(step, falling(rng, step)) for step in range(10_000))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_a_spike_at_once(value: float) -> None:
    """This is true even of the first loss."""
    spike = Spikes().update(7, value)
    assert spike is not None and spike.onset == 7 and "step 7" in spike.why
    assert Spikes(0).update(7, value) is not None


@pytest.mark.parametrize("seed", range(20))
def test_one_that_stays_is_found_and_its_onset_named(seed: int) -> None:
    """The spike is reported five steps after its onset. A jump that passes is none."""
    rng, spikes = random.Random(seed), Spikes()
    for step in range(500):
        assert spikes.update(step, falling(rng, step)) is None
    for step in range(500, 503):
        assert spikes.update(step, 20.0) is None
    assert spikes.update(503, falling(rng, 503)) is None
    results = [spikes.update(step, 12 + rng.gauss(0, 1)) for step in range(504, 510)]
    first = next(result for result in results if result is not None)
    assert first.onset == 504 and results.index(first) == 4


def test_a_nan_after_a_jump_has_the_jump_s_onset() -> None:
    """The onset of the NaN is the jump's step."""
    spikes = Spikes()
    for step in range(200):
        spikes.update(step, 2 + 0.01 * (step % 7))
    assert spikes.update(200, 50.0) is None and spikes.update(201, 500.0) is None
    result = spikes.update(202, math.nan)
    assert result is not None and result.onset == 200


def test_a_setting_has_the_threshold() -> None:
    """0 switches detection off. Invalid values are refused."""
    spikes = spikes_of("0")
    assert not any(spikes.update(step, 1.0 if step < 300 else 1e9) for step in range(400))
    assert spikes_of("")._sigmas == 10
    for wrong in ("high", "-1", "nan", "1e9"):
        with pytest.raises(ConfigError):
            spikes_of(wrong)
