"""All checks, imported so that they have registered themselves, and the findings of all of them."""

from __future__ import annotations

from relight.doctor import checks_config, checks_machine, checks_nodes, checks_run, checks_store  # noqa: F401 - they register themselves
from relight.doctor.facts import DoctorFacts
from relight.doctor.finding import CHECKS, SEVERITIES, Check, Finding


def all_checks() -> dict[str, Check]:
    """Return the registry, with all checks."""
    return CHECKS


def judge(facts: DoctorFacts) -> list[Finding]:
    """Return all findings, the most severe first. Pure."""
    findings = [
        Finding(check.name, check.severity, check.part, *seen, check.section)
        for check in all_checks().values()
        for seen in check.evaluate(facts)
    ]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
