"""What is wrong with a machine, a store, a run and their settings, and what to do: ``relight doctor``, ``relight ready``.

Always holds: looking is apart from judging. ``facts_…`` collect a ``Facts``: bounded in time and memory, changing nothing but a probe that
is removed again, and what could not be seen is kept with its reason, never taken for good. ``checks_…`` and ``ready`` are pure functions of
it. ``fix`` does nothing that a plan did not show, and never deletes a checkpoint. Torch-free. May import everything below it.
"""

from relight.doctor.collect import collect
from relight.doctor.coverage import Coverage, coverage
from relight.doctor.explain import Explained, explain
from relight.doctor.facts import DoctorFacts
from relight.doctor.finding import CHECKS, Check, Finding, judge
from relight.doctor.fix import FixPlan, FixReport, execute_fix, plan_fix
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
