"""Training and evaluation of detectors: from a history to a model, and from a model to its results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from relight.errors import ConfigError
from relight.prediction.detect import DetectionRules, Detector
from relight.prediction.features import Scale
from relight.prediction.forest import INSTALL, grow
from relight.prediction.history import CHECK, HELD_OUT, TRAIN, RecordedRun, recorded, simulated
from relight.prediction.lstm import CLASSES, INPUTS, STEPS, Lstm, inputs_of, windows_of
from relight.prediction.model import DETECTORS, DetectorModel, Worth
from relight.prediction.score import (
    HORIZON_S,
    AlarmCosts,
    Result,
    Scored,
    alarms_of,
    choose_threshold,
    result_of,
    tally,
    together,
)

Array = np.ndarray[Any, Any]
Report = Callable[[str], None]
PRECISION = 0.5
_OTHER_SEEDS = 1 << 32
"""Offset of the seeds for evaluation: no training uses these seeds."""
_CLASS_OF = {"memory": "memory", "storage": "storage", "hardware": "hardware", "hang": "hang", "network": "hang"}
_SOON_S = HORIZON_S / 4
"""Seconds before a failure in which windows are examples of it. Earlier windows may show no sign yet."""
_HEALTHY_EACH = 60
"""Windows of each run that are examples of a healthy node."""


@dataclass(frozen=True, slots=True)
class LearningPlan:
    """Data and parameters of a training."""

    runs: int = 600
    """Number of simulated runs."""
    recordings: Path | None = None
    seed: int = 0
    precision: float = PRECISION
    detectors: tuple[str, ...] = DETECTORS
    costs: AlarmCosts = field(default_factory=AlarmCosts)
    epochs: int = 6
    size: int = 24
    """Size of the network's state."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.detectors if name not in DETECTORS]
        if unknown or not self.detectors:
            raise ConfigError(
                f"there is no detector {', '.join(unknown) or 'named'}", hint=f"there are {', '.join(DETECTORS)}"
            )


def train(
    plan: LearningPlan, report: Report, history: Iterable[tuple[str, RecordedRun]] = ()
) -> tuple[DetectorModel, list[Result]]:
    """Train a model. Return it, and its detectors' results on held-out runs. ``history``: further runs, and the set of each."""
    parts: dict[str, list[RecordedRun]] = {TRAIN: [], CHECK: [], HELD_OUT: []}
    for part, run in history:  # first: a server that does not answer is reported before minutes of simulation
        parts[part].append(run)
    for part, run in _counted(simulated(plan.seed, plan.runs), plan.runs, report):
        parts[part].append(run)
    for part, run in recorded(plan.recordings) if plan.recordings is not None else ():
        parts[part].append(run)
    if not all(parts.values()):
        raise ConfigError(
            "training, validation and the held-out set need at least one run each", hint="--runs 5 or more"
        )
    detectors = _learned(plan, parts, report)
    worth, results = {}, []
    for name, detector in detectors.items():
        chosen = choose_threshold(name, [_scored(detector, run) for run in parts[CHECK]], plan.precision, plan.costs)
        held_out = result_of(name, chosen.threshold, [_scored(detector, run) for run in parts[HELD_OUT]], plan.costs)
        outcome = f"{held_out.found} of {held_out.failures} failures found, {held_out.false} false alarms"
        report(f"{name}: threshold {chosen.threshold:.3f}; on held-out runs {outcome}")
        worth[name] = Worth.from_result(held_out)
        results.append(held_out)
    names = sorted(
        {run.name.partition("/")[0] for part in parts.values() for run in part if not run.name.startswith("sim-")}
    )
    metadata = {"seed": plan.seed, "runs": plan.runs, "recordings": names[:1000], "precision": plan.precision}
    return DetectorModel(detectors, worth, time.time(), metadata), results


def _counted(runs: Iterable[tuple[str, RecordedRun]], count: int, report: Report) -> Iterable[tuple[str, RecordedRun]]:
    for number, run in enumerate(runs):
        if number and number % 50 == 0:
            report(f"{number} of {count} simulated runs")
        yield run


def _learned(plan: LearningPlan, parts: dict[str, list[RecordedRun]], report: Report) -> dict[str, Detector]:
    rng = np.random.default_rng(plan.seed)
    detectors: dict[str, Detector] = {}
    if "rules" in plan.detectors:
        detectors["rules"] = DetectionRules()
    if {"forest", "lstm"} & set(plan.detectors):
        healthy = np.concatenate(
            [run.features[_some(rng, np.flatnonzero(~run.before_failure), _HEALTHY_EACH)] for run in parts[TRAIN]]
        )
        scale = Scale.from_rows(healthy)
    if "forest" in plan.detectors:
        report(f"training the forest on {len(healthy)} windows of healthy nodes")
        detectors["forest"] = grow(healthy, scale, plan.seed)
    if "lstm" in plan.detectors:
        detectors["lstm"] = _network(plan, parts, scale, rng, report)
    return {name: detectors[name] for name in DETECTORS if name in detectors}


def _network(
    plan: LearningPlan, parts: dict[str, list[RecordedRun]], scale: Scale, rng: np.random.Generator, report: Report
) -> Lstm:
    try:
        from relight.prediction.lstm_train import train_network
    except ModuleNotFoundError as error:
        hint = f"{INSTALL}; or --detectors without lstm"
        raise ConfigError(f"the network is trained with torch, and {error.name} is not installed", hint=hint) from None
    examples = _examples(parts[TRAIN], scale, rng)
    report(
        f"training the network on {len(examples[1])} windows, {int((examples[1] > 0).sum())} of them before a failure"
    )
    arrays = train_network(
        *examples,
        _examples(parts[CHECK], scale, rng),
        seed=plan.seed,
        epochs=plan.epochs,
        size=plan.size,
        report=report,
    )
    return Lstm(scale, arrays)


def _examples(runs: Sequence[RecordedRun], scale: Scale, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return windows and their classes: those shortly before a failure with signs, and some far from any failure."""
    windows, labels = [np.empty((0, STEPS, INPUTS), np.float32)], [np.empty(0, np.int64)]
    for run in runs:
        inputs = inputs_of(run.features, scale)
        rows = _some(rng, np.flatnonzero(run.ahead > 2 * HORIZON_S), _HEALTHY_EACH)
        label = 0
        for _ in range(2):
            windows.append(windows_of(inputs, rows))
            labels.append(np.full(len(rows), label, np.int64))
            kind = _CLASS_OF.get(run.failed.kind, "") if run.failed is not None and run.failed.cause != "sudden" else ""
            label = CLASSES.index(kind) if kind else 0
            rows = np.flatnonzero(run.ahead <= _SOON_S) if kind else np.empty(0, int)
    return np.concatenate(windows), np.concatenate(labels)


def _some(rng: np.random.Generator, rows: Array, count: int) -> Array:
    return np.sort(rng.permutation(rows)[:count])


def _scored(detector: Detector, run: RecordedRun) -> Scored:
    failed = run.failed
    scored = Scored(
        run.name,
        run.at,
        detector.follow(run.features),
        groups=detector.kinds(run.features) if isinstance(detector, DetectionRules) else None,
    )
    return scored if failed is None else scored._replace(failed_at=failed.at, cause=failed.cause or failed.kind)


TOGETHER = "together"


def trusted(model: DetectorModel, precision: float) -> list[str]:
    """Return the detectors with at least that precision on held-out runs. The rules are always included."""
    return [name for name, worth in model.worth.items() if name == "rules" or worth.precision >= precision]


def evaluate(model: DetectorModel, runs: Iterable[RecordedRun], precision: float, costs: AlarmCosts) -> list[Result]:
    """Return the results of each detector, and of the trusted ones together. Memory: one run at a time."""
    seen: dict[str, list[Scored]] = {name: [] for name in (*model.detectors, TOGETHER)}
    raised: dict[str, list[list[float]]] = {name: [] for name in seen}
    used = trusted(model, precision)
    for run in runs:
        for name, detector in model.detectors.items():
            scored = _scored(detector, run)
            raised[name].append(alarms_of(scored.at, scored.scores, model.worth[name].threshold, scored.groups))
            seen[name].append(scored._replace(scores=np.empty(0), groups=None))
        seen[TOGETHER].append(seen[name][-1])
        raised[TOGETHER].append(together([raised[detector_name][-1] for detector_name in used]))
    thresholds = {name: model.worth[name].threshold for name in model.detectors}
    return [tally(name, thresholds.get(name, float("nan")), seen[name], raised[name], costs) for name in seen]


def unseen(seed: int, count: int, report: Report) -> Iterable[RecordedRun]:
    """Return simulated runs that no model was trained on, whatever its seed."""
    return (run for _, run in _counted(simulated(seed + _OTHER_SEEDS, count, (HELD_OUT,)), count, report))


def unseen_recordings(directory: Path, model: DetectorModel) -> Iterable[RecordedRun]:
    """Yield the runs of recordings that the model was not trained on: held-out ones and new ones."""
    trained_on = set(model.metadata.get("recordings", ()))
    for part, run in recorded(directory):
        if part == HELD_OUT or run.name.partition("/")[0] not in trained_on:
            yield run
