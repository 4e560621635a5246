"""Explain the text of a failure: its kind, the section of docs/troubleshooting.md, what to do.

The kind is the one that ``relight run`` would assign, by the same patterns. Pure, except for ``read_log``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from relight.doctor.complaints import COMPLAINT_MAX, PROGRAM_MESSAGES, USER_DESCRIPTIONS, Complaint, with_names
from relight.errors import ConfigError
from relight.supervise.classify import classify
from relight.supervise.facts import KINDS, FailureEvidence, Worker

LOG_BYTES_MAX = 8 << 20
"""Bytes that are read at the end of a log."""
LINES_MAX = 20_000
_LINE_MAX = 4000


class Symptom(NamedTuple):
    """Pattern of a message, with the section about it: a heading of docs/troubleshooting.md, or a kind of its table."""

    words: re.Pattern[str]
    section: str
    means: str
    do: str
    command: str = ""


def _entry(words: str, section: str, means: str, do: str, command: str = "") -> Symptom:
    return Symptom(re.compile(words), section, means, do, command)


SYMPTOMS: tuple[Symptom, ...] = (
    # The order matters: the first pattern that matches a line wins, so narrower patterns come first.
    _entry(
        r"this Checkpointer was closed before this call",
        "This Checkpointer was closed before this call",
        "a Checkpointer is used after it was closed; the message names what closed it",
        "make a new Checkpointer and call its restore()",
    ),
    _entry(
        r"(still trains|may still train) (this run|\S+:)|process \d+ on (this )?host .* may still train",
        "Process … still trains this run",
        "another process trains this run, and a second start does not take it over without takeover=",
        'stop that process, give this one another run name, or set takeover="take"',
        "relight log RUN",
    ),
    _entry(
        r"another handler was installed after Relight's|make no save: this is not the main thread",
        "SIGTERM: another handler was installed after Relight's, this is not the main thread",
        "the signal triggers no save",
        "install handlers before the first restore() or step(), in the main thread",
    ),
    _entry(
        r"ranks? saved it, and .* continues?|starts its epoch again|continues after .* samples|[Rr]anks were not alike in it",
        "… ranks saved it, and … continue",
        "the number of ranks has changed; a loader that cannot continue restarts its training epoch, and the message states why",
        "nothing, if the message's reason is acceptable; docs/guarantees.md lists all reasons",
    ),
    _entry(
        r"stored by .*, the live (optimizer|scheduler) is ",
        "stored by AdamW, the live optimizer is SGD",
        "the script builds another class of optimizer or scheduler than the one that was saved",
        "build the stored class; or restore(strict=False), which restores what fits and lists the rest",
        "relight show RUN",
    ),
    _entry(
        r"this resume may not be bit-exact",
        "This resume may not be bit-exact",
        "a setting that affects arithmetic has changed since the checkpoint was saved; the message names it",
        "set the same number of threads and versions; or accept the difference: the state itself is restored bit-exactly",
        "relight show RUN",
    ),
    _entry(
        r"every trainable tensor (saved at step \S+ )?equals the one saved",
        "Every trainable tensor equals the one saved before",
        "the model given to the Checkpointer is not the one that is trained, or the learning rate is 0",
        "give the Checkpointer the model that the optimizer trains, after any wrapping",
    ),
    _entry(
        r"no more saves are made|the ranks have lost their connection",
        "No more saves are made, the ranks have lost their connection",
        "a rank has ended, hangs, or made a different call from the others",
        "start the job again: it resumes from the newest checkpoint",
        "relight incidents RUN",
    ),
    _entry(
        r" on rank [\d, ]+ is not what it is on | is not the same on ranks \d|ranks differed in what they should have had in common",
        "… is not what it is on …, a suspect checkpoint",
        "ranks that should hold the same tensor hold different values",
        "if each rank has its own value, name the component in per_rank=[…]; otherwise a machine computes wrongly: check it",
        "relight log RUN",
    ),
    _entry(
        r"checkpoint \S+ (\(step \d+\) )?is skipped",
        "A checkpoint is skipped",
        "it is damaged; the message names file, chunk and tensor; the run continues from the previous checkpoint",
        "check the disk; repair the checkpoint from another tier, if the run has one",
        "relight verify RUN",
    ),
    _entry(
        r"this log record is ignored|record of the (run's )?log is damaged",
        "A log record is ignored",
        "a file in log/ is damaged or missing; the other records remain valid",
        "restore the file from a copy; check the disk",
        "relight log RUN",
    ),
    _entry(
        r"ignores 'create if absent'|ignores \"create if absent\"",
        "This server ignores 'create if absent'",
        "if two processes commit at once, each would believe that it alone did",
        "upgrade the server, or choose another; see docs/guides/object-stores.md",
        "relight doctor STORE",
    ),
    _entry(
        r"this run has checkpoints, the newest of step \d+, and this process restored none",
        "This run has checkpoints, … and this process restored none",
        "the script saves into a run that has checkpoints, and did not restore one: it would train from scratch and ignore them",
        "call ckpt.restore() before the loop; to begin from scratch and keep them, use Checkpointer(…, fresh=True)",
        "relight ls RUN",
    ),
    _entry(
        r"this run's log is missing, and \d+ checkpoint directories|the newest records of this run's log are missing|log is being rebuilt",
        "This run's log is missing, and … checkpoint directories are there",
        "log/ is missing, or older than the checkpoint directories: the run was copied without it, or it was deleted",
        "copy log/ back from where the run came from, or rebuild it from the checkpoint directories",
        "relight log RUN --rebuild",
    ),
    _entry(
        r"this run has no valid checkpoint: \d+ records",
        "This run has no valid checkpoint: … records of its log are damaged, or signed by a key that is not trusted",
        "every record of its log is damaged, or has a signature that trust= does not name",
        "add the signer to trust=; or restore the log from a copy; to begin from scratch, give the run another name",
        "relight verify RUN",
    ),
    _entry(
        r"the nearest tier has no checkpoint, and",
        "The nearest tier has no checkpoint, and … may have some, but does not answer",
        "its checkpoints may be in a tier that is unreachable now",
        "make that tier reachable; to begin from scratch, give the run another name",
        "relight doctor RUN",
    ),
    _entry(
        r"attempt \S+ was superseded by attempt \S+ there",
        "Attempt … was superseded by attempt … there",
        "another job has taken over a further tier of this run",
        "stop the job that you did not intend",
        "relight log RUN",
    ),
    _entry(
        r"was damaged on the first read, and intact on the second",
        "… was damaged on the first read, and intact on the second",
        "memory, a cable, a network card or a server flips bits; nothing was lost this time",
        "check the machine's error counters",
        "ras-mc-ctl --errors",
    ),
    _entry(
        r"\bFenced\b|attempt \S+ of this run was superseded|\bwas superseded by attempt\b",
        "fenced",
        "a newer attempt has taken over this run",
        "stop this process, or give it its own run name",
        "relight log RUN",
    ),
    _entry(
        r"\bNoSpace\b|\bENOSPC\b|\bEDQUOT\b|No space left on device|[Dd]isk quota exceeded|no room for (it|a|the)"
        r"|of shared memory could not be allocated"
        r"|are wanted, (the machine has|the memory limit)",
        "no_space",
        "disk space, quota, inodes or memory are exhausted",
        "free space: run the command, then once more without --dry-run and with --yes; set what to keep: keep=relight.keep(last=…)",
        "relight prune RUN --keep-last 3 --dry-run",
    ),
    _entry(
        r"\bNoMemory\b|\bno memory for (a tensor|a buffer|the state|the import|restoring|planning)",
        "no_memory",
        "a restore, a load or an import has no memory for what it reads; the checkpoint is intact",
        "give the process more memory, or read less: restore(only=[…]), relight.load(only=[…]) or mmap=True",
        "relight show RUN",
    ),
    _entry(
        r"\bUncertain\b|created, but its name may not be durable|it may have been created|cannot determine who wrote this record",
        "uncertain",
        "a commit was made and may not survive a power cut, or its answer was lost",
        "nothing: the next start reads from the store whether the checkpoint exists",
        "relight ls RUN",
    ),
    _entry(
        r"\bWrongKey\b|this store is (not )?encrypted|none of (these|the) keys|no key at hand",
        "wrong_key",
        "the store is encrypted and no given key opens it; or a key was given and the store is not encrypted",
        "set RELIGHT_KEY=file:PATH, or encrypt=",
        "relight keys status STORE",
    ),
    _entry(r"\bLeaseHeld\b", "lease", "another process holds a lease that this one needs", "wait, and try again"),
    _entry(
        r"\bRankTimeout\b|(was|were) not there when the others were ",
        "late_ranks",
        "some ranks did not arrive where the others waited; the error names them",
        "read those ranks' logs; every rank must make the same calls of the Checkpointer, in the same order",
        "relight incidents RUN",
    ),
    _entry(
        r"\bOthersFailed\b|save aborted: rank \d|another rank could not (write|save)",
        "others_failed",
        "another rank could not write its part, or its wait timed out",
        "read that rank's log for the reason",
        "relight incidents RUN",
    ),
    _entry(
        r"\bReplicasDiffer\b",
        "replicas_differ",
        "replicas of a tensor differ, so one rank computes wrongly",
        "nothing under relight run: it rolls back to before the difference, and leaves out a machine that often causes one",
        "relight incidents RUN",
    ),
    _entry(
        r"\bDiverged\b|\bloss is (nan|inf)\b",
        "diverged",
        "the loss is NaN or infinite, or jumped and stayed high",
        "nothing under relight run: it rolls back to before the divergence",
        "relight incidents RUN",
    ),
    _entry(
        r"\bNewerFormat\b|comes from a newer Relight|needs features this Relight lacks|this Relight reads up to",
        "newer",
        "a newer Relight wrote it, in a format that this version cannot read",
        "upgrade Relight",
        "relight --version",
    ),
    _entry(
        r"\bUnsafeContent\b|a symbolic link(,| where)|invalid name in a store",
        "unsafe",
        "a file asks for something that no reader may do",
        "do not trust that store",
        "relight --version",
    ),
    _entry(
        r"\bRunRemoved\b|the run's log is gone",
        "removed",
        "the run's directory or its log was moved or deleted during training",
        "move it back; or set on_failure=relight.failure_policy(begin_again=True), which begins a new log there",
    ),
    _entry(
        r"\bRunReplaced\b|the run's directory was replaced",
        "replaced",
        "another directory, such as an older copy, is in the place of the run's while it trains",
        "move the trained directory back; or stop, and start again to continue from the copy",
        "relight log RUN",
    ),
    _entry(
        r"\bCorruptCheckpoint\b|is not what was committed|bytes long, \d+ were committed|none of .* checkpoints? can be restored",
        "corrupt",
        "bytes are missing, or differ from what was committed",
        "list all damage, and check the disk",
        "relight verify RUN",
    ),
    _entry(
        r"\bIncompatibleState\b|stored and live state do not fit",
        "incompatible",
        "stored and live state do not fit, or a value cannot be saved",
        "fix what the error lists; or use strict=False, only=[…], map={…}",
        "relight show RUN",
    ),
    _entry(
        r"\bInternalError\b|internal error in Relight",
        "internal",
        "a bug in Relight; the store did not fail",
        "report the traceback; training continues, and later saves are tried",
        "relight doctor RUN",
    ),
    _entry(
        r"\bConfigError\b|\[supervise\] has no ",
        "config",
        "an option or an argument is wrong",
        "follow the hint after the arrow",
    ),
    _entry(
        r"\bCheckpointNotFound\b|this path does not exist|no run '[^']*'|[Nn]o Relight store",
        "not_found",
        "the store, run, tag, step, id or file does not exist",
        "list the store; check the path",
        "relight ls STORE",
    ),
    _entry(
        r"\bStoreUnavailable\b|\b(EACCES|EROFS|EIO|ESTALE|EPERM)\b|Read-only file system|Stale file handle|Input/output error",
        "store",
        "the store refused an operation",
        "check permissions, mounts and the disk's health; later saves are still tried",
        "relight doctor STORE",
    ),
    # The cause of a failed save is often in the same line, so this comes after the patterns of causes.
    _entry(
        r"\bSaveFailed\b|the save at step \d+ failed",
        "save_failed",
        "a save did not become a checkpoint; training may continue",
        "read its cause in the message, or in the lines after it",
        "relight doctor RUN",
    ),
    # Warnings come last: they are not failures, and a job's log may have many of them.
    _entry(
        r"optimizer \S+ steps \d+ parameters of .*, and no checkpoint has its state",
        "optimizer … steps … parameters of …, and no checkpoint has its state",
        "the script has an optimizer that was not given to the Checkpointer: after a resume its state would begin from zero",
        "give it to the Checkpointer under its own name: Checkpointer(…, optimizer2=opt)",
    ),
    _entry(
        r"step \d+: save postponed, ",
        "step …: save postponed",
        "the agent is not ready yet (at the first save of a process), or the previous save is still being written and no slot is free;"
        " the save is taken at the first step that can be saved",
        "nothing; if no slot is free often, save less often, or increase relight.Limits(memory=) so that another slot fits",
    ),
)

_SILENT = ("unknown", "memory", "device memory", "killed")
"""Kinds for which a user's own description is more specific than the kind."""

_BY_KIND: dict[str, tuple[str, str]] = {
    "user": ("fix the error: a restart would only repeat it", ""),
    "memory": (
        "give the job more, or reduce its use: smaller batches, fewer workers, relight.Limits(memory=…)",
        "relight doctor RUN",
    ),
    "device memory": ("use a smaller micro-batch (ckpt.micro_batch_split), or activation checkpointing", ""),
    "hardware": ("take the machine out of the job and check it", "dmesg --level=err,crit"),
    "network": ("find the rank that ended first: the others only report that they lost it", "relight incidents RUN"),
    "storage": ("check the store's free space, its mount and its disk", "relight doctor STORE"),
    "data": ("check the sample or the worker that the error names", ""),
    "numerical": (
        "roll back to before the error, and skip the samples that caused it: relight run does both",
        "relight incidents RUN",
    ),
    "preemption": ("set the grace period: RELIGHT_GRACE_S; Relight then saves before the end", ""),
    "hang": ("check where each rank stood", "relight incidents RUN latest"),
    "crash": ("find the stack trace above the error; run with PYTHONFAULTHANDLER=1", ""),
    "killed": ("check whether memory ran out", "dmesg | grep -i oom"),
    "fenced": ("stop this process, or give it its own run name", "relight log RUN"),
    "unknown": ("run it under relight run, which records the state of every rank", "relight incidents RUN"),
}


@dataclass(frozen=True, slots=True)
class Explained:
    """Explanation of a failure's text.

    ``kind`` is one of ``supervise.facts.KINDS``. ``section`` is a heading of docs/troubleshooting.md or a kind of its table.
    """

    kind: str
    kind_means: str
    line: str
    """The line that was recognised."""
    section: str
    means: str
    do: str
    command: str
    clues: tuple[str, ...]

    @property
    def known(self) -> bool:
        """Whether the text was recognised."""
        return bool(self.section) or self.kind != "unknown"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        return {"known": self.known, **asdict(self)}


def explain(text: str) -> Explained:
    """Explain ``text``, an error message or the end of a log. ``known`` of the result is False if nothing was recognised."""
    lines = [line[:_LINE_MAX] for line in text.splitlines() if line.strip()][-LINES_MAX:]
    failure = classify(FailureEvidence(workers=(Worker(0, exit=1, tail=tuple(lines)),)))
    symptom, line = _symptom(lines)
    kind = failure.kind
    if symptom is None and kind in _SILENT and len(text) <= COMPLAINT_MAX:
        symptom, line = _complaint(USER_DESCRIPTIONS, lines)
    clue = failure.clues[0].what.partition(": ")[2] if failure.clues else ""
    means, do = (symptom.means, symptom.do) if symptom is not None else (KINDS[kind], _BY_KIND[kind][0])
    return Explained(
        kind=kind, kind_means=KINDS[kind], line=(line or clue or (lines[-1] if lines else "")).strip()[:500],
        section=symptom.section if symptom is not None else "", means=means, do=do,
        command=symptom.command if symptom is not None else _BY_KIND[kind][1],
        clues=tuple(clue.what for clue in failure.clues[:5]),
    )  # fmt: skip


def _symptom(lines: list[str]) -> tuple[Symptom | Complaint | None, str]:
    """Return the first symptom that matches a line, with the last such line. Error numbers also match by their names."""
    named = [with_names(line) for line in lines]
    for symptom in SYMPTOMS:
        for line, words in zip(reversed(lines), reversed(named)):
            if symptom.words.search(words):
                return symptom, line
    return _complaint(PROGRAM_MESSAGES, lines)


def _complaint(complaints: Sequence[Complaint], lines: list[str]) -> tuple[Complaint | None, str]:
    for complaint in complaints:
        for line in reversed(lines):
            if complaint.words.search(with_names(line)):
                return complaint, line
    return None, ""


def read_log(path: str) -> str:
    """Return the last 8 MiB of a log. Raise ``ConfigError`` if it cannot be read."""
    try:
        with open(path, "rb") as file:
            if not os.path.isfile(path):
                raise ConfigError("the log is not a regular file", where=path)
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - LOG_BYTES_MAX))
            return file.read(LOG_BYTES_MAX).decode("utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"the log cannot be read: {error.strerror}", where=path, hint="name a log file of a job"
        ) from None
