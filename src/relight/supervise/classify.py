"""Classifies a failure from its evidence.

Each clue has a kind of failure and a weight. The heaviest clue decides; all clues are kept. Pure.
"""

from __future__ import annotations

import errno
import math
import re
import signal
from collections.abc import Iterator

from relight.heartbeat.heartbeat_page import NOT_YET
from relight.supervise.facts import Clue, Failure, FailureEvidence, Worker

_WORDS: tuple[tuple[str, str, int], ...] = (
    # pattern of a message, kind, weight; the first pattern that matches decides, so narrower patterns come first
    (r"relight\.errors\.Fenced|\bFenced: ", "fenced", 95),
    (r"\bLeaseHeld: .*still trains this run", "fenced", 93),  # a restart would only try again
    (r"relight\.errors\.(ConfigError|IncompatibleState)|\b(ConfigError|IncompatibleState): ", "user", 90),
    (r"\bDiverged: |\bFloatingPointError\b|returned nan values|\bloss is (nan|inf)", "numerical", 90),
    (r"\bReplicasDiffer: ", "hardware", 92),
    (r"CUDA out of memory|torch\.OutOfMemoryError|HIP out of memory|CUBLAS_STATUS_ALLOC_FAILED", "device memory", 90),
    (r"\bMemoryError\b|DefaultCPUAllocator: can't allocate memory|Cannot allocate memory|std::bad_alloc", "memory", 85),
    (r"\bNoMemory: ", "memory", 85),
    (r"oom_kill event|oom-kill|OOMKilled|out-of-memory handler|Exceeded (job|step) memory limit", "memory", 85),
    (r"ibv_poll_cq|Got completion .*error|IBV_WC_\w+|transport retry counter exceeded", "network", 60),
    (
        r"failed finding central directory|archive is corrupted|unexpected EOF, expected \d+ more|pickle data was truncated",
        "storage",
        80,
    ),
    (r"DUE TO (TIME LIMIT|PREEMPTION)|\bEvicted\b", "preemption", 80),
    (r"DUE TO NODE FAILURE", "hardware", 85),
    (r"device-side assert|index out of bounds: .* < ", "user", 75),
    (
        r"uncorrectable ECC|\bXid\b|unspecified launch failure|illegal memory access|GPU has fallen off|CUDA error",
        "hardware",
        85,
    ),
    (
        r"\bEMFILE\b|Too many open files",
        "user",
        86,
    ),  # a limit of the process, also if a store reports it: waiting does not raise it
    (r"No space left on device|Disk quota exceeded|\b(NoSpace|StoreUnavailable|LeaseHeld|SaveFailed): ", "storage", 85),
    (r"Stale file handle|Read-only file system|Input/output error|Transport endpoint is not connected", "storage", 80),
    (r"\b(CorruptCheckpoint|CheckpointNotFound|WrongKey|UnsafeContent): ", "storage", 80),
    (r"DataLoader worker .* (exited unexpectedly|is killed)|Caught \w+ in DataLoader worker", "data", 80),
    (r"JSONDecodeError|UnicodeDecodeError", "data", 80),
    (
        r"UnidentifiedImageError|UnpicklingError|zipfile\.BadZipFile|corrupt(ed)? (sample|record|image|shard)",
        "data",
        80,
    ),
    (
        r"Watchdog caught collective operation timeout|ncclSystemError|ncclRemoteError|NCCL (error|communicator was aborted)",
        "network",
        60,
    ),
    (
        r"Connection (closed|reset) by peer|Connection refused|Broken pipe|Socket Timeout|Timed out waiting|No route to host",
        "network",
        40,
    ),
    (r"\bRankTimeout: |DistNetworkError|DistStoreError|RendezvousTimeout", "network", 50),
    (r"^\s*(\S+: line \d+:\s+)?\d*\s*Killed(\s|$)|exit ?code:? (-9|137)\b", "killed", 50),
    (r"^usage: |error: (unrecognized|the following) arguments", "user", 80),
    (r"\b(Syntax|Indentation|Import|ModuleNotFound|Name|Attribute|Type|NotImplemented)Error: ", "user", 75),
    (r"\b(Key|Index|Value|Assertion|FileNotFound|Permission|IsADirectory|NotADirectory)Error: ", "user", 60),
    (r"\b\w+(Error|Exception): ", "user", 30),
)
_ERRNO = re.compile(r"\[Errno (\d{1,3})\]|\b[Ee]rrno\W{1,3}(\d{1,3})\b|\bos error (\d{1,3})\b|\bOSError\((\d{1,3}),")
_BY_ERRNO: dict[int, tuple[str, int]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), ("storage", 85)),
    **dict.fromkeys(
        (errno.EIO, errno.ESTALE, errno.EROFS, errno.EUCLEAN, errno.EREMOTEIO, errno.ENOTCONN, errno.ESHUTDOWN), ("storage", 80),
    ),
    errno.ENOMEM: ("memory", 85),
    **dict.fromkeys(
        (errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.ETIMEDOUT, errno.EPIPE, errno.EHOSTUNREACH, errno.ENETUNREACH,
         errno.ENETDOWN), ("network", 40),
    ),
}  # fmt: skip
"""Kind and weight by errno, which is the same in every language of the message."""
_PATTERNS = tuple((re.compile(pattern), kind, weight) for pattern, kind, weight in _WORDS)
_SIGNALS = {
    signal.SIGSEGV: ("crash", 50), signal.SIGABRT: ("crash", 45), signal.SIGILL: ("crash", 60), signal.SIGFPE: ("crash", 60),
    signal.SIGBUS: ("memory", 55), signal.SIGKILL: ("killed", 50), signal.SIGTERM: ("preemption", 50), signal.SIGINT: ("preemption", 50),
    signal.SIGHUP: ("preemption", 50), signal.SIGQUIT: ("preemption", 45), signal.SIGXCPU: ("preemption", 60),
}  # fmt: skip
_KERNEL = (
    (re.compile(r"Out of memory|oom-kill|Memory cgroup out of memory"), "memory", 80),
    (re.compile(r"NVRM: Xid \([^)]*\): (13|31|43|45)\b"), "crash", 45),  # errors of the program, on a healthy device
    (re.compile(r"NVRM: Xid|EDAC .*UE|PCIe Bus Error|fallen off the bus"), "hardware", 85),
    (re.compile(r"(?i)uncorrect|fatal machine check|machine check exception|context corrupt"), "hardware", 85),
    (re.compile(r"hardware memory corruption"), "hardware", 85),
    (re.compile(r"I/O error|EXT4-fs error|XFS .*(shutdown|corruption)|nfs: server .* not responding"), "storage", 70),
    (re.compile(r"Link is Down|NIC Link|mlx5.*(error|fatal)"), "network", 65),
)
_CORRECTED = re.compile(r"severity=Correct(ed|able)|\bCorrect(ed|able) error|EDAC .*\bCE\b")
"""Lines of errors that the hardware corrected. They occur on healthy machines, and end no process."""
_FOLLOWS = 5
"""Largest weight of a clue from a rank that ended after another one. It may only have noticed the first failure."""
_ASIDE = re.compile(r"\s*frame #\d+: |(\[rank\d+\]:)?\[?W\d{4} \d\d:")
"""Lines that do not explain an end: a library's warnings, and their stack frames."""
_ONSET = re.compile(r"\[onset (\d{1,18})\]")
_ODD = re.compile(r"\bReplicasDiffer: \S+ on rank (\d{1,9}) is not what it is on ")
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?|'[^']{40,}'")


def classify(facts: FailureEvidence) -> Failure:
    """Return the failure that fits the evidence best; of kind ``unknown`` if there is no clue."""
    clues = sorted(_clues(facts), key=lambda clue: -clue.weight)
    best = clues[0] if clues else Clue("unknown", 0, "no evidence shows what happened")
    source = next((worker for worker in facts.workers if worker.rank == best.rank), None)
    beats = [worker.beat for worker in facts.workers if worker.beat is not None]
    message = (source.error or _last_words(source.tail)) if source is not None else ""
    onset = _ONSET.search(message) if best.kind == "numerical" else None
    return Failure(
        onset=int(onset[1]) if onset else None,
        kind=best.kind,
        why=best.what,
        rank=best.rank if best.rank is not None else _first(facts),
        # what was restored has been ended
        step=max(-1, min((max(beat.step, beat.restored) for beat in beats), default=-1)),
        steps=min((beat.steps for beat in beats), default=0),
        words=alike(message if _match_pattern(message) else best.what),
        clues=tuple(clues),
        restored=max((beat.restored for beat in beats), default=NOT_YET),
        durable=max((beat.durable for beat in beats), default=-1),
        departure=facts.departure if best.kind == "preemption" and not facts.asked_to_end else None,
    )


def is_a_loss(words: str) -> bool:
    """Return whether a rank's message reports only that it lost another rank."""
    return (_match_pattern(words) or ("", 0))[0] == "network"


def kernel_kind(line: str) -> str | None:
    """Return the kind of failure that a line of the kernel's log reports; None if it reports none."""
    return next((kind for kind, _ in _kernel_matches(line)), None)


def _kernel_matches(line: str) -> list[tuple[str, int]]:
    if _CORRECTED.search(line):
        return []
    return [(kind, weight) for pattern, kind, weight in _KERNEL if pattern.search(line)]


def alike(words: str) -> str:
    """Return a message without numbers, addresses and long quotes: equal for two failures with one cause."""
    return _NUMBERS.sub("#", " ".join(words.split()))[:300]


def _clues(facts: FailureEvidence) -> Iterator[Clue]:
    if facts.asked_to_end:
        yield Clue("preemption", 100, facts.asked_to_end)
    elif facts.departure is not None:
        yield Clue("preemption", 65, f"asked to leave: {facts.departure.nodes}")
    elif any(worker.beat is not None and worker.beat.unsupervised for worker in facts.workers):
        yield Clue("killed", 64, "the relight run of another node was killed: the ranks saved and ended with its ranks")
    if facts.hung:
        yield Clue("hang", 70, facts.hung)
    if facts.oom_kills:
        yield Clue(
            "memory", 90, f"the kernel killed {facts.oom_kills} of its processes for lack of memory", _killed(facts)
        )
    for line in facts.kernel:
        for kind, weight in _kernel_matches(line)[:1]:
            yield Clue(kind, weight, f"kernel: {line.strip()[:200]}")
    for full_path in facts.full:
        yield Clue("storage", 30, f"{full_path} is full")
    first = _first(facts)
    for worker in facts.workers:
        yield from (_weighed(clue, worker, first) for clue in _of(worker))


def _of(worker: Worker) -> Iterator[Clue]:
    message = worker.error or _last_words(worker.tail)
    if worker.exit is not None and worker.exit < 0 and not worker.stopped:
        kind, weight = (
            _SIGNALS.get(signal.Signals(-worker.exit), ("crash", 40)) if _is_signal(-worker.exit) else ("crash", 40)
        )
        yield Clue(kind, weight, f"rank {worker.rank} was ended by {_name(-worker.exit)}", worker.rank)
    if worker.exit or worker.error:
        match = _match_pattern(message) if message else None
        if match is not None:
            kind, weight = match
            if kind == "user" and worker.beat is not None and worker.beat.steps:
                weight -= 15  # the rank ran for some steps, so the error may not repeat
            # the message names the rank that computed wrongly, which is not the rank that reports it
            differing = _ODD.search(message)
            yield Clue(
                kind,
                weight,
                f"rank {worker.rank}: {' '.join(message.split())[:300]}",
                worker.rank if differing is None else int(differing[1]),
            )
        elif worker.exit is not None and worker.exit > 0:
            kind, weight = ("user", 40) if worker.exit == 2 else ("unknown", 10)
            yield Clue(kind, weight, f"rank {worker.rank} ended with exit code {worker.exit}", worker.rank)


def _weighed(clue: Clue, worker: Worker, first: int | None) -> Clue:
    """Limit the weight of a clue from a rank that ended later, unless the loss of another rank cannot explain it."""
    if clue.rank == first or first is None:
        return clue._replace(weight=min(100, clue.weight + 5))
    return (
        clue._replace(weight=min(clue.weight, _FOLLOWS))
        if clue.kind in ("network", "unknown", "user", "crash")
        else clue
    )


def _match_pattern(text: str) -> tuple[str, int] | None:
    by_words = next(((kind, weight) for pattern, kind, weight in _PATTERNS if pattern.search(text)), None)
    numbers = [int(next(filter(None, match.groups()), "0")) for match in _ERRNO.finditer(text)]
    by_number = next((_BY_ERRNO[number] for number in reversed(numbers) if number in _BY_ERRNO), None)
    if by_words is None or by_number is None:
        return by_words or by_number
    return by_number if by_words[0] == "user" or by_number[1] > by_words[1] else by_words


def _last_words(tail: tuple[str, ...]) -> str:
    """Return the last line that a known pattern matches; if none does, the last line."""
    lines = [line.rstrip() for line in tail if line.strip() and not _ASIDE.match(line)]
    matching = [line for line in lines if _match_pattern(line)]
    return (matching or lines or [""])[-1]


def _first(facts: FailureEvidence) -> int | None:
    """Return the rank that failed first.

    It ended by itself, or by a signal of another process, or it had recorded its exception.
    """
    ended = [
        worker for worker in facts.workers if worker.error or (worker.exit not in (None, 0) and not worker.stopped)
    ]
    # a rank that lost the connection to another rank has not failed first, even if its end was noticed first
    causes = [worker for worker in ended if not is_a_loss(worker.error or _last_words(worker.tail))] or ended
    return min(causes, key=lambda worker: worker.died_at or math.inf).rank if causes else None


def _killed(facts: FailureEvidence) -> int | None:
    return next(
        (worker.rank for worker in facts.workers if worker.exit == -signal.SIGKILL and not worker.stopped), None
    )


def _is_signal(number: int) -> bool:
    return number in {signum.value for signum in signal.Signals}


def _name(number: int) -> str:
    return signal.Signals(number).name if _is_signal(number) else f"signal {number}"
