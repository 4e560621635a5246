"""Detectors: what they detect, and equal results for a whole run and single windows, torch and numpy, before and after
storing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import made
import numpy as np
import pytest

from relight.errors import ConfigError, CorruptCheckpoint, IncompatibleState
from relight.format.strict import seal, sealed_payload
from relight.prediction.act import ACTIONS, action_for
from relight.prediction.detect import KIND_OF, RULES, DetectionRules
from relight.prediction.features import WINDOW_INTERVAL_S, FeatureWindow, features_of
from relight.prediction.history import runs_of
from relight.prediction.learn import PRECISION, LearningPlan, evaluate, train, trusted, unseen
from relight.prediction.lstm import CLASSES, INPUTS, STEPS, Lstm, inputs_of, windows_of
from relight.prediction.model import DETECTORS, DetectorModel, Worth, age_s, read_model, without_model
from relight.prediction.score import AlarmCosts
from relight.prediction.signals import SIGNALS, SignalHistory
from relight.prediction.simulate import simulate
from relight.units import parse_duration

PAGE = Path(__file__).parents[2] / "docs" / "prediction.md"


def windows_from(samples: Iterable) -> np.ndarray:
    """Return the features of a node's samples, one a second."""
    rows = np.array([made.SHAPE.row(sample) for sample in samples], np.float32)
    return features_of(SignalHistory(made.SHAPE.columns).signals(rows))


def risk_of(samples: Iterable):
    """Return the risk by the rules after the last sample."""
    return DetectionRules().update(FeatureWindow(0.0, windows_from(samples)[-1]))


def test_a_calm_node_is_at_no_risk_and_a_leak_is_one_in_time() -> None:
    """A leak has an alarming score some minutes before the memory is used up. The reason has the time."""
    assert risk_of(made.sample(second) for second in range(900)).score < 0.1
    risk = risk_of(made.leak(1500, 600, 1740))
    assert risk.kind == "memory" and risk.score > 0.5
    left = re.search(r"it is full in (\d[\w. ]*)", risk.why)
    assert left and abs((parse_duration(left[1]) or 0) - 240) < 10


@pytest.mark.parametrize(
    ("kind", "changed", "words"),
    [
        ("disk", lambda t: {"disk": 0.5 - 0.0005 * max(0, t - 100)}, "of the disk are left"),
        ("heat", lambda t: {"celsius": 60 + min(30, max(0, t - 600)), "mhz": 1755 if t < 640 else 1200}, "of its usual clock"),
        ("ecc", lambda t: {"ecc": max(0, t - 700)}, "corrected memory errors a minute"),
        ("silent", lambda t: {"silent": t > 850}, "no longer answers"),
        ("memory", lambda t: {"psi": 60.0 if t > 850 else 0.0}, "waited for memory 60 %"),
        ("link", lambda t: {"step_s": 1 + max(0, t - 700) / 50}, "times the usual"),
    ],
)  # fmt: skip
def test_each_rule_sees_its_sign(kind: str, changed, words: str) -> None:
    """Each rule detects its sign, and its reason has the numbers."""
    risk = risk_of(made.sample(float(second), **changed(second)) for second in range(900))
    assert risk.kind == kind and risk.score > 0.5 and words in risk.why, risk


def test_caches_that_level_off_and_checkpoints_that_come_and_go_are_no_risk() -> None:
    """A decline is a risk only if it continues; a saw-tooth curve is none."""
    cache = windows_from(made.sample(float(t), free=0.1 + 0.6 * np.exp(-t / 400)) for t in range(1800))[60:]
    teeth = windows_from(made.sample(float(t), disk=0.2 - 0.15 * (t % 60) / 60) for t in range(1200))[60:]
    assert DetectionRules().follow(cache).max() < 0.5 and DetectionRules().follow(teeth).max() < 0.5


@pytest.mark.parametrize("name", DETECTORS)
def test_at_once_and_one_by_one_are_the_same(learned: DetectorModel, name: str) -> None:
    """Scores of a whole run equal those of single windows, so the evaluation measures the real behaviour."""
    windows = runs_of(simulate(9, 1), "x")[0].features[:150]
    one_by_one = learned.detectors[name].fresh()
    risks = [one_by_one.update(FeatureWindow(0.0, row)) for row in windows]
    np.testing.assert_allclose([risk.score for risk in risks], learned.detectors[name].follow(windows), atol=1e-5)
    assert all(risk.kind in ACTIONS and 0 <= risk.score <= 1 for risk in risks)


def test_the_network_is_the_same_in_numpy_and_in_torch() -> None:
    """The network's weights give equal results in numpy and torch."""
    import torch

    from relight.prediction.features import FEATURES, Scale
    from relight.prediction.lstm_train import Network

    network = Network(24).eval()
    lstm = Lstm(Scale(np.zeros(len(FEATURES)), np.ones(len(FEATURES))), network.arrays())
    windows = np.random.default_rng(0).normal(size=(20, STEPS, INPUTS)).astype(np.float32)
    with torch.no_grad():
        expected = torch.softmax(network(torch.from_numpy(windows)), dim=1).numpy()
    np.testing.assert_allclose(lstm.chances(windows), expected, atol=1e-5)
    assert lstm.parameters <= 50_000 and expected.shape == (20, len(CLASSES))


def test_the_forest_is_the_same_as_scikit_learns() -> None:
    """The forest gives scikit-learn's scores without that library."""
    from sklearn.ensemble import IsolationForest

    from relight.prediction.features import FEATURES, Scale
    from relight.prediction.forest import _OF_EACH, _TREES, _USED, grow

    rows = np.random.default_rng(0).normal(size=(700, len(FEATURES))).astype(np.float32)
    scale = Scale.from_rows(rows)
    theirs = IsolationForest(n_estimators=_TREES, max_samples=_OF_EACH, random_state=5).fit(scale(rows)[:, _USED])
    np.testing.assert_allclose(
        grow(rows, scale, 5).follow(rows[:50]), -theirs.score_samples(scale(rows[:50])[:, _USED]), atol=1e-6
    )


def test_training_is_the_same_again_and_a_file_keeps_it(learned: DetectorModel, tmp_path: Path) -> None:
    """A seed determines the model, and a stored model gives the same scores."""
    again = train(LearningPlan(runs=5, seed=2, epochs=2, size=8), lambda text: None)[0]
    learned.write(tmp_path / "a.model")
    read = read_model(tmp_path / "a.model")
    windows = runs_of(simulate(9, 2), "x")[0].features[:100]
    for name in DETECTORS:
        expected = learned.detectors[name].follow(windows)
        np.testing.assert_array_equal(again.detectors[name].follow(windows), expected)
        np.testing.assert_array_equal(read.detectors[name].follow(windows), expected)
        assert repr(read.worth[name]) == repr(learned.worth[name]) == repr(again.worth[name])
    assert read.metadata["seed"] == 2 and age_s(tmp_path / "a.model") < 60 and age_s(tmp_path / "none") == float("inf")


def test_a_damaged_model_is_refused(learned: DetectorModel, tmp_path: Path) -> None:
    """A model with a changed byte, a missing entry or other features is refused."""
    path = tmp_path / "a.model"
    learned.write(path)
    whole = path.read_bytes()
    for offset in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        with pytest.raises(CorruptCheckpoint):
            read_model(path)
    payload = sealed_payload(whole, "it", len(whole))
    for what, by in (
        (b'"threshold"', b'"Threshold"'), (b'"worth":{', b'"worth":{"tea":{},'), (b'"lstm":{', b'"lstn":{'), (b'"forest.usual"', b'"forest.Usual"'),
        (b'"lstm.attend"', b'"lstm.Attend"'), (b'"made_at":', b'"made_at":"x","m":'),
    ):  # fmt: skip
        assert what in payload
        path.write_bytes(seal(payload.replace(what, by)))
        with pytest.raises(CorruptCheckpoint):
            read_model(path)
    path.write_bytes(seal(payload.replace(b"memory_free.last", b"memory_gone.last")))
    with pytest.raises(IncompatibleState):
        read_model(path)


def test_evaluation_takes_the_trusted_together(learned: DetectorModel) -> None:
    """The rules are always trusted, other detectors by their held-out precision."""
    model = DetectorModel(
        learned.detectors,
        {name: Worth(0.5, precision) for name, precision in zip(DETECTORS, (0.1, 0.6, float("nan")))},
    )
    assert trusted(model, PRECISION) == ["rules", "forest"]
    result = evaluate(without_model(), unseen(3, 6, lambda text: None), PRECISION, AlarmCosts())
    assert [row.detector for row in result] == ["rules", "together"]
    assert (result[0].alarms, result[0].failures, result[0].days) == (
        result[1].alarms,
        result[1].failures,
        result[1].days,
    )


def test_a_missing_library_is_reported_with_how_to_install_it() -> None:
    """Without a detector's library the error has the pip command. The rules need no library."""
    script = """
import sys
sys.modules[sys.argv[1]] = None
from relight.errors import ConfigError
from relight.prediction.learn import LearningPlan, train
train(LearningPlan(runs=5, detectors=("rules",)), lambda text: None)
assert "torch" not in sys.modules or sys.modules["torch"] is None
try:
    train(LearningPlan(runs=5, detectors=(sys.argv[2],)), lambda text: None)
except ConfigError as error:
    print(error)
"""
    for module, detector in (("sklearn", "forest"), ("torch", "lstm")):
        done = subprocess.run(
            [sys.executable, "-c", script, module, detector], capture_output=True, text=True, check=True
        )
        assert f"{module}" in done.stdout and "pip install 'relight[predict]'" in done.stdout, done.stdout
    with pytest.raises(ConfigError, match="crystal ball"):
        LearningPlan(detectors=("crystal ball",))


def test_windows_reach_back_eight_minutes_and_begin_with_the_usual(learned: DetectorModel) -> None:
    """Windows that begin before the run are filled with usual values."""
    inputs = np.arange(1, 101, dtype=np.float32)[:, None].repeat(INPUTS, axis=1)
    windows = windows_of(inputs)
    assert windows.shape == (100, STEPS, INPUTS) and STEPS * 3 * WINDOW_INTERVAL_S == 480
    assert windows[0, -1, 0] == 1 and windows[0, -2, 0] == 0 and list(windows[99, -3:, 0]) == [94, 97, 100]
    made_windows = windows_from(made.sample(float(t)) for t in range(10))
    assert inputs_of(made_windows, learned.detectors["lstm"].scale).shape == (2, INPUTS)  # type: ignore[attr-defined]


def table(heading: str) -> list[list[str]]:
    """Return the rows of the table below a heading of the page."""
    result = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert result
    return [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in result[1].splitlines()
        if line.startswith("| ")
    ][1:]


def test_the_page_has_the_rules_and_the_actions() -> None:
    """The tables of docs/prediction.md equal those of the code."""
    assert [(row[0], row[1].strip("`")) for row in table("Rules")] == [
        (name, rule.kind) for name, rule in RULES.items()
    ]
    assert {row[0].strip("`"): row[1] for row in table("What to do")} == {
        kind: action for kind, (action, _) in ACTIONS.items()
    }
    assert set(KIND_OF.values()) | {rule.kind for rule in RULES.values()} <= ACTIONS.keys() and set(KIND_OF) == set(
        SIGNALS
    )
    assert action_for("unknown kind") == ACTIONS["unusual"]
