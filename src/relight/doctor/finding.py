"""A finding, and the register of checks: each a pure function of the facts, with the sentence that the documentation has of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from relight.doctor.facts import DoctorFacts

SEVERITIES = ("error", "warning", "note")
"""Saves or resumes fail · they will, or something is lost when the next thing happens · worth knowing."""


class CheckHit(NamedTuple):
    """What a check saw. ``command`` is one that can be typed as it stands, "" where none helps; ``fix`` names what ``--fix`` can do."""

    what: str
    where: str = ""
    evidence: str = ""
    hurts: str = ""
    do: str = ""
    command: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: what, where, what was seen, why it hurts, what to do."""

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
    """The heading of docs/troubleshooting.md that is about it; "" if none is."""

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


class Check(NamedTuple):
    """One thing that is looked for."""

    name: str
    severity: str
    part: str
    about: str
    section: str
    looks: Callable[[DoctorFacts], Iterator[CheckHit]]


CHECKS: dict[str, Check] = {}
"""All of them, by name, in the order in which the documentation has them."""


def check(
    name: str, severity: str, part: str, about: str, section: str = ""
) -> Callable[[Callable[[DoctorFacts], Iterator[CheckHit]]], Callable[[DoctorFacts], Iterator[CheckHit]]]:
    """Put a check into the register. ``about``: what is the case when it finds something, for the documentation."""
    assert severity in SEVERITIES and name not in CHECKS

    def put(looks: Callable[[DoctorFacts], Iterator[CheckHit]]) -> Callable[[DoctorFacts], Iterator[CheckHit]]:
        CHECKS[name] = Check(name, severity, part, about, section, looks)
        return looks

    return put


def judge(facts: DoctorFacts) -> list[Finding]:
    """What is wrong, the worst first. Pure."""
    found = [Finding(one.name, one.severity, one.part, *seen, one.section) for one in all_checks().values() for seen in one.looks(facts)]
    return sorted(found, key=lambda one: SEVERITIES.index(one.severity))


def all_checks() -> dict[str, Check]:
    """The register, filled."""
    from relight.doctor import checks_config, checks_machine, checks_nodes, checks_run, checks_store  # noqa: F401 - they put themselves into it

    return CHECKS


def gb(size: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.95:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def many(count: int, noun: str) -> str:
    """``1 key``, ``2 keys``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def span(seconds: float) -> str:
    """A time for people."""
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
