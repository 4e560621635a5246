"""Grade how ready a set-up is for an important run: five parts, each with measured, weighted and graded lines. Pure.

A line's score is between 0 and 1. A score of None means that the line could not be measured here: it counts as possible score, and earns
nothing. A line that does not apply, such as keys in an unencrypted store, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from shlex import quote
from typing import Any, NamedTuple

from relight.doctor import ready_operations as more
from relight.doctor.checks_machine import numbers, slots_bytes
from relight.doctor.checks_store import FSYNC_LEAST_S, growth_bps
from relight.doctor.facts import DoctorFacts, RunFacts
from relight.doctor.finding import Finding
from relight.doctor.ready_operations import drilled
from relight.doctor.ready_proofs import exactness, restorable
from relight.doctor.ready_proofs import steps_of as _steps
from relight.units import count_text, duration_text, rate_text, size_text

PARTS = ("reliability", "security", "performance", "scalability", "operations")
_GRADES = ((0.9, "A"), (0.75, "B"), (0.5, "C"), (0.25, "D"))
_DAY_S = 86400.0
_NEED = ("relight ls ", "relight prune ", "relight cp ")
"""Commands that do nothing for a run without checkpoints."""


class ReadinessLine(NamedTuple):
    """One graded line."""

    part: str
    name: str
    weight: int
    score: float | None
    evidence: str
    command: str
    """A command that would raise the grade; "" if there is nothing to do."""

    @property
    def grade(self) -> str:
        """A letter; "–" if the line could not be measured."""
        return "–" if self.score is None else grade_of(self.score)


@dataclass(frozen=True, slots=True)
class Readiness:
    """All lines."""

    lines: tuple[ReadinessLine, ...]
    run: str = ""
    """Path of the graded run: in a store with several runs, the one saved to last; "" without a run."""

    def score(self, part: str | None = None) -> float:
        """Return the weighted score, 0 to 1, of one part or of all. Lines that could not be measured score 0."""
        mine = [line for line in self.lines if part in (None, line.part)]
        total = sum(line.weight for line in mine)
        return sum(line.weight * (line.score or 0.0) for line in mine) / total if total else 0.0

    def grade(self, part: str | None = None) -> str:
        """Return the grade; "–" for a part without any measured line."""
        mine = [line for line in self.lines if part in (None, line.part)]
        return "–" if all(line.score is None for line in mine) else grade_of(self.score(part))

    @property
    def unmeasured(self) -> list[ReadinessLine]:
        """Lines that could not be measured here."""
        return [line for line in self.lines if line.score is None]

    @property
    def is_ready(self) -> bool:
        """Whether the grade is C or better."""
        return self.grade() in ("A", "B", "C")

    @property
    def lacking(self) -> list[str]:
        """Names of the lines that lose half of their weight or more, the largest loss first. Unmeasured lines are none of them."""
        lost = {
            line.name: line.weight * (1.0 - line.score)
            for line in self.lines
            if line.score is not None and line.score <= 0.5
        }
        return sorted(lost, key=lambda name: -lost[name])

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        return {
            "run": self.run,
            "ready": self.is_ready,
            "lacks": self.lacking,
            "grade": self.grade(),
            "score": round(self.score(), 4),
            "lines": len(self.lines),
            "not_measurable": len(self.unmeasured),
            "parts": {part: {"grade": self.grade(part), "score": round(self.score(part), 4)} for part in PARTS},
            "list": [{**line._asdict(), "grade": line.grade} for line in self.lines],
        }


def grade_of(score: float) -> str:
    """Return the grade, A to F, of a score."""
    return next((letter for least, letter in _GRADES if score >= least - 1e-9), "F")


def grade(facts: DoctorFacts, findings: list[Finding]) -> Readiness:
    """Grade the run that saved last, or the store alone if it has no run. ``findings`` are those of ``judge``."""
    run = max(facts.runs, key=_recent, default=None)
    lines = tuple(line for part in _PARTS for line in part(facts, run, findings))
    return Readiness(lines, run.path if run is not None else "")


def _recent(run: RunFacts) -> tuple[float, int]:
    return (run.newest.time_s or 0.0, run.newest.step) if run.newest is not None else (-1.0, -1)


def _reliability(facts: DoctorFacts, run: RunFacts | None, findings: list[Finding]) -> Iterator[ReadinessLine]:
    path = run.path if run is not None else facts.store.url
    named = _line("reliability")
    newest = run.newest if run is not None else None
    if newest is None:
        yield named("restore of the newest checkpoint", 10, None, "no checkpoint yet", "relight demo")
    elif run is not None and run.measured is not None:
        seen = run.measured
        what = "every byte read" if seen.whole else f"{size_text(seen.bytes)} of {size_text(newest.bytes)} read"
        yield named(
            "restore of the newest checkpoint",
            10,
            0.0 if seen.damage else 1.0 if seen.whole else 0.9,
            seen.damage[0] if seen.damage else f"step {newest.step}: {what} as committed",
            f"relight verify {quote(path)} latest",
        )
    elif newest.damage is None:
        yield named(
            "restore of the newest checkpoint",
            10,
            None,
            "it could not be checked",
            f"relight verify {quote(path)} latest",
        )
    else:
        assert run is not None
        score, evidence = (0.0, newest.damage[0]) if newest.damage else restorable(run, newest, facts.machine.now)
        yield named(
            "restore of the newest checkpoint", 10, score, evidence, f"relight doctor {quote(path)} --ready --measure"
        )
    good = sum(not checkpoint.damage for checkpoint in run.checkpoints) if run is not None else 0
    yield named(
        "older checkpoints to fall back on",
        6,
        min(1.0, max(0, good - 1) / 2) if run is not None and newest is not None else None,
        f"{count_text(good, 'checkpoint')} not known to be damaged" if good else "no checkpoint yet",
        f"relight ls {quote(path)}",
    )
    yield named(
        "copies in further tiers",
        8,
        _tiers(run),
        _tiers_text(run),
        f"relight cp {quote(path)} REMOTE" if run is None or not run.tiers else f"relight cp {quote(path)} --tiers",
    )
    yield named("rehearsal of recovery", 8, *drilled(facts, run, path))
    yield from more.reliability(facts, run, named)  # type: ignore[misc] # they are lines
    exact, shown = exactness(facts, run)
    yield named("proof of an exact resume", 4, exact, shown, f"relight drill --prove --remember {quote(path)} SCRIPT")
    every = run.interval_s if run is not None else None
    yield named(
        "training lost by a failure",
        6,
        None if every is None else _steps(every, (600, 1800, 3600, 14400)),
        "fewer than four checkpoints" if every is None else f"a checkpoint every {duration_text(every)}",
        f"relight bench {quote(facts.store.url)}",
    )
    yield named(
        "exclusive commits",
        6,
        _score_of(facts.store.exclusive),
        {None: "not tried", True: "the second creation of a name failed", False: "a name was created twice"}[
            facts.store.exclusive
        ],
        f"relight doctor {quote(facts.store.url)}",
    )
    if facts.store.kind == "disk":
        mount, took = facts.store.mount, facts.store.fsync_s
        volatile = mount is not None and (
            mount.is_memory or (mount.source.startswith("/dev/") and took is not None and took < FSYNC_LEAST_S)
        )
        bad = volatile or any(finding.name in ("preload", "barriers", "fsync") for finding in findings)
        yield named(
            "durability in a power cut",
            8,
            None if took is None else 0.0 if bad else 1.0,
            "not tried"
            if took is None
            else f"4 KiB durable in {duration_text(took)} on {mount.type if mount is not None else 'this file system'}",
            f"findmnt -T {quote(facts.store.url)}",
        )
    if drives := facts.store.drives:
        bad_drives = [drive for drive in drives if drive.status != "good"]
        yield named(
            "drives of the mirrored store",
            6,
            0.0 if bad_drives else 1.0,
            f"{bad_drives[0].path} is {bad_drives[0].status}"
            if bad_drives
            else f"each file is on two of {len(drives)} drives",
            f"relight verify {quote(path)} --repair",
        )
    if run is not None:
        yield named(
            "integrity of the log",
            6,
            0.0 if run.faults or run.error is not None else 1.0,
            f"{run.records} records, {len(run.faults)} damaged" if run.error is None else run.error.what,
            f"relight log {quote(path)}",
        )
        yield named(
            "supervision by relight run",
            5,
            1.0 if run.supervised else 0.0,
            "it ran under relight run" if run.supervised else "no job of the run ran under relight run",
            "relight run SCRIPT",
        )


def _security(facts: DoctorFacts, run: RunFacts | None, findings: list[Finding]) -> Iterator[ReadinessLine]:
    store, named = facts.store, _line("security")
    url = store.url
    yield from more.security(facts, named)  # type: ignore[misc]
    yield named(
        "encryption of checkpoints",
        6,
        _score_of(store.encrypted),
        {
            None: "the store cannot be opened",
            True: f"{count_text(len(store.keys), 'key')} for it",
            False: "the store is not encrypted",
        }[store.encrypted],
        f"relight keys rekey {quote(url)} --plain",
    )
    if store.encrypted:
        yield named(
            "a second key",
            4,
            min(1.0, max(0, len(store.keys) - 1)),
            f"{count_text(len(store.keys), 'key')} for it",
            f"relight keys add {quote(url)} file:NEW",
        )
        oldest = max((key.age_days for key in store.keys), default=None)
        yield named(
            "rotation of keys",
            2,
            None if oldest is None else 1.0 if oldest <= 365 else 0.25,
            "no key could be read" if oldest is None else f"the oldest is {count_text(oldest, 'day')} old",
            f"relight keys rotate {quote(url)} OLD NEW",
        )
    if facts.config.key_files:
        open_to = [file for file in facts.config.key_files if file.mode & 0o077]
        yield named(
            "access to key files",
            6,
            0.0 if open_to else 1.0,
            f"{open_to[0].path} has mode {open_to[0].mode:04o}"
            if open_to
            else f"only its owner can read {count_text(len(facts.config.key_files), 'key file')}",
            f"chmod 600 {quote((open_to or facts.config.key_files)[0].path)}",
        )
    trusted = "RELIGHT_TRUST" in facts.config.settings
    yield named(
        "signatures of records",
        4,
        1.0 if trusted else 0.0,
        "RELIGHT_TRUST names the trusted signers" if trusted else "anyone who can write to the store can add a record",
        "relight keys new --signing FILE",
    )
    yield named(
        "detection of a rolled back log",
        2,
        1.0 if "RELIGHT_ANCHOR" in facts.config.settings else 0.0,
        "RELIGHT_ANCHOR is set"
        if "RELIGHT_ANCHOR" in facts.config.settings
        else "the log's newest record is recorded nowhere else",
        "export RELIGHT_ANCHOR=URL",
    )
    if store.kind == "disk":
        mode = store.mode
        score = None if mode is None else 0.0 if mode & 0o002 else 0.75 if mode & 0o020 else 1.0
        yield named(
            "write access to the store",
            6,
            score,
            "it does not exist yet" if mode is None else f"mode {mode:04o}",
            f"chmod go-w {quote(url)}",
        )
    if store.kind == "object":
        clear = any(finding.name == "endpoint-clear" for finding in findings)
        yield named(
            "TLS of connections",
            6,
            0.0 if clear else 1.0,
            facts.config.endpoint or "the provider's own endpoint",
            "export AWS_ENDPOINT_URL=https://…",
        )


def _performance(facts: DoctorFacts, run: RunFacts | None, findings: list[Finding]) -> Iterator[ReadinessLine]:
    store, named = facts.store, _line("performance")
    yield from more.performance(facts, run, named)  # type: ignore[misc]
    need, memory = slots_bytes(facts), facts.machine.memory_bytes
    yield named(
        "memory for two copies of the state",
        6,
        None if not need or memory is None else min(1.0, memory / need),
        "no checkpoint yet, so its size is unknown"
        if not need
        else f"{size_text(need)} needed, {size_text(memory or 0)} available",
        f"relight bench {quote(store.url)}",
    )
    newest, every = (run.newest, run.interval_s) if run is not None else (None, None)
    rate = store.write_bps
    if rate and newest is not None and every:
        takes = newest.new_bytes / rate
        yield named(
            "time until a save is durable",
            6,
            _steps(takes / every, (0.25, 0.5, 0.75, 1.0)),
            f"a save takes {duration_text(takes)} at {rate_text(rate)}, and is due every {duration_text(every)}",
            f"relight bench {quote(store.url)}",
        )
    else:
        yield named(
            "time until a save is durable",
            6,
            None,
            "the write rate or the usual interval is unknown",
            f"relight bench {quote(store.url)}",
        )
    seen = run.measured if run is not None else None
    if seen is not None and seen.seconds > 0 and newest is not None:
        whole_s = seen.seconds * newest.bytes / max(1, seen.bytes)
        yield named(
            "time of a restore",
            6,
            _steps(whole_s, (60, 180, 600, 1800)),
            f"{size_text(seen.bytes)} in {duration_text(seen.seconds)} ({rate_text(seen.bytes / seen.seconds)})",
            f"relight bench {quote(store.url)}",
        )
    else:
        yield named(
            "time of a restore",
            6,
            None,
            "not measured: --measure reads the newest checkpoint",
            f"relight doctor {quote(run.path if run is not None else store.url)} --ready --measure",
        )
    if store.kind == "disk":
        yield named(
            "saves past the page cache",
            2,
            _score_of(store.direct),
            {None: "not tried", True: "O_DIRECT works", False: "O_DIRECT is refused"}[store.direct],
            f"relight bench {quote(store.url)}",
        )
    plane = facts.machine.peers_plane
    if plane is not None:
        yield named(
            "RDMA between peers",
            1,
            1.0 if plane.plane == "rdma" or not facts.machine.fabric else 0.0,
            f"{plane.plane.upper()}: {plane.why}",
            "pip install --no-deps nixl-cu12",
        )
    yield named(
        "response time of the store",
        3,
        None if store.answer_s is None else _steps(store.answer_s, (0.1, 0.5, 1.0, 2.0)),
        "not measured" if store.answer_s is None else f"a small read takes {duration_text(store.answer_s)}",
        f"relight ls {quote(store.url)}",
    )


def _scalability(facts: DoctorFacts, run: RunFacts | None, findings: list[Finding]) -> Iterator[ReadinessLine]:
    store, named = facts.store, _line("scalability")
    path = run.path if run is not None else store.url
    need, free = facts.newest_bytes, store.free_bytes
    if store.kind in ("disk", "stripe"):
        yield named(
            "space for more checkpoints",
            6,
            None if free is None or not need else min(1.0, free / need / 10),
            "no checkpoint yet, so its size is unknown"
            if not need or free is None
            else f"{size_text(free)} free: {free // need} more checkpoints as large as the newest",
            f"relight prune {quote(path)} --keep-last 3 --dry-run",
        )
        if store.free_inodes is not None:
            yield named(
                "free inodes",
                2,
                min(1.0, store.free_inodes / 100_000),
                f"{store.free_inodes:,} free",
                f"df -i {quote(store.url)}",
            )
    if run is not None and len(run.checkpoints) + run.retired >= 4:
        growth = growth_bps(facts)
        lasts = free / growth if growth and free is not None else math.inf
        score = (
            1.0
            if run.retired
            else None
            if growth is None
            else _steps(-lasts, (-90 * _DAY_S, -30 * _DAY_S, -7 * _DAY_S, -_DAY_S))
        )
        text = (
            f"{count_text(run.retired, 'checkpoint')} retired so far"
            if run.retired
            else "no checkpoint was retired yet"
        )
        yield named(
            "deletion of old checkpoints",
            5,
            score,
            text + (f"; full in {duration_text(lasts)}" if math.isfinite(lasts) and not run.retired else ""),
            f"relight prune {quote(path)} --keep-last 3 --dry-run",
        )
    else:
        yield named(
            "deletion of old checkpoints",
            5,
            None,
            "fewer than four checkpoints",
            f"relight prune {quote(path)} --keep-last 3 --dry-run",
        )
    files = facts.machine.limits.get("open files")
    yield named(
        "limit of open files",
        3,
        1.0 if files is None else _steps(-files, (-16384, -4096, -1024, -512)),
        "no limit of open files" if files is None else f"{files:,} open files",
        "ulimit -n 65536",
    )
    if run is not None:
        yield named(
            "length of the log",
            2,
            _steps(run.records, (10_000, 50_000, 200_000, 1_000_000)),
            f"{run.records:,} records",
            f"relight log {quote(path)}",
        )
    if facts.machine.accelerators or facts.machine.fabric:
        limited = any(finding.name == "memlock" for finding in findings)
        yield named(
            "limit of locked memory",
            3,
            0.0 if limited else 1.0,
            "the limit is too low" if limited else "the limit suffices for fabrics and pinned buffers",
            "ulimit -l unlimited",
        )


def _operations(facts: DoctorFacts, run: RunFacts | None, findings: list[Finding]) -> Iterator[ReadinessLine]:
    named = _line("operations")
    errors, warnings = (sum(finding.severity == severity for finding in findings) for severity in ("error", "warning"))
    target = run.path if run is not None else facts.store.url
    yield from more.operations(facts, named)  # type: ignore[misc]
    yield named(
        "findings of relight doctor",
        8,
        0.0 if errors else max(0.25, 1.0 - 0.25 * warnings),
        f"{count_text(errors, 'error')}, {count_text(warnings, 'warning')}",
        f"relight doctor {quote(target)}",
    )
    packages = facts.machine.packages
    old = [
        package
        for package in packages
        if not package.installed or (package.least and numbers(package.installed) < numbers(package.least))
    ]
    yield named(
        "versions of packages",
        4,
        None if not packages else 0.0 if old else 1.0,
        "the metadata of Relight's package are missing"
        if not packages
        else f"{old[0].name} {old[0].installed or 'is missing'}"
        if old
        else count_text(len(packages), "package"),
        old[0].command if old else "relight doctor",
    )
    bad = len(facts.config.unknown) + len(facts.config.bad) + (facts.config.file_error is not None)
    yield named(
        "validity of settings",
        5,
        0.0 if bad else 1.0,
        f"{bad} invalid" if bad else f"{len(facts.config.settings)} set, all valid",
        f"relight doctor {quote(target)}",
    )
    yield named(
        "length of the grace period",
        3,
        1.0 if facts.config.grace else 0.0,
        "RELIGHT_GRACE_S or relight.toml sets it"
        if facts.config.grace
        else "no setting states the time between SIGTERM and SIGKILL",
        "export RELIGHT_GRACE_S=30",
    )
    if run is not None:
        left = len(run.leftovers) + len(run.temporaries)
        yield named(
            "leftovers of earlier saves",
            2,
            1.0 if not left else 0.5,
            count_text(left, "leftover"),
            f"relight doctor {quote(target)} --fix",
        )
        skew = (run.newest_record_s is not None and run.newest_record_s - facts.machine.now > 300) or run.back_s > 300
        yield named(
            "agreement of clocks",
            3,
            0.0 if skew else 1.0,
            "a record's time is in the future, or before the previous record"
            if skew
            else f"{run.records} records in order",
            "chronyc tracking",
        )
        failed = [
            incident
            for incident in run.incidents
            if incident.time_s is not None and facts.machine.now - incident.time_s < 7 * _DAY_S
        ]
        if run.supervised:
            yield named(
                "failures within a week",
                3,
                _steps(len(failed), (0, 2, 5, 20)),
                f"{count_text(len(failed), 'failure')} in 7 days",
                f"relight incidents {quote(target)}",
            )


_PARTS: tuple[Callable[[DoctorFacts, RunFacts | None, list[Finding]], Iterator[ReadinessLine]], ...] = (
    _reliability,
    _security,
    _performance,
    _scalability,
    _operations,
)


def _line(part: str) -> Callable[[str, int, float | None, str, str], ReadinessLine]:
    """Return a function that makes lines of ``part``. A line names no command that needs checkpoints while they are missing."""

    def line(name: str, weight: int, score: float | None, evidence: str, command: str) -> ReadinessLine:
        waits = evidence.startswith(("no checkpoint yet", "fewer than four")) and command.startswith(_NEED)
        return ReadinessLine(part, name, weight, score, evidence, "" if score == 1.0 or waits else command)

    return line


def _score_of(value: bool | None) -> float | None:
    return None if value is None else float(value)


def _tiers(run: RunFacts | None) -> float | None:
    if run is None or run.newest is None:
        return None
    if not run.tiers:
        return 0.0
    return (
        1.0
        if any(tier.error is None and not tier.lacks for tier in run.tiers)
        else 0.5
        if any(tier.error is None for tier in run.tiers)
        else 0.0
    )


def _tiers_text(run: RunFacts | None) -> str:
    if run is None or run.newest is None:
        return "no checkpoint yet"
    if not run.tiers:
        return "the run has no further tier"
    return ", ".join(
        f"{tier.name}: {'does not answer' if tier.error else f'lacks {tier.lacks}' if tier.lacks else 'complete'}"
        for tier in run.tiers
    )
