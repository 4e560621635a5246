"""The file of trained detectors, with their results on held-out runs. It has arrays and numbers, no executable code."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from relight.errors import CorruptCheckpoint, IncompatibleState
from relight.prediction.detect import DetectionRules, Detector
from relight.prediction.features import FEATURES, Scale
from relight.prediction.forest import Forest
from relight.prediction.lstm import Lstm
from relight.prediction.score import Result
from relight.prediction.sealed_file import Arrays, StoredArray, read_sealed, write_sealed

DETECTORS = ("rules", "forest", "lstm")
USUAL_THRESHOLD = 0.5


@dataclass(frozen=True, slots=True)
class Worth:
    """A detector's alarm threshold, and its results on held-out runs."""

    threshold: float = USUAL_THRESHOLD
    precision: float = math.nan
    """Smoothed for few alarms: computed with one more true and one more false alarm."""
    recall: float = math.nan
    lead_s: float = math.nan
    false_per_day: float = math.nan
    alarms: int = 0

    @classmethod
    def from_result(cls, held_out: Result) -> Worth:
        """Return the worth from a result on held-out runs."""
        result = held_out
        return cls(
            result.threshold,
            result.smoothed_precision,
            result.recall,
            result.lead_s,
            result.false_per_day,
            result.alarms,
        )


@dataclass(frozen=True)
class DetectorModel:
    """Detectors, each with its worth."""

    detectors: Mapping[str, Detector]
    worth: Mapping[str, Worth]
    made_at: float = 0.0
    """Seconds since 1970."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """How it was trained: seed, runs, recordings, requested precision."""

    def write(self, path: Path) -> None:
        """Write the model to a file, atomically and durably."""
        arrays: Arrays = {}
        for name, detector in self.detectors.items():
            if isinstance(detector, (Forest, Lstm)):
                arrays |= {f"{name}.{part}": value for part, value in detector.arrays.items()}
                arrays |= {"scale.middle": detector.scale.middle, "scale.spread": detector.scale.spread}
        worth = {
            name: {slot: _none(getattr(entry, slot)) for slot in Worth.__slots__} for name, entry in self.worth.items()
        }
        stored = {name: StoredArray.of(array) for name, array in arrays.items()}
        write_sealed(path, _ModelFile(tuple(FEATURES), worth, self.made_at, self.metadata, stored))


class _ModelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model's file. None stands for a number that is not known."""

    features: tuple[str, ...]
    worth: dict[str, dict[str, float | None]]
    made_at: float
    metadata: dict[str, Any]
    arrays: dict[str, StoredArray]
    relight: Literal["model"] = "model"
    version: Literal[1] = 1


def without_model() -> DetectorModel:
    """Return a model with only the rules, at their default threshold."""
    return DetectorModel({"rules": DetectionRules()}, {"rules": Worth()})


def read_model(path: Path) -> DetectorModel:
    """Read a model.

    Raise ``CorruptCheckpoint`` if the file is not an intact model, ``IncompatibleState`` if it has other features.
    """
    stored = read_sealed(path, _ModelFile, "model")
    if stored.features != tuple(FEATURES):
        raise IncompatibleState(
            "this model uses other features", where=str(path), hint="train a new one with relight plan predict train"
        )
    try:
        worth = {}
        for name, entry in stored.worth.items():
            numbers = {slot: math.nan if number is None else number for slot, number in entry.items()}
            worth[name] = Worth(alarms=int(numbers.pop("alarms")), **numbers)
        arrays = {name: array.array() for name, array in stored.arrays.items()}
        detectors: dict[str, Detector] = {}
        if not set(worth) <= set(DETECTORS) or not worth:
            raise ValueError("unknown detectors")
        for name in worth:
            own_arrays = {
                part.partition(".")[2]: value for part, value in arrays.items() if part.startswith(f"{name}.")
            }
            if name in ("forest", "lstm"):
                scale = Scale(arrays["scale.middle"], arrays["scale.spread"])
                if scale.middle.shape != (len(FEATURES),) or scale.spread.shape != (len(FEATURES),):
                    raise ValueError(name)
                detectors[name] = Forest(scale, own_arrays) if name == "forest" else Lstm(scale, own_arrays)
            else:
                detectors[name] = DetectionRules()
        return DetectorModel(detectors, worth, stored.made_at, stored.metadata)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"an incomplete model: {error}"[:200], where=str(path)) from None


def age_s(path: Path) -> float:
    """Return the model's age in seconds; infinite if there is no readable model."""
    try:
        return max(0.0, time.time() - read_model(path).made_at) if path.is_file() else math.inf
    except (CorruptCheckpoint, IncompatibleState):
        return math.inf


def _none(value: float) -> float | None:
    return value if math.isfinite(value) else None
