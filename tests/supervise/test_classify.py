"""Classification of failures by exit codes, messages and heartbeats."""

from __future__ import annotations

import signal

import pytest

from relight.heartbeat import Heartbeat
from relight.supervise.classify import alike, classify, kernel_kind
from relight.supervise.facts import KINDS, Departure, FailureEvidence, Worker

WELL = Heartbeat(steps=10, step=109, restored=99, durable=104, phase="training")
NEW = Heartbeat(phase="starting")
PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:2817"

ONE = {
    "TypeError: f() missing 1 required argument": "user",
    "relight.errors.ConfigError: a component cannot be called 'rng'": "user",
    "relight.errors.IncompatibleState: 2 values cannot be saved": "user",
    "ModuleNotFoundError: No module named 'nmupy'": "user",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB": "device memory",
    "MemoryError: ": "memory",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory": "memory",
    "RuntimeError: CUDA error: uncorrectable ECC error encountered": "hardware",
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered": "hardware",
    "RuntimeError: CUDA error: device-side assert triggered": "user",
    "OSError: [Errno 28] No space left on device": "storage",
    "OSError: [Errno 116] Stale file handle: '/data/shard-3'": "storage",
    "relight.errors.StoreUnavailable: the store did not answer": "storage",
    "relight.errors.NoSpace: the disk is full": "storage",
    "relight.errors.StoreUnavailable: listing a directory failed: Too many open files (EMFILE) [/runs/a/log]": "user",
    "relight.errors.NoMemory: no memory for a tensor of 8 bytes: refused [model/w]": "memory",
    "RuntimeError: DataLoader worker (pid 4711) exited unexpectedly with exit code 1": "data",
    "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)": "data",
    "PIL.UnidentifiedImageError: cannot identify image file": "data",
    "relight.errors.Diverged: the loss is nan at step 110 [onset 110]": "numerical",
    "FloatingPointError: gradients are not finite": "numerical",
    PEER: "network",
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, ncclSystemError": "network",
    "relight.errors.Fenced: attempt 3 of this run was superseded by attempt 4": "fenced",
    "relight.errors.LeaseHeld: process 7 on this host (n1), last record 4 s ago, still trains this run [/data/runs/demo]": "fenced",
    "ValueError: the batch size must divide 8": "user",
}


@pytest.mark.parametrize("words", ONE)
def test_by_the_message_of_the_exception(words: str) -> None:
    """An exception of one rank has the same kind whether it was recorded or only printed."""
    for worker in (
        Worker(0, 1, 5.0, words, beat=WELL),
        Worker(0, 1, 5.0, "", ("Traceback …", "  File", words, ""), WELL),
    ):
        failure = classify(FailureEvidence((worker,)))
        assert failure.kind == ONE[words], failure
        assert words[:40].strip() in failure.why and failure.rank == 0
        assert (failure.step, failure.steps, failure.restored, failure.durable) == (109, 10, 99, 104)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        ("SIGSEGV", "crash"),
        ("SIGABRT", "crash"),
        ("SIGKILL", "killed"),
        ("SIGTERM", "preemption"),
        ("SIGBUS", "memory"),
    ],
)
def test_by_a_signal(number: str, kind: str) -> None:
    """A death by a signal has the kind of that signal."""
    failure = classify(
        FailureEvidence((Worker(0, -signal.Signals[number].value, 5.0, beat=WELL), Worker(1, beat=WELL, stopped=True)))
    )
    assert (failure.kind, failure.rank) == (kind, 0) and number in failure.why


def test_a_kill_for_lack_of_memory_is_distinguished() -> None:
    """A kill for lack of memory is detected by the kernel's counter or log."""
    dead = Worker(1, -9, 5.0, beat=WELL)
    assert classify(FailureEvidence((Worker(0, beat=WELL), dead))).kind == "killed"
    counted = classify(FailureEvidence((Worker(0, beat=WELL), dead), oom_kills=1))
    assert (counted.kind, counted.rank) == ("memory", 1)
    logged = classify(
        FailureEvidence(
            (Worker(0, beat=WELL), dead), kernel=("Memory cgroup out of memory: Killed process 4711 (python)",)
        )
    )
    assert logged.kind == "memory"


@pytest.mark.parametrize("first", [0, 1, 2])
def test_who_lost_another_is_not_the_cause(first: int) -> None:
    """The rank that failed by itself is the cause, in whatever order ends are noticed."""

    def of(rank: int) -> Worker:
        if rank == first:
            return Worker(rank, 1, 5.3, "IndexError: list index out of range", beat=WELL)
        return Worker(rank, 1, 5.0 + rank / 10, PEER, beat=WELL)

    failure = classify(FailureEvidence(tuple(map(of, range(3)))))
    assert (failure.kind, failure.rank) == ("user", first)
    killed = classify(
        FailureEvidence(
            tuple(Worker(r, -9, 5.3, beat=WELL) if r == first else of(r) for r in range(3) if r == first or r != first)
        )
    )
    assert killed.rank == first and killed.kind == "killed"


@pytest.mark.parametrize("code", [3, 1])
def test_a_rank_that_ended_without_a_message_is_the_cause(code: int) -> None:
    """A rank that ended without a message is the cause, although ranks that lost it have long messages."""
    failure = classify(FailureEvidence((Worker(0, code, 5.1, beat=WELL), Worker(1, 1, 5.0, PEER, beat=WELL))))
    assert (failure.kind, failure.rank) == ("unknown", 0)


def test_ranks_that_were_stopped_are_no_clue() -> None:
    """The supervisor's own SIGKILL is no evidence."""
    failure = classify(
        FailureEvidence((Worker(0, -9, 0.0, beat=WELL, stopped=True), Worker(1, 3, 5.0, "", ("loading",), WELL)))
    )
    assert failure.rank == 1 and failure.kind == "unknown" and "exit code 3" in failure.why


def test_a_rank_that_reported_its_error_and_ended_slowly_is_the_cause() -> None:
    """A rank that reported its error is the cause, although it was stopped before it ended."""
    slow = Worker(0, None, 0.0, "TypeError: object of type 'int' has no len()", beat=NEW, stopped=True)
    failure = classify(FailureEvidence((slow, Worker(1, 1, 5.0, PEER, beat=NEW))))
    assert (failure.kind, failure.rank) == ("user", 0)


def test_hangs_preemptions_and_nothing() -> None:
    """Failures that the supervisor observed have their kinds. Failures without evidence are unknown."""
    two = (Worker(0, beat=WELL, stopped=True), Worker(1, beat=WELL, stopped=True))
    assert classify(FailureEvidence(two, hung="no progress: rank 1")).kind == "hang"
    assert classify(FailureEvidence(two, asked_to_end="SIGTERM came")).kind == "preemption"
    assert classify(FailureEvidence(two)).kind == "unknown"
    assert classify(FailureEvidence(())).kind == "unknown"


def test_usage_errors_are_the_users() -> None:
    """A usage error of argparse is detected by exit code and message."""
    tail = ("usage: train.py [-h] [--lr LR]", "train.py: error: unrecognized arguments: --lrr 3")
    assert classify(FailureEvidence((Worker(0, 2, 5.0, "", tail, NEW),))).kind == "user"


def test_the_onset_is_read() -> None:
    """The onset of a jump of the loss is read from the message."""
    message = (
        "relight.errors.Diverged: the loss jumped from 2.1 to 9.4 at step 105, and stayed there for 5 steps [onset 105]"
    )
    assert classify(FailureEvidence((Worker(0, 1, 5.0, message, beat=WELL),))).onset == 105


def test_words_are_compared_without_numbers() -> None:
    """Addresses, counts and long names differ between incarnations and are ignored."""
    assert alike("at 0x7f00 of 12 in 'x'") == alike("at 0xffee of 13 in 'x'") != alike("at 0xffee of 13 in 'y'")


def test_all_kinds_are_known() -> None:
    """Each pattern has a kind of the table."""
    assert set(ONE.values()) <= set(KINDS)


def test_a_rank_that_computes_wrongly_differs_from_most() -> None:
    """All ranks report a difference. Between two ranks the wrong one is unknown."""
    most = "relight.errors.ReplicasDiffer: model/0.weight on rank 2 is not what it is on 0, 1, 3 [before step 7]"
    result = classify(FailureEvidence(tuple(Worker(rank, 1, died_at=float(rank), error=most) for rank in range(4))))
    assert (result.kind, result.rank) == ("hardware", 2)
    two = "relight.errors.ReplicasDiffer: model/0.weight is not the same on ranks 0, 1 [before step 7]"
    result = classify(FailureEvidence(tuple(Worker(rank, 1, died_at=float(rank), error=two) for rank in range(2))))
    assert result.kind == "hardware" and result.rank in (0, 1)


def test_a_warning_is_not_what_a_rank_ended_with() -> None:
    """A rank logged a connection warning with the library's stack and later ended without a message (``make lives``,
    seed 309)."""
    warned = (
        "[W1123 05:10:01.123456789 TCPStore.cpp:340] [c10d] Connection closed by peer",
        "frame #2: c10::DistNetworkError::DistNetworkError(c10::SourceLocation, std::string) + 0x72 (0x7fc954d85022 in libc10.so)",
        "[rank1]:[W1123 05:10:01.2 ProcessGroupNCCL.cpp:1] Warning: Connection refused", "W1123 05:10:01.2 17 torch/x.py:3] Broken pipe",
    )  # fmt: skip
    failure = classify(FailureEvidence((Worker(0, beat=WELL, stopped=True), Worker(1, 3, 5.0, "", warned, WELL))))
    assert (failure.kind, failure.rank, failure.why) == ("unknown", 1, "rank 1 ended with exit code 3")


@pytest.mark.parametrize(
    "line",
    [
        "pcieport 0000:00:01.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Receiver ID)",
        "nvme 0000:01:00.0: PCIe Bus Error: severity=Correctable, type=Physical Layer, (Receiver ID)",
        "mce: [Hardware Error]: Machine check events logged",
        "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0",
    ],
)
def test_an_error_that_the_hardware_corrected_is_no_clue(line: str) -> None:
    """The machine is healthy: the script's error, or the request to leave, is the cause."""
    assert kernel_kind(line) is None
    worker = Worker(0, 1, 5.0, "ValueError: the batch size must divide 8", beat=WELL)
    assert classify(FailureEvidence((worker,), kernel=(line,))).kind == "user"
    leaving = FailureEvidence((worker,), kernel=(line,), departure=Departure("node b (SIGTERM came)", 1, 1))
    assert classify(leaving).kind == "preemption"


@pytest.mark.parametrize(
    "line",
    [
        "pcieport 0000:00:01.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
        "pcieport 0000:00:01.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer",
        "mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 7: be00000000800400",
        "Kernel panic - not syncing: Fatal machine check",
        "mce: [Hardware Error]: Processor context corrupt",
        "mce: Uncorrected hardware memory error in user-access at 1f2e3d000",
        "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0",
    ],
)
def test_an_uncorrected_error_is_the_hardware_s(line: str) -> None:
    """An error that the hardware could not correct explains the end better than the script's message."""
    assert kernel_kind(line) == "hardware"
    worker = Worker(0, 1, 5.0, "ValueError: the batch size must divide 8", beat=WELL)
    assert classify(FailureEvidence((worker,), kernel=(line,))).kind == "hardware"
