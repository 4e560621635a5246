"""Findings, and the registry of checks: each check is a pure function of the facts, with its sentence for the documentation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from relight.doctor.facts import DoctorFacts

SEVERITIES = ("error", "warning", "note")
"""error: saves or resumes fail. warning: they will fail, or the next failure loses data. note: worth knowing."""


class CheckHit(NamedTuple):
    """A problem that a check found. ``command`` can be run unchanged; "" if no command helps. ``fix`` names what ``--fix`` removes."""

    what: str
    where: str = ""
    evidence: str = ""
    hurts: str = ""
    do: str = ""
    command: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: what, where, evidence, consequence, remedy."""

    name: str
    severity: str
    part: str
    what: str
    where: str
    evidence: str
    hurts: str
    do: str
    command: str
    fix: str
    section: str
    """The heading of docs/troubleshooting.md about it; "" without one."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        return asdict(self)


class Check(NamedTuple):
    """One registered check."""

    name: str
    severity: str
    part: str
    about: str
    section: str
    evaluate: Callable[[DoctorFacts], Iterator[CheckHit]]


CHECKS: dict[str, Check] = {}
"""All checks by name, in the order of the documentation."""


def check(
    name: str, severity: str, part: str, about: str, section: str = ""
) -> Callable[[Callable[[DoctorFacts], Iterator[CheckHit]]], Callable[[DoctorFacts], Iterator[CheckHit]]]:
    """Register a check. ``about``: what a finding of it means, for the documentation."""
    assert severity in SEVERITIES and name not in CHECKS

    def put(evaluate: Callable[[DoctorFacts], Iterator[CheckHit]]) -> Callable[[DoctorFacts], Iterator[CheckHit]]:
        CHECKS[name] = Check(name, severity, part, about, section, evaluate)
        return evaluate

    return put
