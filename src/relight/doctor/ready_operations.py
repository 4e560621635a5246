"""Lines of ``relight doctor --ready`` for production: drills of this script, alerts, audit, roles, copies, saves, versions. Pure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from shlex import quote

from relight.doctor.facts import DoctorFacts, Drilled, RunFacts
from relight.doctor.ready_proofs import steps_of
from relight.settings.checkpoint_settings import KeepSettings
from relight.units import age_text, count_text

_DAY_S = 86400.0
_DRILLED_DAYS = (30, 90, 180, 365)
_UNKNOWN = 0.5
"""Largest score of a drill if it is unknown whether it drilled this script."""
_ALERTS, _AUDIT = "alerts.to", "environment.audit"
_NO_VERSIONS = {"last", "metric", "mode", "budget", "prune_abandoned"}
"""Settings of ``keep`` that keep no older version."""
_VERSIONS = tuple(f"checkpoint.keep.{rule}" for rule in KeepSettings.__struct_fields__ if rule not in _NO_VERSIONS)
_BACK_STEPS = 4
"""Number of good checkpoints that count as a choice of versions without any retention rule."""
Named = Callable[[str, int, float | None, str, str], object]


def drilled(facts: DoctorFacts, run: RunFacts | None, path: str) -> tuple[float | None, str, str]:
    """Return score, evidence and command of the rehearsal. The newest drill of this run's script and settings counts."""
    if run is None:
        return None, "no run yet", f"relight drill --remember {quote(path)} SCRIPT --store {{store}}"
    script = script_of(run)
    command = f"relight drill --remember {quote(path)} {quote(script) if script else 'SCRIPT'} --store '{{store}}'"
    if not run.drills:
        return 0.0, "no drill is recorded with the run", command
    judged = [(drill, *_counts(drill, script)) for drill in run.drills]
    counted = [(drill, doubt) for drill, why, doubt in judged if not why]
    if not counted:
        drill, why, _ = judged[-1]
        return 0.0, f"{_drill_text(drill, facts.machine.now)} does not count: {why}", command
    drill, doubt = counted[-1]
    text = _drill_text(drill, facts.machine.now)
    if not drill.ok or drill.time_s is None:
        return 0.0, text, command
    score = steps_of((facts.machine.now - drill.time_s) / _DAY_S, _DRILLED_DAYS)
    return (min(score, _UNKNOWN), f"{text}; {doubt}", command) if doubt else (score, text, command)


def script_of(run: RunFacts) -> str:
    """Return the script that saved the newest checkpoint; "" if it is not recorded."""
    argv = run.environment.get("argv")
    return str(argv[0]) if isinstance(argv, list) and argv and argv[0] else ""


def reliability(facts: DoctorFacts, run: RunFacts | None, named: Named) -> Iterator[object]:
    """Yield lines about copies and versions."""
    path = run.path if run is not None else facts.store.url
    far = [tier for tier in run.tiers if tier.error is None] if run is not None else []
    same_device = [tier for tier in far if tier.same_device]
    if far:
        yield named(
            "a copy off this disk",
            6,
            0.0 if len(same_device) == len(far) else 1.0,
            f"{same_device[0].name} is on the same device as the store"
            if len(same_device) == len(far)
            else f"{far[0].name}: {far[0].url}",
            f"relight cp {quote(path)} REMOTE",
        )
    if run is not None and run.newest is not None:
        good = sum(
            not checkpoint.damage and not checkpoint.suspect and not checkpoint.set_aside
            for checkpoint in run.checkpoints
        )
        rules = [name.rpartition(".")[2] for name in _VERSIONS if name in facts.config.assigned]
        kept = run.pinned > 0 or bool(rules) or good >= _BACK_STEPS
        evidence = f"{count_text(good, 'good checkpoint')}, {run.pinned} tagged or held" + (
            f"; keep: {', '.join(rules)}" if rules else ""
        )
        yield named(
            "restore of an older version",
            4,
            1.0 if kept else 0.5 if good >= 2 else 0.0,
            evidence,
            f"relight tag {quote(path)} release latest",
        )


def security(facts: DoctorFacts, named: Named) -> Iterator[object]:
    """Yield lines about the audit log and roles."""
    is_set = _AUDIT in facts.config.assigned
    yield named(
        "audit log of actions",
        4,
        1.0 if is_set else 0.0,
        "an audit log is set" if is_set else "no audit log is set",
        "export RELIGHT_AUDIT=STORE",
    )
    roles = facts.config.roles
    if roles is None:
        evidence, score = "the dashboard has no tokens, or they could not be read", None
    else:
        counts = ", ".join(f"{count} {role}" for role, count in sorted(roles.items()))
        evidence = f"the dashboard's tokens: {counts}"
        score = 1.0 if any(role != "admin" for role in roles) and roles.get("admin", 0) <= 2 else 0.5
    yield named("roles of dashboard tokens", 3, score, evidence, "relight token new NAME --role viewer")


def performance(facts: DoctorFacts, run: RunFacts | None, named: Named) -> Iterator[object]:
    """Yield the line about background saves."""
    seen = run.environment.get("background") if run is not None else None
    score = 1.0 if seen is True else 0.0 if seen is False else None
    evidence = {
        1.0: "the newest checkpoint was written in the background",
        0.0: "the newest checkpoint was written in the foreground",
    }
    yield named(
        "training time that saves take",
        5,
        score,
        "no checkpoint records it" if score is None else evidence[score],
        "export RELIGHT_BACKGROUND=1",
    )


def operations(facts: DoctorFacts, named: Named) -> Iterator[object]:
    """Yield the line about alerts."""
    is_set = _ALERTS in facts.config.assigned
    yield named(
        "receiver of alerts",
        6,
        1.0 if is_set else 0.0,
        "[alerts] names receivers" if is_set else "[alerts] names no receiver",
        "relight metrics alerts test",
    )


def _counts(drill: Drilled, script: str) -> tuple[str, str]:
    """Return why a drill does not count, and what is unknown about it; "" for each that does not apply."""
    if drill.why_not[0] == "no":
        return drill.why_not[1], ""
    if script and drill.script and _stem(script) != _stem(drill.script):
        return f"it drilled {os.path.basename(drill.script)}, and {os.path.basename(script)} saves this run", ""
    if drill.why_not[0]:
        return "", drill.why_not[1]
    return "", "" if script else "the run does not record its script"


def _stem(script: str) -> str:
    """Return a script's name without folders and ``.py``, or the last part of a module's name."""
    name = os.path.basename(script)
    return name[:-3] if name.endswith(".py") else name.rpartition(".")[2]


def _drill_text(drill: Drilled, now: float) -> str:
    when = f"{age_text(max(0.0, now - drill.time_s))}" if drill.time_s is not None else "at an unknown time"
    return f"the last drill of {os.path.basename(drill.script) or 'its own job'}, {when}: {drill.summary}"
