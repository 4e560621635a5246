"""Where two runs first part, and what that means: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from relight.prove.trace import TraceEntry

SAMPLES, BATCHES, METRICS = "samples", "batches", "metrics"


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first thing that differs. ``what`` is its path or ``samples``, ``batches``, ``metrics/<name>``; ``also`` what differs with it."""

    step: int
    when: str
    what: str
    cause: str
    also: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


class MetricDrift(NamedTuple):
    """A metric of one step after the resume, in both runs; ``relative``: how far off the resumed one's is."""

    step: int
    metric: str
    straight: float
    resumed: float
    relative: float


def drift(straight: Sequence[TraceEntry], resumed: Sequence[TraceEntry]) -> tuple[MetricDrift, ...]:
    """Every metric that is a number, of every step that both have."""
    by_step, rows = {entry.step: entry for entry in straight if entry.kind == "step"}, []
    for entry in resumed:
        other = by_step.get(entry.step) if entry.kind == "step" else None
        if other is None:
            continue
        for name, text in entry.metrics.items():
            try:
                one, two = float.fromhex(other.metrics[name]), float.fromhex(text)
            except (KeyError, ValueError, OverflowError):
                continue
            rows.append(MetricDrift(entry.step, name, one, two, abs(two - one) / max(abs(one), 1e-30)))
    return tuple(rows)


def compare(straight: Sequence[TraceEntry], resumed: Sequence[TraceEntry], *, kinds: dict[str, str]) -> tuple[int, FirstDifference | None]:
    """``(steps that agree, first difference)``. ``kinds`` maps component names to their kinds.

    Within a step, differences are ordered as effects follow causes: which samples, what was in them, random numbers, the loss, scaler,
    scheduler, optimizer, model. The first of those is what to look at; the rest follow from it.
    """
    by_step = {entry.step: entry for entry in straight if entry.kind == "step"}
    agreed = 0
    for entry in resumed:
        other = by_step.get(entry.step)
        if other is None:
            continue
        restored = entry.kind == "restored"
        found = _differences(other, entry, kinds, state_only=restored)
        if found:
            when = "right after the restore" if restored else f"at the end of step {entry.step}"
            return agreed, FirstDifference(entry.step, when, found[0], explain(found, kinds, restored), tuple(found[1:40]))
        agreed += not restored
    return agreed, None


def _differences(a: TraceEntry, b: TraceEntry, kinds: dict[str, str], *, state_only: bool) -> list[str]:
    found: list[str] = []
    if not state_only:
        if a.samples != b.samples:
            found.append(SAMPLES)
        if a.batches != b.batches:
            found.append(BATCHES)
        found += [f"{METRICS}/{name}" for name in sorted({*a.metrics, *b.metrics}) if a.metrics.get(name) != b.metrics.get(name)]
    found += [path for path in sorted({*a.state, *b.state}) if a.state.get(path) != b.state.get(path)]
    return sorted(found, key=lambda path: (_rank(path, kinds), path))


_ORDER = ("loader", "rng", METRICS, "scaler", "scheduler", "optimizer", "module")


def _rank(path: str, kinds: dict[str, str]) -> int:
    head = path.split("/", 1)[0]
    if head == SAMPLES:
        return -2
    if head == BATCHES:
        return -1
    kind = head if head in (METRICS, "rng") else kinds.get(head, "")
    return _ORDER.index(kind) if kind in _ORDER else _ORDER.index("optimizer")


def explain(found: Sequence[str], kinds: dict[str, str], restored: bool) -> str:
    """One sentence: what the first difference usually means."""
    first = found[0]
    head = first.split("/", 1)[0]
    kind = head if head in (SAMPLES, BATCHES, METRICS, "rng") else kinds.get(head, "")
    loader_differs = any(kinds.get(path.split("/", 1)[0]) == "loader" for path in found)
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
