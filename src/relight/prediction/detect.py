"""Interface of detectors, and the first detector: fixed rules. At a rule's threshold its score is one half."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from relight.prediction.features import SPANS, FeatureWindow, column
from relight.units import duration_text, percent_text

Array = np.ndarray[Any, Any]

KIND_OF: dict[str, str] = {
    "memory_free": "memory", "psi_memory": "memory", "psi_memory_full": "memory", "faults": "memory", "rss": "memory", "disk_free": "disk",
    "psi_io": "store", "psi_io_full": "store", "save": "store", "step": "link", "straggle": "link", "utilisation": "link",
    "temperature": "heat", "clock": "heat", "power": "heat", "ecc": "ecc", "ecc_bad": "ecc", "silent": "silent",
    "cpu": "pressure", "load": "pressure", "psi_cpu": "pressure",
}  # fmt: skip
"""Kind of risk that each signal indicates."""


class Risk(NamedTuple):
    """A detector's result for one feature window."""

    score: float
    """From 0 to 1. Each detector has its own threshold for an alarm."""
    why: str = ""
    kind: str = "unusual"
    """``memory``, ``disk``, ``store``, ``heat``, ``ecc``, ``silent``, ``link``, ``pressure``, ``hardware``, ``unusual``."""


class Detector(Protocol):
    """Scores the feature windows of one run, oldest first, one every five seconds."""

    name: str

    def update(self, window: FeatureWindow) -> Risk:
        """Return the risk of the next window."""
        ...

    def follow(self, features: Array) -> Array:
        """Return the scores of a whole run: equal to those of ``update`` of a fresh detector. May be vectorised."""
        ...

    def fresh(self) -> Detector:
        """Return a detector without state of a run."""
        ...


class DetectionRule(NamedTuple):
    """A rule: its kind of risk, its score, and its reason as text."""

    kind: str
    score: Callable[[Array], Array]
    """Returns the scores of rows of features; NaN where its features are unknown."""
    why: Callable[[Array], str]


def _of(signal: str, kind: str) -> int:
    return column(signal, kind)


def _half(values: Array, half: float) -> Array:
    """Return a score: 0 for 0, one half at ``half``, 1 in the limit."""
    positive = np.maximum(values, 0.0)
    return np.asarray(positive / (positive + half))


GONE_IN_S = {300: 300.0, 30: 40.0}
"""By window length in seconds: the predicted seconds until full that score one half."""
STRAIGHT = 0.95
"""Least correlation with time for a falling line, to distinguish it from a sawtooth."""

_BELOW = 1.8
"""Standard deviations below the mean that a regular swing does not reach: the end of a straight line is at 1.73."""


def _seconds_left(rows: Array, signal: str, span: int) -> Array:
    """Return the seconds until nothing is left at the present rate.

    They are infinite if the signal does not fall, levels off, or only swings.
    """
    values, slope, lately = (
        rows[:, _of(signal, "last")],
        rows[:, _of(signal, f"slope{span}")],
        rows[:, _of(signal, "slope30")],
    )
    line = np.abs(slope) * (span / np.sqrt(12)) / np.maximum(rows[:, _of(signal, f"spread{span}")], 1e-9)
    falls = (slope < -1e-6) & (lately < 0.5 * slope) & (line > STRAIGHT)
    if span < max(SPANS):  # one tooth of a sawtooth is a straight line: the value must also be lower than usual
        falls &= (
            values < rows[:, _of(signal, f"mean{max(SPANS)}")] - _BELOW * rows[:, _of(signal, f"spread{max(SPANS)}")]
        )
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(
            np.where(falls, values / -np.minimum(slope, lately), np.where(np.isnan(values), np.nan, np.inf))
        )


def _gone(signal: str, least: float) -> Callable[[Array], Array]:
    """Return a score function for a resource that will be full soon, or has only ``least`` left."""

    def score(rows: Array) -> Array:
        soon = [half / (half + _seconds_left(rows, signal, span)) for span, half in GONE_IN_S.items()]
        return np.asarray(np.fmax(np.fmax(*soon), least / (least + np.maximum(rows[:, _of(signal, "mean30")], 0))))

    return score


def _gone_why(signal: str, what: str) -> Callable[[Array], str]:
    def why(row: Array) -> str:
        value, seconds = (
            float(row[_of(signal, "last")]),
            min(float(_seconds_left(row[None], signal, span)[0]) for span in GONE_IN_S),
        )
        forecast = f"; at this rate it is full in {duration_text(seconds)}" if np.isfinite(seconds) else ""
        return f"{percent_text(value)} of the {what} are left{forecast}"

    return why


def _throttled(rows: Array) -> Array:
    drop = -rows[:, _of("clock", "mean30")]
    hot = rows[:, _of("temperature", "mean30")] > 0.8
    return np.asarray(np.where(hot, _half(drop, 0.25), np.where(np.isnan(drop), np.nan, 0.0)))


def _throttled_why(row: Array) -> str:
    celsius, clock = 100 * row[_of("temperature", "mean30")], float(np.exp(row[_of("clock", "mean30")]))
    return f"an accelerator of {celsius:.0f} °C runs at {percent_text(clock)} of its usual clock"


def _ecc(rows: Array) -> Array:
    return np.asarray(
        np.fmax(_half(rows[:, _of("ecc", "mean300")], 0.2), 0.9 * (rows[:, _of("ecc_bad", "mean300")] > 0))
    )


def _rising(rows: Array) -> Array:
    rises = rows[:, _of("step", "slope300")] > 0
    return np.asarray(np.where(rises, _half(rows[:, _of("step", "mean30")], np.log(2.5)), 0.0))


RULES: dict[str, DetectionRule] = {
    "memory will be full": DetectionRule("memory", _gone("memory_free", 0.02), _gone_why("memory_free", "memory")),
    "the disk will be full": DetectionRule("disk", _gone("disk_free", 0.01), _gone_why("disk_free", "disk")),
    "the clock went down for heat": DetectionRule("heat", _throttled, _throttled_why),
    "memory errors come often": DetectionRule(
        "ecc", _ecc, lambda row: f"about {60 * np.expm1(row[_of('ecc', 'mean300')]):.1f} corrected memory errors a minute"
        + (", and uncorrected ones" if row[_of("ecc_bad", "mean300")] > 0 else ""),
    ),
    "an accelerator is silent": DetectionRule(
        "silent", lambda rows: 0.95 * (rows[:, _of("silent", "mean30")] > 0.01), lambda row: "an accelerator no longer answers"
    ),
    "all wait for memory": DetectionRule(
        "memory", lambda rows: _half(rows[:, _of("psi_memory_full", "mean30")], 0.2),
        lambda row: f"all processes waited for memory {percent_text(row[_of('psi_memory_full', 'mean30')])} of the time",
    ),
    "all wait for disks": DetectionRule(
        "pressure", lambda rows: _half(rows[:, _of("psi_io_full", "mean300")], 0.6),
        lambda row: f"all processes waited for disks {percent_text(row[_of('psi_io_full', 'mean300')])} of the time",
    ),
    "steps take longer and longer": DetectionRule(
        "link", _rising, lambda row: f"a step takes {np.exp(row[_of('step', 'mean30')]):.1f} times the usual time, and rises"
    ),
    "saves take long": DetectionRule(
        "store", lambda rows: _half(rows[:, _of("save", "last")], np.log(12.0)),
        lambda row: f"the last save took {np.exp(row[_of('save', 'last')]):.1f} times the usual time",
    ),
}  # fmt: skip
"""The rules by name. docs/prediction.md has the same table."""


class DetectionRules:
    """Detector with the highest score of all rules. It has no state."""

    name = "rules"

    def scores(self, features: Array) -> Array:
        """Return the score of each window by each rule."""
        rows = np.asarray(features, np.float64)
        return np.asarray(np.nan_to_num(np.stack([rule.score(rows) for rule in RULES.values()], axis=1), nan=0.0))

    def kinds(self, features: Array) -> Array:
        """Return for each window the kind that ``update`` would return."""
        return np.asarray(np.array([rule.kind for rule in RULES.values()])[self.scores(features).argmax(axis=1)])

    def update(self, window: FeatureWindow) -> Risk:
        """See ``Detector``."""
        scores = self.scores(window.values[None])[0]
        best = int(np.argmax(scores))
        rule = list(RULES.values())[best]
        return Risk(float(scores[best]), rule.why(window.values) if scores[best] >= 0.1 else "", rule.kind)

    def follow(self, features: Array) -> Array:
        """See ``Detector``."""
        return np.asarray(self.scores(features).max(axis=1))

    def fresh(self) -> DetectionRules:
        """See ``Detector``."""
        return self
