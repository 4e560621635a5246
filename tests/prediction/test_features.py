"""Signals and features: the same at once and second by second, and what they are by hand."""

from __future__ import annotations

import math

import made
import numpy as np
import pytest

from relight.prediction.features import FEATURES, WINDOW_INTERVAL_S, FeatureWindows, Scale, column, features_of
from relight.prediction.signals import AT, SIGNALS, WORDS, SignalHistory


def rows_of(samples) -> np.ndarray:
    """Return the samples' rows."""
    return np.array([made.SHAPE.row(sample) for sample in samples], np.float32)


def wild(count: int, seed: int) -> np.ndarray:
    """Return random rows with missing values, and with columns that begin late or never."""
    rng = np.random.default_rng(seed)
    rows = rng.lognormal(size=(count, len(made.SHAPE.columns))) * rng.choice([1, 1e-3, 1e9], len(made.SHAPE.columns))
    rows[rng.random(rows.shape) < 0.3] = np.nan
    rows[: count // 2, 20], rows[:, 22] = np.nan, np.nan
    return rows


@pytest.mark.parametrize("seed", range(3))
def test_at_once_and_second_by_second_are_the_same(seed: int) -> None:
    """Signals are equal to the bit, features to a millionth of the spread, so learned models hold for live samples."""
    rows = wild(1500, seed)
    at_once, one_by_one, windows, values = (
        SignalHistory(made.SHAPE.columns).signals(rows),
        SignalHistory(made.SHAPE.columns),
        FeatureWindows(),
        [],
    )
    for second, row in enumerate(rows):
        signals = one_by_one.signals(row[None])[0]
        np.testing.assert_array_equal(signals, at_once[second])
        windows.add(signals)
        if second % WINDOW_INTERVAL_S == WINDOW_INTERVAL_S - 1:
            values.append(windows.window(0.0).values)
    result = features_of(at_once)
    assert result.shape == (1500 // WINDOW_INTERVAL_S, len(FEATURES))
    scale = np.nanmax(np.abs(result), axis=0, initial=1e-6, where=np.isfinite(result))
    np.testing.assert_allclose(np.array(values) / scale, result / scale, atol=1e-6)


def test_features_of_a_straight_line_are_its_own() -> None:
    """Features are mean, spread, slope a second and last value. With too few samples they are those of all there
    are."""
    signals = np.full((400, len(SIGNALS)), np.nan)
    signals[:, AT["cpu"]] = 3 - 0.001 * np.arange(400)
    last = features_of(signals)[-1]
    assert last[column("cpu", "last")] == pytest.approx(3 - 0.399)
    assert last[column("cpu", "mean300")] == pytest.approx(3 - 0.001 * 249.5)
    assert last[column("cpu", "spread30")] == pytest.approx(0.001 * math.sqrt((900 - 1) / 12))
    assert last[column("cpu", "slope300")] == pytest.approx(-0.001) and last[column("cpu", "slope30")] == pytest.approx(
        -0.001
    )
    assert features_of(signals)[1][column("cpu", "slope300")] == pytest.approx(-0.001)
    assert math.isnan(last[column("ecc", "mean30")])


def test_signals_are_shares_rates_and_ratios_to_the_usual() -> None:
    """A step twice as long is log 2, whatever a step takes. One of two silent accelerators is 0.5."""
    for step_s in (0.1, 30.0):
        samples = [
            made.sample(
                1e9 + second,
                step_s=step_s * (2 if second >= 900 else 1),
                ecc=max(0, second - 950),
                silent=second > 990,
                disk=0.2,
            )
            for second in range(1000)
        ]
        signals = SignalHistory(made.SHAPE.columns).signals(rows_of(samples))
        assert signals[899, AT["step"]] == pytest.approx(0, abs=1e-6) and signals[905, AT["step"]] == pytest.approx(
            math.log(2), rel=1e-6
        )
        assert math.isnan(signals[200, AT["step"]]), "nothing is usual in the first five minutes"
        assert signals[960, AT["ecc"]] == pytest.approx(math.log(2)) and signals[940, AT["ecc"]] == 0
        assert (signals[980, AT["silent"]], signals[995, AT["silent"]]) == (0, 0.5)
        assert signals[5, AT["disk_free"]] == pytest.approx(0.2) and signals[5, AT["memory_free"]] == pytest.approx(0.5)


def test_a_control_groups_room_counts_where_it_is_less() -> None:
    """A node's free memory is of no use to a job that has reached its own limit."""
    sample = made.sample(1.0)
    sample = sample._replace(host=sample.host._replace(group_used_bytes=9.0, group_limit_bytes=10.0))
    assert SignalHistory(made.SHAPE.columns).signals(rows_of([sample]))[0, 0] == pytest.approx(0.1)


def test_a_scale_bounds_what_is_far_and_takes_the_unknown_for_usual() -> None:
    """No value, however wild, is more than eight spreads away."""
    scale = Scale.from_rows(np.array([[1.0, 5.0], [3.0, 5.0], [np.nan, 5.0]]))
    np.testing.assert_allclose(scale(np.array([4.0, np.nan])), [2, 0])
    np.testing.assert_allclose(scale(np.array([1e30, -1e30])), [8, -8])


def test_every_signal_has_words_and_features_have_names() -> None:
    """No name is left over on either side."""
    assert WORDS.keys() == set(SIGNALS) and len(set(FEATURES)) == len(FEATURES) == 7 * len(SIGNALS)
    assert FEATURES[column("save", "slope300")] == "save.slope300"
