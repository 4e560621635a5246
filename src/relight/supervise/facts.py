"""Evidence of a failure, the failure that it is classified as, and the decision about it. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from relight.heartbeat import Heartbeat

KINDS: dict[str, str] = {
    "user": "an error in the script or its settings, which would only repeat",
    "memory": "the host's memory, or the job's share of it, was not enough",
    "device memory": "an accelerator's memory was not enough",
    "hardware": "a device, its memory or its link is broken",
    "network": "ranks lost each other, and none is known to have failed first",
    "storage": "a file system or object store refused, or was full",
    "data": "a sample or a loader's process",
    "numerical": "a NaN or infinite value, or a loss spike",
    "preemption": "the machine is wanted back",
    "hang": "no rank makes progress",
    "crash": "native code ended a process",
    "killed": "a process was killed, and the sender of the signal is unknown",
    "fenced": "another attempt of this run has taken over",
    "unknown": "no evidence shows the cause",
}


class Clue(NamedTuple):
    """One piece of evidence for a kind of failure."""

    kind: str
    weight: int
    """How certain it is on its own, from 0 to 100."""
    what: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Worker:
    """One rank at the end of an incarnation of the job. Times of the monotonic clock."""

    rank: int
    exit: int | None = None
    """Its exit code, negative for a signal; None: it was still running."""
    died_at: float = 0.0
    error: str = ""
    """The exception that it recorded, type and message; empty if there was none."""
    tail: tuple[str, ...] = ()
    """The last lines it printed."""
    beat: Heartbeat | None = None
    state: str = ""
    """The kernel's state of the process: ``R``, ``S``, ``D``, ``T``, ``Z``."""
    stacks: str = ""
    stopped: bool = False
    """Whether the supervisor ended it."""


class Departure(NamedTuple):
    """Other nodes that were asked to leave, so that this node's ranks ended with theirs."""

    nodes: str
    """Each node's name, and what asked it to leave."""
    left: int
    """How many nodes are left."""
    least: int
    """How many the job needs."""


@dataclass(frozen=True, slots=True)
class FailureEvidence:
    """Evidence about an incarnation of a job that has ended, or must end."""

    workers: tuple[Worker, ...]
    hung: str = ""
    """Why it counts as hung; empty if it does not."""
    asked_to_end: str = ""
    """The signal or notice that asked the supervisor to end the job, in words; empty if there was none."""
    oom_kills: int = 0
    """How many processes of this job the kernel killed for lack of memory."""
    kernel: tuple[str, ...] = ()
    """Lines of the kernel's log."""
    full: tuple[str, ...] = ()
    """File systems without free space."""
    departure: Departure | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A classified failure."""

    kind: str
    why: str
    """The strongest clue, in words."""
    rank: int | None
    """The rank that probably failed first."""
    step: int
    """The last step that all ranks had completed; −1: none."""
    steps: int
    """How many steps were completed in this incarnation."""
    words: str
    """The message without numbers and addresses: equal for two failures with the same cause."""
    clues: tuple[Clue, ...] = ()
    onset: int | None = None
    """The first step that was wrong, if that is known to be before the last."""
    restored: int = -2
    """The step that this incarnation restored; −1: none; −2: it had not called restore yet."""
    durable: int = -1
    """The newest step that is stored."""
    here: bool = True
    """Whether a rank of this machine failed first; True if that is unknown."""
    departure: Departure | None = None
    """Set if the incarnation ended because other nodes were asked to leave."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The action after a failure."""

    action: str
    """One of ``decide.ACTIONS``."""
    reason: str
    delay_s: float = 0.0
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the next incarnation's ranks."""
