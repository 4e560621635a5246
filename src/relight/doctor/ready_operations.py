"""Lines of ``relight ready`` for production: drills of this script, alerts, audit, roles, copies, saves, versions. Pure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from shlex import quote

from relight.doctor.facts import DoctorFacts, Drilled, RunFacts
from relight.doctor.finding import many, span
from relight.doctor.ready_proofs import steps_of

_DAY_S = 86400.0
_DRILLED_DAYS = (30, 90, 180, 365)
_UNKNOWN = 0.5
"""The most that a drill earns if it cannot be seen whether it was of this script."""
_ALERTS, _AUDIT = "alerts.to", "environment.audit"
_RULES = ("lag_steps", "every", "hourly", "daily", "weekly", "monthly", "within", "undo_window", "best")
_VERSIONS = tuple(f"checkpoint.keep.{rule}" for rule in _RULES)
_BACK_STEPS = 4
"""Checkpoints, all good, from which on there is a choice of versions without any rule."""
Named = Callable[[str, int, float | None, str, str], object]


def drilled(facts: DoctorFacts, run: RunFacts | None, path: str) -> tuple[float | None, str, str]:
    """Score, evidence and command of the rehearsal: the newest drill that was made of this run's script and settings counts."""
    if run is None:
        return None, "no run yet", f"relight drill --remember {quote(path)} SCRIPT --store {{store}}"
    script = script_of(run)
    command = f"relight drill --remember {quote(path)} {quote(script) if script else 'SCRIPT'} --store '{{store}}'"
    if not run.drills:
        return 0.0, "no drill is remembered with it", command
    judged = [(drill, *_counts(drill, script)) for drill in run.drills]
    counted = [(drill, doubt) for drill, why, doubt in judged if not why]
    if not counted:
        one, why, _ = judged[-1]
        return 0.0, f"{_of(one, facts.machine.now)} does not count: {why}", command
    one, doubt = counted[-1]
    text = _of(one, facts.machine.now)
    if not one.ok or one.time_s is None:
        return 0.0, text, command
    score = steps_of((facts.machine.now - one.time_s) / _DAY_S, _DRILLED_DAYS)
    return (min(score, _UNKNOWN), f"{text}; {doubt}", command) if doubt else (score, text, command)


def script_of(run: RunFacts) -> str:
    """The script that saved the newest checkpoint; empty if that is not recorded."""
    argv = run.environment.get("argv")
    return str(argv[0]) if isinstance(argv, list) and argv and argv[0] else ""


def reliability(facts: DoctorFacts, run: RunFacts | None, named: Named) -> Iterator[object]:
    """Lines about copies and versions."""
    path = run.path if run is not None else facts.store.url
    far = [tier for tier in run.tiers if tier.error is None] if run is not None else []
    beside = [tier for tier in far if tier.same_device]
    if far:
        yield named(
            "a copy survives the loss of this disk", 6, 0.0 if len(beside) == len(far) else 1.0,
            f"{beside[0].name} is on the same device as the store" if len(beside) == len(far) else f"{far[0].name}: {far[0].url}",
            f"relight push {quote(path)} REMOTE",
        )  # fmt: skip
    if run is not None and run.newest is not None:
        good = sum(not checkpoint.damage and not checkpoint.suspect and not checkpoint.set_aside for checkpoint in run.checkpoints)
        rules = [name.rpartition(".")[2] for name in _VERSIONS if name in facts.config.assigned]
        kept = run.pinned > 0 or bool(rules) or good >= _BACK_STEPS
        evidence = f"{many(good, 'good checkpoint')}, {run.pinned} tagged or held" + (f"; keep: {', '.join(rules)}" if rules else "")
        yield named(
            "an older version can be gone back to", 4, 1.0 if kept else 0.5 if good >= 2 else 0.0, evidence,
            f"relight tag {quote(path)} release latest",
        )  # fmt: skip


def security(facts: DoctorFacts, named: Named) -> Iterator[object]:
    """Lines about the audit log and roles."""
    is_set = _AUDIT in facts.config.assigned
    yield named(
        "who did what is recorded", 4, 1.0 if is_set else 0.0, "an audit log is set" if is_set else "no audit log is set",
        "export RELIGHT_AUDIT=STORE",
    )  # fmt: skip
    roles = facts.config.roles
    if roles is None:
        evidence, score = "the dashboard's tokens could not be read, or it has none", None
    else:
        counts = ", ".join(f"{count} {role}" for role, count in sorted(roles.items()))
        evidence = f"the dashboard's tokens: {counts}"
        score = 1.0 if any(role != "admin" for role in roles) and roles.get("admin", 0) <= 2 else 0.5
    yield named("people have the access that they need, not more", 3, score, evidence, "relight token new NAME --role viewer")


def performance(facts: DoctorFacts, run: RunFacts | None, named: Named) -> Iterator[object]:
    """The line about saves that training does not wait for."""
    seen = run.environment.get("background") if run is not None else None
    score = 1.0 if seen is True else 0.0 if seen is False else None
    evidence = {1.0: "the newest checkpoint was written in the background", 0.0: "the newest checkpoint was written in the foreground"}
    yield named(
        "training does not wait for saves", 5, score,
        "no checkpoint that records it" if score is None else evidence[score], "export RELIGHT_BACKGROUND=1",
    )  # fmt: skip


def operations(facts: DoctorFacts, named: Named) -> Iterator[object]:
    """The line about alerts."""
    is_set = _ALERTS in facts.config.assigned
    yield named(
        "an alert reaches a person", 6, 1.0 if is_set else 0.0,
        "[alerts] names receivers" if is_set else "[alerts] names no receiver", "relight alerts test",
    )  # fmt: skip


def _counts(one: Drilled, script: str) -> tuple[str, str]:
    """Why a drill does not count, and what is not known of it."""
    if one.why_not[0] == "no":
        return one.why_not[1], ""
    if script and one.script and _stem(script) != _stem(one.script):
        return f"it was made of {os.path.basename(one.script)}, and {os.path.basename(script)} saves this run", ""
    if one.why_not[0]:
        return "", one.why_not[1]
    return "", "" if script else "which script saves this run is not recorded"


def _stem(script: str) -> str:
    """A script's name without its folders and ending; of a module its last part."""
    name = os.path.basename(script)
    return name[:-3] if name.endswith(".py") else name.rpartition(".")[2]


def _of(one: Drilled, now: float) -> str:
    when = f"{span(max(0.0, now - one.time_s))} ago" if one.time_s is not None else "at no known time"
    return f"the last drill of {os.path.basename(one.script) or 'its own job'}, {when}: {one.summary}"
