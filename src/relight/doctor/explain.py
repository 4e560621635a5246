"""What a failure's words mean: the supervisor's own classification, the section of docs/troubleshooting.md, what to do.

One taxonomy: the kind of failure is what ``relight run`` would take it for, by the same patterns. Pure, but for reading a log's end.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from relight.doctor.complaints import COMPLAINT_MAX, PEOPLE_SAY, PROGRAMS_SAY, Complaint, with_names
from relight.errors import ConfigError
from relight.supervise.classify import classify
from relight.supervise.facts import KINDS, FailureEvidence, Worker

LOG_BYTES_MAX = 8 << 20
"""Of a log, its end."""
LINES_MAX = 20_000
_LINE_MAX = 4000


class Symptom(NamedTuple):
    """Words by which a section is known. ``section`` is a heading, or a kind of the page's table."""

    words: re.Pattern[str]
    section: str
    means: str
    do: str
    command: str = ""


def _of(words: str, section: str, means: str, do: str, command: str = "") -> Symptom:
    return Symptom(re.compile(words), section, means, do, command)


SYMPTOMS: tuple[Symptom, ...] = (
    # The narrower stand first: the first that fits a line is believed.
    _of(
        r"this Checkpointer is closed",
        "This Checkpointer is closed",
        "a Checkpointer is used after its end; the message names what closed it",
        "make a new Checkpointer and call its restore()",
    ),
    _of(
        r"(still trains|may still train) (this run|\S+:)|process \d+ on (this )?host .* may still train",
        "Process … still trains this run",
        "another process has this run, and a second start may not take it over unasked",
        'stop that process, give this one another run name, or takeover="take"',
        "relight log RUN",
    ),
    _of(
        r"another handler was installed after Relight's|make no save: this is not the main thread",
        "SIGTERM: another handler was installed after Relight's, this is not the main thread",
        "that signal makes no save",
        "install handlers before the first restore() or step(), in the main thread",
    ),
    _of(
        r"ranks? saved it and .* go(?:es)? on|begins its epoch anew|goes on behind .* samples|[Rr]anks were not alike in it",
        "… ranks saved it and … go on",
        "the number of ranks is another; what a loader could not go on with begins anew, and the message says why",
        "nothing, if the message's reason is fine; docs/guarantees.md has all reasons",
    ),
    _of(
        r"stored by .*, the live (optimizer|scheduler) is ",
        "stored by AdamW, the live optimizer is SGD",
        "the script builds another class of optimizer or scheduler than the one that was saved",
        "build the stored class; or restore(strict=False), which restores what fits and lists the rest",
        "relight show RUN",
    ),
    _of(
        r"this resume may not be bit-exact",
        "This resume may not be bit-exact",
        "something that changes arithmetic differs from when the checkpoint was made; the message names it",
        "set the same number of threads and versions; or accept it: the state itself is restored to the bit",
        "relight show RUN",
    ),
    _of(
        r"every trainable tensor (saved at step \S+ )?equals the one saved",
        "Every trainable tensor equals the one saved before",
        "the model given to the Checkpointer is not the one that is trained, or the learning rate is 0",
        "give the Checkpointer the model that the optimizer holds, behind any wrapping",
    ),
    _of(
        r"no more saves are made|the ranks have lost each other",
        "No more saves are made, the ranks have lost each other",
        "a rank is gone, hangs, or made another call than the others",
        "start the job again: it resumes from the newest checkpoint",
        "relight incidents RUN",
    ),
    _of(
        r" on rank [\d, ]+ is not what it is on | is not the same on ranks \d|ranks differed in what they should have had in common",
        "… is not what it is on …, a suspect checkpoint",
        "ranks that should hold the same tensor do not",
        "name what is each rank's own in per_rank=[…]; if it should be the same, a machine computes wrongly: look at it",
        "relight log RUN",
    ),
    _of(
        r"checkpoint \S+ (\(step \d+\) )?is passed over",
        "A checkpoint is passed over",
        "it is damaged; the message names file, chunk and tensor; the run goes on from the one before",
        "look at the disk; mend it from another tier, if there is one",
        "relight verify RUN",
    ),
    _of(
        r"the record counts for nothing|record of the (run's )?log (is damaged|counts for nothing)",
        "A record of the log counts for nothing",
        "a file below log/ is damaged or missing; the others count",
        "restore it from a copy; look at the disk",
        "relight log RUN",
    ),
    _of(
        r"ignores 'create if absent'|ignores \"create if absent\"",
        "This server ignores 'create if absent'",
        "of two processes that commit at once, both would believe they did",
        "upgrade the server, or choose another; docs/guides/object-stores.md",
        "relight doctor STORE",
    ),
    _of(
        r"this run has checkpoints, the newest of step \d+, and this process restored none",
        "This run has checkpoints, … and this process restored none",
        "the script saves into a run that has checkpoints, and did not restore one: it would train past them",
        "call ckpt.restore() before the loop; to begin from scratch beside them: Checkpointer(…, fresh=True)",
        "relight ls RUN",
    ),
    _of(
        r"this run's log is missing, and \d+ checkpoint directories|the newest records of this run's log are missing|log is being rebuilt",
        "This run's log is missing, and … checkpoint directories are there",
        "log/ was lost, or is older than the checkpoint directories: the run was copied without it, or cleaned up",
        "copy log/ back from where the run came from, or rebuild it from the checkpoint directories",
        "relight recover RUN",
    ),
    _of(
        r"this run has no checkpoint that counts, and \d+ records",
        "This run has no checkpoint that counts, and … records of its log that count for nothing",
        "its log is damaged, or somebody has signed it whom trust= does not name",
        "name who has signed it; or restore the log from a copy; a run that shall begin anew gets another name",
        "relight verify RUN",
    ),
    _of(
        r"the nearest tier has no checkpoint, and",
        "The nearest tier has no checkpoint, and … may have some, but does not answer",
        "its checkpoints may be where nobody can look now",
        "make that tier answer; a run that shall begin anew gets another name",
        "relight doctor RUN",
    ),
    _of(
        r"attempt \S+ was superseded by attempt \S+ there",
        "Attempt … was superseded by attempt … there",
        "another job has taken charge of a further tier of this run",
        "find out which of the two you meant, and stop the other",
        "relight log RUN",
    ),
    _of(
        r"came damaged, and whole when read once more",
        "… came damaged, and whole when read once more",
        "memory, a cable, a network card or a server flips bits; nothing was lost, this time",
        "look at the machine's error counters",
        "ras-mc-ctl --errors",
    ),
    _of(
        r"\bFenced\b|attempt \S+ of this run was superseded|\bwas superseded by attempt\b",
        "fenced",
        "a newer attempt is in charge of this run",
        "stop this process, or give it a run of its own",
        "relight log RUN",
    ),
    _of(
        r"\bNoSpace\b|\bENOSPC\b|\bEDQUOT\b|No space left on device|[Dd]isk quota exceeded|no room for (it|a|the)"
        r"|bytes of shared memory cannot be had"
        r"|are wanted, (the machine has|the memory limit)",
        "no_space",
        "disk, quota, inodes or memory are exhausted",
        "make room; say what to keep: keep=relight.keep(last=…)",
        "relight prune RUN --keep-last 3 --dry-run",
    ),
    _of(
        r"\bUncertain\b|created, but its name may not be durable|it may have been created|cannot determine who wrote this record",
        "uncertain",
        "a commit was made and may not survive a power cut, or its answer was lost",
        "nothing: the next start reads what is true",
        "relight ls RUN",
    ),
    _of(
        r"\bWrongKey\b|this store is (not )?encrypted|none of (these|the) keys|no key at hand",
        "wrong_key",
        "the store is encrypted and no key was given that opens it; or one was given and it is not",
        "RELIGHT_KEY=file:PATH, or encrypt=",
        "relight keys status STORE",
    ),
    _of(r"\bLeaseHeld\b", "lease", "somebody else holds what this needs alone", "wait, and do it again"),
    _of(
        r"\bRankTimeout\b|(was|were) not there when the others were ",
        "late_ranks",
        "some ranks did not come to where the others waited; the error names them",
        "look at those ranks' logs; every rank must make the same calls of the Checkpointer, in the same order",
        "relight incidents RUN",
    ),
    _of(
        r"\bOthersFailed\b|given up: rank \d|another rank could not (write|save)",
        "others_failed",
        "another rank could not write its part, or gave up waiting",
        "that rank's log says why",
        "relight incidents RUN",
    ),
    _of(
        r"\bReplicasDiffer\b",
        "replicas_differ",
        "ranks that held the same tensor no longer do: one computes wrongly",
        "nothing under relight run: it goes back to before it; a machine to which that happens often is left",
        "relight incidents RUN",
    ),
    _of(
        r"\bDiverged\b|\bloss is (nan|inf)\b",
        "diverged",
        "the loss is no number, or jumped and stayed",
        "nothing under relight run: it goes back to before it",
        "relight incidents RUN",
    ),
    _of(
        r"\bUnsafeContent\b|a symbolic link(,| where)|no name inside a store|comes from a newer Relight|features? .* (is|are) not known",
        "unsafe",
        "a file asks for what no reader may do, or comes from a newer Relight",
        "upgrade, or do not trust that store",
        "relight version",
    ),
    _of(
        r"\bRunRemoved\b|the run's log is gone",
        "removed",
        "the run's directory, or its log, was moved or deleted while it trains",
        "move it back; or give on_failure=relight.failure_policy(begin_again=True), which begins a new log there",
    ),
    _of(
        r"\bRunReplaced\b|the run's directory was replaced",
        "replaced",
        "another directory, such as an older copy, is in the place of the run's while it trains",
        "move the trained directory back; or stop, and start again to continue from the copy",
        "relight log RUN",
    ),
    _of(
        r"\bCorruptCheckpoint\b|is not what was committed|bytes long, \d+ were committed|none of .* checkpoints? can be restored",
        "corrupt",
        "bytes are not what was committed, or are gone",
        "look at all damage, and at the disk",
        "relight verify RUN",
    ),
    _of(
        r"\bIncompatibleState\b|stored and live state do not fit",
        "incompatible",
        "stored and live state do not fit, or a value cannot be saved",
        "fix what is listed; strict=False, only=[…], map={…}",
        "relight show RUN",
    ),
    _of(
        r"\bInternalError\b|internal error in Relight",
        "internal",
        "a fault in Relight's own code; the store did not fail",
        "report the traceback; training continues, later saves are tried",
        "relight doctor RUN",
    ),
    _of(
        r"\bSaveFailed\b|the save at step \d+ failed",
        "save_failed",
        "a save did not become a checkpoint; training may go on",
        "see its cause, in the lines behind it",
        "relight doctor RUN",
    ),
    _of(r"\bConfigError\b|\[supervise\] has no ", "config", "an option or argument is wrong", "do what the arrow behind it says"),
    _of(
        r"\bCheckpointNotFound\b|there is nothing here|no run '[^']*'|[Nn]o Relight store",
        "not_found",
        "no such store, run, tag, step, id, or file",
        "look at what is there; check the path",
        "relight ls STORE",
    ),
    _of(
        r"\bStoreUnavailable\b|\b(EACCES|EROFS|EIO|ESTALE|EPERM)\b|Read-only file system|Stale file handle|Input/output error",
        "store",
        "the store refused an operation",
        "look at permissions, mounts, the disk's health; saves go on being tried",
        "relight doctor STORE",
    ),
    # Last: these warn of what is no failure, and a job's log may have many of them.
    _of(
        r"optimizer \S+ steps \d+ parameters of .*, and no checkpoint has its state",
        "optimizer … steps … parameters of …, and no checkpoint has its state",
        "the script has an optimizer that was not given to the Checkpointer: after a resume its state would begin from zero",
        "give it to the Checkpointer under a name of its own: Checkpointer(…, optimizer2=opt)",
    ),
    _of(
        r"step \d+: save postponed, ",
        "step …: save postponed",
        "the save before is still being written, and no snapshot slot is free; the save is taken at the next step that has one",
        "nothing; if it happens often, save less often, or give relight.Limits(memory=) room for another slot",
    ),
)

_SILENT = ("unknown", "memory", "device memory", "killed")
"""Kinds of which a person's own words say more than the kind does."""

_BY_KIND: dict[str, tuple[str, str]] = {
    "user": ("correct it: starting again would only repeat it", ""),
    "memory": ("give the job more, or have it take less: smaller batches, fewer workers, relight.Limits(memory=…)", "relight doctor RUN"),
    "device memory": ("a smaller micro-batch (ckpt.micro_batch_split), or activation checkpointing", ""),
    "hardware": ("take the machine out of the job and look at it", "dmesg --level=err,crit"),
    "network": ("see which rank ended first: the others only say that they lost it", "relight incidents RUN"),
    "storage": ("look at the store: its room, its mount, its disk", "relight doctor STORE"),
    "data": ("look at the sample or the worker that it names", ""),
    "numerical": ("go back to before it, and skip what it was trained on: relight run does both", "relight incidents RUN"),
    "preemption": ("say how long there is: RELIGHT_GRACE_S; a save is made before the end", ""),
    "hang": ("see where the ranks stood", "relight incidents RUN latest"),
    "crash": ("look for a stack above it; run with PYTHONFAULTHANDLER=1", ""),
    "killed": ("see whether memory ran out", "dmesg | grep -i oom"),
    "fenced": ("stop this process, or give it a run of its own", "relight log RUN"),
    "unknown": ("run it under relight run: it writes down what every rank was at", "relight incidents RUN"),
}


@dataclass(frozen=True, slots=True)
class Explained:
    """What happened, as far as words tell. ``kind`` is one of the supervisor's; ``section`` a heading, or a row, of troubleshooting."""

    kind: str
    kind_means: str
    line: str
    """The words that tell."""
    section: str
    means: str
    do: str
    command: str
    clues: tuple[str, ...]

    @property
    def known(self) -> bool:
        """Whether anything was recognised."""
        return bool(self.section) or self.kind != "unknown"

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"known": self.known, **asdict(self)}


def explain(text: str) -> Explained:
    """What ``text``, an error's words or the end of a log, speaks of. Always gives one; ``known`` says whether it was recognised."""
    lines = [line[:_LINE_MAX] for line in text.splitlines() if line.strip()][-LINES_MAX:]
    failure = classify(FailureEvidence(workers=(Worker(0, exit=1, tail=tuple(lines)),)))
    symptom, line = _symptom(lines)
    kind = failure.kind
    if symptom is None and kind in _SILENT and len(text) <= COMPLAINT_MAX:
        symptom, line = _complaint(PEOPLE_SAY, lines)
    clue = failure.clues[0].what.partition(": ")[2] if failure.clues else ""
    means, do = (symptom.means, symptom.do) if symptom is not None else (KINDS[kind], _BY_KIND[kind][0])
    return Explained(
        kind=kind, kind_means=KINDS[kind], line=(line or clue or (lines[-1] if lines else "")).strip()[:500],
        section=symptom.section if symptom is not None else "", means=means, do=do,
        command=symptom.command if symptom is not None else _BY_KIND[kind][1],
        clues=tuple(clue.what for clue in failure.clues[:5]),
    )  # fmt: skip


def _symptom(lines: list[str]) -> tuple[Symptom | Complaint | None, str]:
    """What fits, the narrowest first; of several lines that fit it, the last. Error numbers count as their names."""
    named = [with_names(line) for line in lines]
    for symptom in SYMPTOMS:
        for line, words in zip(reversed(lines), reversed(named)):
            if symptom.words.search(words):
                return symptom, line
    return _complaint(PROGRAMS_SAY, lines)


def _complaint(complaints: Sequence[Complaint], lines: list[str]) -> tuple[Complaint | None, str]:
    for complaint in complaints:
        for line in reversed(lines):
            if complaint.words.search(with_names(line)):
                return complaint, line
    return None, ""


def read_log(path: str) -> str:
    """The end of a log, up to 8 MiB. ``ConfigError`` for what cannot be read."""
    try:
        with open(path, "rb") as file:
            if not os.path.isfile(path):
                raise ConfigError("a log is a file", where=path)
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - LOG_BYTES_MAX))
            return file.read(LOG_BYTES_MAX).decode("utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"the log cannot be read: {error.strerror}", where=path, hint="name a file that a job has written") from None
