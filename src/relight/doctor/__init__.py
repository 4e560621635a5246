"""Diagnose a machine, a store, a run and their settings, and state what to do: ``relight doctor``, ``relight doctor --ready``.

Invariants:

- Collecting is separate from judging. ``facts_…`` collect ``DoctorFacts``; ``checks_…`` and ``ready`` are pure functions of these facts.
- Collecting is bounded in time and memory. It changes nothing, except for test files that it removes again.
- A fact that could not be collected is recorded in ``unseen`` with its reason, and never counts as good.
- ``fix`` removes only what its plan has shown, and never a checkpoint.

Torch-free. May import everything below it.
"""

from relight.doctor.collect import collect
from relight.doctor.coverage import Coverage, coverage
from relight.doctor.explain import Explained, explain
from relight.doctor.facts import DoctorFacts
from relight.doctor.finding import CHECKS, Check, Finding
from relight.doctor.fix import FixPlan, FixReport, execute_fix, plan_fix
from relight.doctor.judge import judge
from relight.doctor.ready import Readiness, ReadinessLine, grade

__all__ = [
    "CHECKS",
    "Check",
    "Coverage",
    "DoctorFacts",
    "Explained",
    "Finding",
    "FixPlan",
    "FixReport",
    "Readiness",
    "ReadinessLine",
    "collect",
    "coverage",
    "execute_fix",
    "explain",
    "grade",
    "judge",
    "plan_fix",
]  # fmt: skip
