"""The first difference of two runs, and its likely cause. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from relight.prove.trace import TraceEntry

SAMPLES, BATCHES, METRICS = "samples", "batches", "metrics"


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first difference. ``what``: a path, ``samples``, ``batches`` or ``metrics/<name>``. ``also``: other differences at that step."""

    step: int
    when: str
    what: str
    cause: str
    also: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the value of ``--json``."""
        return asdict(self)


class MetricDrift(NamedTuple):
    """A metric of one step after the resume, in both runs. ``relative``: relative difference of the resumed run's value."""

    step: int
    metric: str
    straight: float
    resumed: float
    relative: float


def drift(straight: Sequence[TraceEntry], resumed: Sequence[TraceEntry]) -> tuple[MetricDrift, ...]:
    """Return every numeric metric of every step that both runs have."""
    by_step, rows = {entry.step: entry for entry in straight if entry.kind == "step"}, []
    for entry in resumed:
        straight_entry = by_step.get(entry.step) if entry.kind == "step" else None
        if straight_entry is None:
            continue
        for name, text in entry.metrics.items():
            try:
                straight_value, resumed_value = float.fromhex(straight_entry.metrics[name]), float.fromhex(text)
            except (KeyError, ValueError, OverflowError):
                continue
            relative = abs(resumed_value - straight_value) / max(abs(straight_value), 1e-30)
            rows.append(MetricDrift(entry.step, name, straight_value, resumed_value, relative))
    return tuple(rows)


def compare(
    straight: Sequence[TraceEntry], resumed: Sequence[TraceEntry], *, kinds: dict[str, str]
) -> tuple[int, FirstDifference | None]:
    """Return the number of equal steps, and the first difference or None. ``kinds`` maps component names to their kinds.

    Within a step, differences are in the order of cause and effect: samples, their contents, random numbers, metrics, scaler,
    scheduler, optimizer, model. The first one is the one to investigate; the others usually follow from it.
    """
    by_step = {entry.step: entry for entry in straight if entry.kind == "step"}
    agreed = 0
    for entry in resumed:
        straight_entry = by_step.get(entry.step)
        if straight_entry is None:
            continue
        restored = entry.kind == "restored"
        differences = _differences(straight_entry, entry, kinds, state_only=restored)
        if differences:
            when = "right after the restore" if restored else f"at the end of step {entry.step}"
            return agreed, FirstDifference(
                entry.step, when, differences[0], explain(differences, kinds, restored), tuple(differences[1:40])
            )
        agreed += not restored
    return agreed, None


def _differences(a: TraceEntry, b: TraceEntry, kinds: dict[str, str], *, state_only: bool) -> list[str]:
    paths: list[str] = []
    if not state_only:
        if a.samples != b.samples:
            paths.append(SAMPLES)
        if a.batches != b.batches:
            paths.append(BATCHES)
        paths += [
            f"{METRICS}/{name}"
            for name in sorted({*a.metrics, *b.metrics})
            if a.metrics.get(name) != b.metrics.get(name)
        ]
    paths += [path for path in sorted({*a.state, *b.state}) if a.state.get(path) != b.state.get(path)]
    return sorted(paths, key=lambda path: (_rank(path, kinds), path))


_ORDER = ("loader", "rng", METRICS, "scaler", "scheduler", "optimizer", "module")


def _rank(path: str, kinds: dict[str, str]) -> int:
    head = path.split("/", 1)[0]
    if head == SAMPLES:
        return -2
    if head == BATCHES:
        return -1
    kind = head if head in (METRICS, "rng") else kinds.get(head, "")
    return _ORDER.index(kind) if kind in _ORDER else _ORDER.index("optimizer")


def explain(names: Sequence[str], kinds: dict[str, str], restored: bool) -> str:
    """Return one sentence: the usual cause of the first difference."""
    first = names[0]
    head = first.split("/", 1)[0]
    kind = head if head in (SAMPLES, BATCHES, METRICS, "rng") else kinds.get(head, "")
    loader_differs = any(kinds.get(path.split("/", 1)[0]) == "loader" for path in names)
    if kind == SAMPLES or (kind == BATCHES and loader_differs) or kind == "loader":
        return "the loader is not where it was: batches are skipped, repeated, or in another order"
    if kind == BATCHES:
        return "the same samples at the same place, but with other contents: randomness in the workers (their seed) was not carried over"
    texts = {
        "rng": "a random number generator is not where it was: something seeds or uses it after the restore, or it is not captured",
        METRICS: "state and data agree, the result does not: an operation that is not deterministic, or state that is not captured",
        "scaler": "the gradient scaler's state was lost or changed",
        "scheduler": "the learning-rate schedule is at another place: it is stepped once too often or too seldom, or was not captured",
        "optimizer": "the optimizer's state was lost or changed",
        "module": "parameters or buffers differ although all that leads to them agrees",
    }
    text = texts.get(kind, "this value was not carried over")
    return f"{text} (already right after the restore)" if restored else text
