"""What a drill has shown: values, and the page that a person puts into a runbook."""

from __future__ import annotations

from typing import Any

import msgspec

from relight.drill.made_of import MadeOf

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


class RehearsalOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of one rehearsal. Seconds are from the moment at which something was broken."""

    name: str
    what: str
    """What was done."""
    verdict: str
    why: str
    """What happened; if it was not as it should be, what was wrong; or why it was not tried."""
    means: str = ""
    """By what it was broken, where there are several ways."""
    noticed_s: float | None = None
    decided_s: float | None = None
    back_s: float | None = None
    """Until all ranks had ended a step again."""
    steps_lost: int | None = None
    took_s: float = 0.0
    """All of it, with starting the job and looking at what it left."""


class DrillReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """All of them."""

    id: str
    at: str
    host: str
    job: str
    outcomes: list[RehearsalOutcome]
    seconds: float
    live: bool = False
    """Whether it was done to a running job, not to a copy."""
    kept: str = ""
    """Where stores and logs were left, if they were."""
    copies: bool = False
    """Whether it was done to copies of checkpoints alone, without a job."""
    made_of: MadeOf | None = None
    """The script and the settings; None for copies, and for drills that are older than this field."""

    @property
    def ok(self) -> bool:
        """Whether something was tried, and nothing failed."""
        return self.count(PASSED) > 0 and not self.count(FAILED)

    def count(self, verdict: str) -> int:
        """How many ended so."""
        return sum(one.verdict == verdict for one in self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        told = msgspec.to_builtins(self)
        assert isinstance(told, dict)
        return {"ok": self.ok, **told}

    def summary(self) -> str:
        """One line."""
        parts = [f"{self.count(one)} {one}" for one in (PASSED, FAILED, SKIPPED) if self.count(one)]
        return f"{', '.join(parts) or 'nothing was tried'}; {self.seconds:.0f} s"


def lines_of(report: DrillReport) -> list[str]:
    """A line each: what was done, how it ended, what it has shown."""
    return [f"{one.name}: {one.verdict}: {one.what}; {one.why}" for one in report.outcomes]


def seconds_text(value: float | None) -> str:
    """For people."""
    return "–" if value is None else f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def markdown(report: DrillReport) -> str:
    """The page."""
    of = ", the running job itself" if report.live else ", copies of its checkpoints alone" if report.copies else ""
    lines = [
        f"# Drill of {report.at}", "",
        f"`{report.job}` on {report.host}{of}: **{report.summary()}**.", "",
        "| rehearsal | | noticed | decided | training again | steps lost |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for one in report.outcomes:
        times = " | ".join(seconds_text(value) for value in (one.noticed_s, one.decided_s, one.back_s))
        lost = "–" if one.steps_lost is None else one.steps_lost
        lines.append(f"| {one.name} | {'**failed**' if one.verdict == FAILED else one.verdict} | {times} | {lost} |")
    lines.append("")
    for one in report.outcomes:
        means = f" ({one.means})" if one.means else ""
        lines += [f"## {one.name}: {one.verdict}", f"{one.what}{means}.", "", one.why, ""]
    return "\n".join(lines)
