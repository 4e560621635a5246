"""Explain messages of other programs, error numbers, and users' descriptions of a problem: meaning and remedy. Pure."""

from __future__ import annotations

import errno
import re
from typing import NamedTuple

PROGRAMS = "Words of other programs"
SEEN = "What you see, without an error"
COMPLAINT_MAX = 400
"""Largest number of characters of a user's own description; a log is longer."""
_NUMBER = re.compile(
    r"\[(?:Errno|WinError) (\d{1,3})\]|\b[Ee]rrno\W{1,3}(\d{1,3})\b|\bos error (\d{1,3})\b|\b(?:OS|IO)Error\((\d{1,3}),"
)


class Complaint(NamedTuple):
    """Pattern of a message or description, with the section of docs/troubleshooting.md, the meaning and the remedy."""

    words: re.Pattern[str]
    section: str
    means: str
    do: str
    command: str = ""


def with_names(line: str) -> str:
    """Return a line with the names of its error numbers appended (``ENOSPC``), so that the message's language does not matter."""
    numbers = [int(next(filter(None, match.groups()), "0")) for match in _NUMBER.finditer(line)]
    names = [errno.errorcode[number] for number in numbers if number in errno.errorcode]
    return f"{line} {' '.join(dict.fromkeys(names))}" if names else line


def _complaint(words: str, section: str, means: str, do: str, command: str = "") -> Complaint:
    return Complaint(re.compile(words, re.IGNORECASE), section, means, do, command)


PROGRAM_MESSAGES: tuple[Complaint, ...] = (
    _complaint(
        r"failed finding central directory|invalid header or archive is corrupted|PytorchStreamReader failed"
        r"|unexpected EOF, expected \d+ more|not a zip archive|pickle data was truncated|Ran out of input"
        r"|File is not a zip file|Error while deserializing header",
        PROGRAMS,
        "a file of torch.save or safetensors is truncated: its writer was killed, or the disk was full",
        "use an older file; relight import names truncated files. A Relight checkpoint is committed whole or not at all",
        "relight import --all OLD STORE --dry-run",
    ),
    _complaint(
        r"oom_kill event|oom-kill|OOMKilled|out-of-memory handler|Exceeded (job|step) memory limit|Out of memory: Kill|"
        r"Memory cgroup out of memory",
        PROGRAMS,
        "the scheduler or the kernel ended a process because the job's memory limit was reached",
        "ask for more memory, or reduce the job's use: fewer loader workers, relight.Limits(memory=…)",
        "relight doctor RUN",
    ),
    _complaint(
        r"^\s*(\S+: line \d+:\s+)?\d*\s*Killed(\s|$)|exit ?code:? (-9|137)\b|Signal 9 \(SIGKILL\)|signal: 9\b",
        PROGRAMS,
        "a process was ended by SIGKILL: usually memory ran out; otherwise a scheduler or a user killed it",
        "check whether memory ran out; a save in the background survives, and the job resumes from it",
        "dmesg | grep -i oom",
    ),
    _complaint(
        r"ibv_(reg_mr|create_\w+|alloc_\w+|open_device)",
        PROGRAMS,
        "InfiniBand could not lock or allocate memory",
        "raise the limit of locked memory: ulimit -l unlimited, also in the scheduler's and container's settings",
        "relight doctor",
    ),
    _complaint(
        r"ibv_poll_cq|Got completion .*(error|status=\d+)|IBV_WC_\w+|transport retry counter exceeded",
        PROGRAMS,
        "an InfiniBand link or the other node failed during an exchange",
        "check the link and the node at its other end; the rank that ended first is the cause",
        "relight incidents RUN",
    ),
    _complaint(
        r"DUE TO TIME LIMIT|DUE TO PREEMPTION|DUE TO NODE FAILURE|\bEvicted\b",
        PROGRAMS,
        "the scheduler ended the job or took the node",
        "have the scheduler send SIGTERM some time before: docs/guides/slurm.md; the job resumes from its last save",
        "relight ls RUN",
    ),
    _complaint(
        r"\b(EMFILE|ENFILE)\b|Too many open files",
        PROGRAMS,
        "the process has reached its limit of open files",
        "raise ulimit -n to 65536, also in the scheduler's or container's settings",
        "relight doctor",
    ),
    _complaint(
        r"can't start new thread|\bEAGAIN\b|Resource temporarily unavailable",
        PROGRAMS,
        "a limit of processes and threads of the user, the container or the machine was reached",
        "raise ulimit -u and the container's pids limit; use fewer loader workers",
        "relight doctor",
    ),
    _complaint(
        r"\bENOMEM\b",
        PROGRAMS,
        "the kernel refused to allocate memory",
        "give the job more, or reduce its use: smaller batches, fewer workers, relight.Limits(memory=…)",
        "relight doctor RUN",
    ),
    _complaint(
        r"\b(ECONNRESET|ECONNREFUSED|ETIMEDOUT|EPIPE|EHOSTUNREACH|ENETUNREACH|ENETDOWN|ECONNABORTED)\b",
        PROGRAMS,
        "a connection to another process or machine broke, or could not be made",
        "find the rank that ended first: the others only report that they lost it",
        "relight incidents RUN",
    ),
)
"""Messages of torch, Slurm, kernels and libraries."""

USER_DESCRIPTIONS: tuple[Complaint, ...] = (
    _complaint(
        r"(out of memory|\boom\b|memory).*\b(load|restor|resum)"
        r"|\b(load|restor|resum)\w*.*(out of memory|\boom\b|runs? out of memory|too much memory)",
        SEEN,
        "a load that builds the whole state next to the model needs memory for both",
        "restore() reads into the live tensors, with two small buffers. Build the model once, call restore() before other copies, and "
        "load a part with relight.load(…, only=[…])",
        "relight show RUN",
    ),
    _complaint(
        r"(inconsistent|mismatch|differ\w*|diverg\w*|not the same|out of sync|different \w+).*\b(ranks?|gpus?|nodes?|workers?|replicas?)\b"
        r"|\b(ranks?|gpus?|nodes?|replicas?)\b.*(inconsistent|mismatch|differ\w*|diverg\w*|disagree|out of sync)",
        SEEN,
        "ranks hold different values of a tensor that must be equal, or saved at different steps",
        "a save has the same step on all ranks, or fails; name components that differ by rank in per_rank=[…]; a suspect checkpoint names "
        "the tensor",
        "relight show RUN",
    ),
    _complaint(
        r"(storage|disk|bucket|s3|checkpoints?).*(cost|expensive|too (big|large|much)|fills?|full|grow)"
        r"|(cost|too much|reduce).*(storage|disk space|bucket)",
        SEEN,
        "nothing is retired, or each checkpoint is stored whole",
        "set what to keep: keep=relight.keep(last=…); store only changes: compact=relight.Compact(…); relight plan --store-price shows the "
        "cost",
        "relight prune RUN --keep-last 3 --dry-run",
    ),
    _complaint(
        r"(sav|checkpoint)\w*.*(takes? (too |so |very )?long|too long|slow\b|slows|stalls?|blocks?|minutes|hours)|slow (save|checkpoint)"
        r"|training (stops|waits|pauses|stalls).*(sav|checkpoint)|gpus?.*idle.*(sav|checkpoint)",
        SEEN,
        "training waits for a save: it runs in the foreground, memory for a snapshot is missing, or the store is slow",
        "measure the stages of a save; saves in the background block for milliseconds; relight bench suggests settings",
        "relight bench STORE",
    ),
    _complaint(
        r"(restor|resum|load|recover)\w*.*(takes? (too |so |very )?long|too long|slow\b|minutes|hours)",
        SEEN,
        "reading a checkpoint is bound by the store, or each rank reads all of it",
        "RELIGHT_CACHE caches reads on a local disk; peers and further tiers restore from memory or a near disk",
        "relight doctor RUN --ready --measure",
    ),
    _complaint(
        r"(lost|lose|losing).*(hours|days|progress|work|steps)|starts? (over|again from|from (scratch|zero|step 0))",
        SEEN,
        "intervals between saves are long, or the script does not restore",
        "call ckpt.restore() before the loop; leave save= to relight.adaptive(); relight plan shows the interval that loses least",
        "relight ls RUN",
    ),
    _complaint(
        r"loss.*(jump|spike|higher|different).*(resum|restor|restart|load)"
        r"|(resum|restor|restart)\w*.*loss.*(jump|spike|higher|different)|not (exact|reproducible|deterministic)",
        SEEN,
        "a part of the state is not restored: generators, the loader's position, a scheduler, an optimizer",
        "relight drill --prove names the first value that differs after a resume",
        "relight drill --prove SCRIPT",
    ),
    _complaint(
        r"(training|job|it) (hangs|is stuck|does not (move|continue|progress))|stuck (at|in|on)|no progress",
        SEEN,
        "a rank waits for another rank that has ended, hangs, or made a different call",
        "run it under relight run, which finds the rank, records where each rank stood, and restarts the job",
        "relight incidents RUN latest",
    ),
    _complaint(
        r"(corrupt|damaged|broken|truncated|unreadable).*(checkpoint|file|weights)|(checkpoint|file)s?.*(corrupt|damaged|broken|truncated)",
        SEEN,
        "bytes differ from what was written: the cause is a disk, a copy, or a writer that was killed",
        "relight verify reads every byte and names the damage; a restore uses the newest undamaged checkpoint",
        "relight verify RUN",
    ),
)  # fmt: skip
"""Descriptions by users, without an error message. Only tried for short texts that nothing else explains."""
