"""Implement ``--fix``: plan, then remove leftovers that no process can need. Never removes a checkpoint or changes a setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relight.doctor.facts_machine import memory_places
from relight.doctor.finding import Finding
from relight.reclaim import SweepPlan, execute_sweep, plan_sweep
from relight.store import ByteStore
from relight.supervise.shared_pages import left_in, sweep_memory


@dataclass(frozen=True, slots=True)
class FixPlan:
    """Leftovers to remove: those of superseded attempts, as ``relight prune --sweep`` plans them, and memory files of dead supervisors."""

    sweeps: tuple[SweepPlan, ...]
    memory: tuple[Path, ...]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Leftovers to remove, with the reasons."""
        rows = [(f"{plan.run}/{name}", why) for plan in self.sweeps for name, why in plan.directories]
        rows += [(key, "a temporary file of a killed writer") for plan in self.sweeps for key in plan.temporaries]
        return rows + [(str(path), "its relight run is dead") for path in self.memory]

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the fields for ``--json``."""
        return [{"what": what, "because": why} for what, why in self.rows]


@dataclass(frozen=True, slots=True)
class FixReport:
    """Leftovers that were removed, and those that could not be removed yet."""

    removed: tuple[str, ...]
    left: tuple[str, ...]


def plan_fix(store: ByteStore | None, findings: Sequence[Finding], runs: Sequence[str]) -> FixPlan:
    """Plan the fixes for ``findings`` that need no decision of a user. Lists the leftovers again, so that all of them exist now."""
    fixes = {finding.fix for finding in findings}
    sweeps = [plan_sweep(store, run) for run in runs] if store is not None and "leftovers" in fixes else []
    memory = [leftover for top in memory_places() for leftover in left_in(top)] if "memory files" in fixes else []
    return FixPlan(tuple(sweep for sweep in sweeps if sweep.directories or sweep.temporaries), tuple(memory))


def execute_fix(
    plan: FixPlan, store: ByteStore | None, on_stage: Callable[[str], None] = lambda what: None
) -> FixReport:
    """Execute the plan. Its leftovers can never become a checkpoint: their attempt is superseded, or they are retired for good."""
    removed: list[str] = []
    left: list[str] = []
    for sweep in plan.sweeps:
        assert store is not None
        on_stage(f"run {sweep.run}")
        report = execute_sweep(sweep, store)
        removed += [name if "/" in name else f"{sweep.run}/{name}" for name in report.deleted]
        left += [f"{sweep.run}/{name}" for name in report.left]
    swept = {path for top in ({path.parent for path in plan.memory}) for path in sweep_memory(top)}
    removed += [str(path) for path in sorted(swept)]
    left += [str(path) for path in plan.memory if path not in swept and path.exists()]
    return FixReport(tuple(removed), tuple(left))
