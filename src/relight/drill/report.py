"""Results of a drill: values, and a Markdown page for a runbook."""

from __future__ import annotations

from typing import Any

import msgspec

from relight.drill.made_of import MadeOf
from relight.units import duration_text

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


class RehearsalOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """Outcome of one rehearsal. Times are in seconds since the failure was caused."""

    name: str
    what: str
    """The failure that was caused."""
    verdict: str
    why: str
    """What happened; if it failed, what was wrong; if it was skipped, the reason."""
    means: str = ""
    """How the failure was caused, if there are several ways."""
    noticed_s: float | None = None
    decided_s: float | None = None
    back_s: float | None = None
    """Time until all ranks had completed a step again."""
    steps_lost: int | None = None
    took_s: float = 0.0
    """Duration of the rehearsal in seconds, including the start of the job and the final checks."""


class DrillReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """Outcomes of all rehearsals of a drill."""

    id: str
    at: str
    host: str
    job: str
    outcomes: list[RehearsalOutcome]
    seconds: float
    live: bool = False
    """Whether a running job itself was drilled."""
    kept: str = ""
    """Directory with the kept stores and logs; "" if they were removed."""
    copies: bool = False
    """Whether only copies of checkpoints were drilled, without a job."""
    made_of: MadeOf | None = None
    """The script and the settings; None for copies, and for drills that are older than this field."""

    @property
    def ok(self) -> bool:
        """Whether at least one rehearsal passed, and none failed."""
        return self.count(PASSED) > 0 and not self.count(FAILED)

    def count(self, verdict: str) -> int:
        """Return the number of outcomes with this verdict."""
        return sum(outcome.verdict == verdict for outcome in self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        fields = msgspec.to_builtins(self)
        assert isinstance(fields, dict)
        return {"ok": self.ok, **fields}

    def summary(self) -> str:
        """Return the counts of the verdicts and the duration, in one line."""
        parts = [f"{self.count(verdict)} {verdict}" for verdict in (PASSED, FAILED, SKIPPED) if self.count(verdict)]
        return f"{', '.join(parts) or 'nothing was tried'}; {duration_text(self.seconds)}"


def lines_of(report: DrillReport) -> list[str]:
    """Return a line for each outcome: the rehearsal, its verdict, the failure, the result."""
    return [f"{outcome.name}: {outcome.verdict}: {outcome.what}; {outcome.why}" for outcome in report.outcomes]


def markdown(report: DrillReport) -> str:
    """Return the report as a Markdown page."""
    of = ", the running job itself" if report.live else ", only copies of its checkpoints" if report.copies else ""
    lines = [
        f"# Drill of {report.at}", "",
        f"`{report.job}` on {report.host}{of}: **{report.summary()}**.", "",
        "| rehearsal | | noticed | decided | training again | steps lost |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for outcome in report.outcomes:
        times = " | ".join(duration_text(value) for value in (outcome.noticed_s, outcome.decided_s, outcome.back_s))
        lost = "–" if outcome.steps_lost is None else outcome.steps_lost
        lines.append(
            f"| {outcome.name} | {'**failed**' if outcome.verdict == FAILED else outcome.verdict} | {times} | {lost} |"
        )
    lines.append("")
    for outcome in report.outcomes:
        means = f" ({outcome.means})" if outcome.means else ""
        lines += [f"## {outcome.name}: {outcome.verdict}", f"{outcome.what}{means}.", "", outcome.why, ""]
    return "\n".join(lines)
