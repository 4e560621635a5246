"""Score the proofs that are recorded with a run, by what they cover and by their age. Pure."""

from __future__ import annotations

from relight.doctor.facts import CheckpointFacts, DoctorFacts, Proven, RunFacts
from relight.units import age_text

_DAY_S = 86400.0
_METADATA = 0.75
"""Score if metadata and sizes are as committed, and the bytes were not read."""
_VERIFIED_DAYS = (7, 30, 90, 365)
_PROVED_DAYS = (30, 90, 180, 365)


def steps_of(value: float, bounds: tuple[float, float, float, float]) -> float:
    """Return 1 up to the first bound, then 0.75, 0.5, 0.25, and 0 above the last."""
    return next((1.0 - 0.25 * number for number, bound in enumerate(bounds) if value <= bound), 0.0)


def restorable(run: RunFacts, newest: CheckpointFacts, now: float) -> tuple[float, str]:
    """Return score and evidence for the newest checkpoint, from recorded full reads of it.

    The score is at least ``_METADATA``, and 0 if a read found damage that was not repaired since.
    """
    for proof in reversed(run.proofs):
        for checkpoint_id, step, damage in proof.verified:
            if checkpoint_id != newest.id:
                continue
            if damage and newest.whole_s is not None and (proof.time_s is None or newest.whole_s > proof.time_s):
                continue  # repaired since
            if damage:
                return 0.0, f"{_when(proof, now)} relight verify found {damage}"
            score = _METADATA + (1 - _METADATA) * _fresh(proof, now, _VERIFIED_DAYS)
            return score, f"step {step}: every byte was as committed {_when(proof, now)}"
    older = [(proof, step) for proof in run.proofs for _, step, damage in proof.verified if not damage]
    last = f"; the last fully read checkpoint is step {older[-1][1]}, {_when(older[-1][0], now)}" if older else ""
    return _METADATA, f"metadata and sizes as committed; its bytes were not read{last}"


def exactness(facts: DoctorFacts, run: RunFacts | None) -> tuple[float | None, str]:
    """Return score and evidence of an exact resume. The newest proof counts, and its score falls with its age."""
    if run is None:
        return None, "there is no run yet"
    last = next((proof for proof in reversed(run.proofs) if proof.kind == "prove"), None)
    if last is None:
        return 0.0, "no proof is recorded with the run"
    score = _fresh(last, facts.machine.now, _PROVED_DAYS) if last.ok else 0.0
    return score, f"{_when(last, facts.machine.now)}: {last.summary}"


def _fresh(proof: Proven, now: float, days: tuple[float, float, float, float]) -> float:
    return steps_of((now - proof.time_s) / _DAY_S, days) if proof.time_s is not None else 0.0


def _when(proof: Proven, now: float) -> str:
    return f"{age_text(max(0.0, now - proof.time_s))}" if proof.time_s is not None else "at an unknown time"
