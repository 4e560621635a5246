"""What ``--fix`` does: leftovers that nobody can need go. A plan, then its execution; never a checkpoint, never a setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relight.doctor.facts_machine import memory_places
from relight.doctor.finding import Finding
from relight.reclaim import SweepPlan, execute_sweep, plan_sweep
from relight.store import ByteStore
from relight.supervise.own_memory import left_in, sweep_memory


@dataclass(frozen=True, slots=True)
class FixPlan:
    """What would go: of runs, leftovers of superseded attempts, by the plan that ``relight prune --sweep`` goes by; memory files of
    supervisors that are dead."""

    sweeps: tuple[SweepPlan, ...]
    memory: tuple[Path, ...]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """What goes, and why."""
        found = [(f"{plan.run}/{name}", why) for plan in self.sweeps for name, why in plan.directories]
        found += [(key, "a file that was to become a record, and never can") for plan in self.sweeps for key in plan.temporaries]
        return found + [(str(path), "its relight run is dead") for path in self.memory]

    def to_dict(self) -> list[dict[str, Any]]:
        """For ``--json``."""
        return [{"what": what, "because": why} for what, why in self.rows]


@dataclass(frozen=True, slots=True)
class FixReport:
    """What is gone, and what could not be removed yet."""

    removed: tuple[str, ...]
    left: tuple[str, ...]


def plan_fix(store: ByteStore | None, findings: Sequence[Finding], runs: Sequence[str]) -> FixPlan:
    """What of ``findings`` can be put right without asking anybody what he meant. Looks again: what is listed is there now."""
    fixes = {one.fix for one in findings}
    sweeps = [plan_sweep(store, run) for run in runs] if store is not None and "leftovers" in fixes else []
    memory = [one for top in memory_places() for one in left_in(top)] if "memory files" in fixes else []
    return FixPlan(tuple(one for one in sweeps if one.directories or one.temporaries), tuple(memory))


def execute_fix(plan: FixPlan, store: ByteStore | None, say: Callable[[str], None] = lambda what: None) -> FixReport:
    """Do it. What the plan names can become no checkpoint any more: its attempt is superseded, or it is retired for good."""
    removed: list[str] = []
    left: list[str] = []
    for sweep in plan.sweeps:
        assert store is not None
        say(f"run {sweep.run}")
        report = execute_sweep(sweep, store)
        removed += [name if "/" in name else f"{sweep.run}/{name}" for name in report.deleted]
        left += [f"{sweep.run}/{name}" for name in report.left]
    gone = {one for top in ({one.parent for one in plan.memory}) for one in sweep_memory(top)}
    removed += [str(one) for one in sorted(gone)]
    left += [str(one) for one in plan.memory if one not in gone and one.exists()]
    return FixReport(tuple(removed), tuple(left))
