"""Determine which checks were made. Each check runs on facts that record its reads: a check without any input is never counted. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from relight.doctor.facts import ConfigFacts, DoctorFacts, RunFacts, StoreFacts
from relight.doctor.finding import Check
from relight.doctor.judge import all_checks

FIELDS: Mapping[str, tuple[str, ...]] = {
    "accelerators": ("accelerators",), "accounts": ("supervised",), "disk": ("fsync_s", "direct", "skew_s", "exclusive", "write_bps"),
    "drills": ("drills",), "drives": ("drives",),
    "exclusive creation": ("exclusive",), "fabric": ("fabric",), "free bytes": ("free_bytes",),
    "incidents": ("incidents",), "jobs": ("live",), "kernel's log": ("kernel",), "keys": ("keys",),
    "leftovers": ("leftovers", "temporaries"),
    "listing": ("runs",), "memory": ("memory_bytes",), "memory files": ("dead_supervisors",), "mode": ("mode",), "mount": ("mount",),
    "names": ("names",), "newest checkpoint": ("environment", "exact"), "overcommit": ("commit_bytes",), "packages": ("packages",),
    "peers' plane": ("peers_plane",),
    "place": ("error", "record", "probe", "is_directory", "absent"), "proofs": ("proofs",), "rate": ("write_bps",),
    "relight.json": ("record",), "restore": ("measured",), "room": ("size_bytes", "free_inodes"), "runs": ("runs",),
    "settings": tuple(field_of.name for field_of in fields(ConfigFacts)), "shared memory": ("shm_bytes", "shm_free_bytes"),
    "time of an answer": ("answer_s",), "writing": ("probe",),
}  # fmt: skip
"""The fields that each probe of ``facts_…`` fills: if it failed, they are unknown. A probe ``tier NAME`` fills ``tiers``."""
_ASKED = frozenset({"error", "record", "probe", "file_error", "cache"})
"""Fields in which None is an answer: there is no error."""
_IN_A_STORE = frozenset({"record", "keys", "leftovers", "mode"})
"""Fields of a store that cannot be filled while there is none."""
_NEED_A_CHECKPOINT = frozenset({"memory", "overcommit", "address-space", "space"})
"""Checks that compare with the size of a checkpoint."""
_WITHOUT_RUNS = frozenset({"wrong-key"})
"""Checks that read runs and the store itself: they are made even if the store has no run."""
_OF_CHECKPOINTS = frozenset({"checkpoint-damaged"})
"""Checks of each checkpoint; only the newest ones are examined."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Names of checks by outcome, with the reason if a check was not made or was made of a part only."""

    made: tuple[str, ...] = ()
    in_part: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    """Checks that had nothing to examine: there is no run, only one node, no disk, or no such limit."""

    @property
    def known(self) -> int:
        """The number of all checks."""
        return len(self.made) + len(self.in_part) + len(self.left_out) + len(self.idle)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        return {
            "checks": len(self.made), "checks_known": self.known, "checks_in_part": dict(self.in_part),
            "checks_left_out": dict(self.left_out), "checks_idle": list(self.idle),
        }  # fmt: skip


class _Reads:
    """Fields that one check read of one part of the facts: how many had a value, how many had none, and why one is unknown."""

    def __init__(self) -> None:
        self.known = 0
        self.blank = 0
        self.unseen = ""


class _ReadRecorder:
    """A part of the facts that records each field that is read."""

    def __init__(self, part: Any, reads: _Reads) -> None:
        self._part, self._reads = part, reads

    def __getattr__(self, name: str) -> Any:
        kind = getattr(type(self._part), name, None)
        if isinstance(kind, property):
            assert kind.fget is not None
            return kind.fget(self)
        value = getattr(self._part, name)
        if name in ("name", "path", "url", "kind", "host", "now", "there"):
            return value
        why = _unseen(self._part, name)
        if why:
            self._reads.unseen = self._reads.unseen or why
        elif _is_blank(self._part, name, value):
            self._reads.blank += 1
        else:
            self._reads.known += 1
        return value


class _WatchedFacts:
    """All facts, which record the reads of each part."""

    def __init__(self, facts: DoctorFacts) -> None:
        self._facts = facts
        self.reads = {name: _Reads() for name in ("machine", "store", "config")}
        self.of_runs = [_Reads() for _ in facts.runs]
        self.machine, self.store, self.config = (
            _ReadRecorder(getattr(facts, name), reads) for name, reads in self.reads.items()
        )
        self._runs = tuple(_ReadRecorder(run, reads) for run, reads in zip(facts.runs, self.of_runs, strict=True))
        self.nodes = facts.nodes
        self.asked_runs = False

    @property
    def runs(self) -> tuple[_ReadRecorder, ...]:
        """The runs, which record their reads."""
        self.asked_runs = True
        return self._runs

    @property
    def newest_bytes(self) -> int:
        """The size of the largest newest checkpoint."""
        return self._facts.newest_bytes


def coverage(facts: DoctorFacts) -> Coverage:
    """Return which checks were made of ``facts``, which were made in part or not at all, and why."""
    made, idle = list[str](), list[str]()
    in_part, left_out = dict[str, str](), dict[str, str]()
    for check in all_checks().values():
        outcome, why = _outcome(check, facts)
        if outcome == "made":
            made.append(check.name)
        elif outcome == "idle":
            idle.append(check.name)
        else:
            (in_part if outcome == "part" else left_out)[check.name] = why
    return Coverage(tuple(made), in_part, left_out, tuple(idle))


def by_reason(checks: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Return the names of checks, grouped by their reason, the most frequent reason first."""
    return [
        (why, [name for name, reason in checks.items() if reason == why])
        for why, _ in Counter(checks.values()).most_common()
    ]


def _outcome(check: Check, facts: DoctorFacts) -> tuple[str, str]:
    """Return ``made``, ``part``, ``left`` or ``idle``, and the reason for ``part`` and ``left``."""
    watched = _WatchedFacts(facts)
    findings = list(check.evaluate(watched))  # type: ignore[arg-type] # it has all that a check reads
    if check.part == "nodes":
        missing = sum(not node.there for node in facts.nodes)
        return (
            ("part", f"{missing} of {len(facts.nodes)} nodes did not answer")
            if missing
            else ("made" if facts.nodes else "idle", "")
        )
    part = _why_partial(check, facts, watched)
    if findings:
        return ("part", part) if part else ("made", "")
    unseen = next((reads.unseen for reads in watched.reads.values() if reads.unseen), "")
    if unseen:
        return "left", unseen
    if any(reads.blank for reads in watched.reads.values()) or (
        check.name in _NEED_A_CHECKPOINT and not facts.newest_bytes
    ):
        return "idle", ""
    if watched.asked_runs and check.name not in _WITHOUT_RUNS:
        silent = [reads.unseen for reads in watched.of_runs if reads.unseen]
        if silent and len(silent) == len(facts.runs):
            return "left", silent[0]
        if all(reads.unseen or not reads.known for reads in watched.of_runs):
            return "idle", ""
    return ("part", part) if part else ("made", "")


def _why_partial(check: Check, facts: DoctorFacts, watched: _WatchedFacts) -> str:
    """Return why a check was not made of all runs or checkpoints; "" if it was."""
    if not watched.asked_runs:
        return ""
    if check.name not in _WITHOUT_RUNS and "runs" in facts.store.unseen:
        return facts.store.unseen["runs"]
    silent = sum(bool(reads.unseen) for reads in watched.of_runs)
    if silent and check.name not in _WITHOUT_RUNS:
        return f"{silent} of {len(facts.runs)} runs could not be examined"
    if check.name in _OF_CHECKPOINTS:
        stored = [stored for run in facts.runs for stored in run.checkpoints]
        seen = sum(checkpoint.damage is not None for checkpoint in stored)
        if seen < len(stored):
            return f"{seen} of {len(stored)} checkpoints examined, the newest of each run"
    return ""


def _unseen(part: Any, name: str) -> str:
    """Return why the field ``name`` is unknown; "" if its probe succeeded."""
    # a run that cannot be read
    if name != "error" and isinstance(part, RunFacts) and part.error is not None:
        return part.error.what
    for label, why in part.unseen.items():
        if name in FIELDS.get(label, ()) or (name == "tiers" and label.startswith("tier ")):
            return str(why)
    return ""


def _is_blank(part: Any, name: str, value: Any) -> bool:
    """Return whether the field has no value here, so that a check of it has nothing to examine."""
    exists = not isinstance(part, StoreFacts) or part.there
    if name in _ASKED:
        return (name == "record" and not exists) or (name == "probe" and value is None and exists and not part.probed)
    return value is None or (not exists and name in _IN_A_STORE)
